"""The criteria of a study, each judged at every level of its grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from fl_lightning.errors import InputError
from fl_lightning.study.comparison import Comparison, Levels, flipped
from fl_lightning.study.criteria import Criterion, Quantity
from fl_lightning.study.judgement import Decision, Judgement, judge, judge_p
from fl_lightning.study.runs import higher_is_better
from fl_lightning.study.statistics import paired_test


@dataclass(frozen=True)
class Verdict:
    """Of a criterion.

    Args:
        criterion: which.
        judgements: one per level of the grid (of the axes but the stressor's, for a criterion with ``drop``).
    """

    criterion: Criterion
    judgements: Sequence[tuple[Levels, Judgement]]

    @property
    def decision(self) -> Decision:
        """It holds when it holds at every level, and fails when it fails at any."""
        decisions = [judgement.decision for _, judgement in self.judgements]
        if "fails" in decisions:
            return "fails"
        return "holds" if decisions and set(decisions) == {"holds"} else "undecided"


def verdicts(comparison: Comparison) -> list[Verdict]:
    """Of every criterion, in the study's order."""
    return [Verdict(criterion, list(_judgements(comparison, criterion))) for criterion in comparison.criteria]


def _judgements(comparison: Comparison, criterion: Criterion) -> Iterator[tuple[Levels, Judgement]]:
    if criterion.is_p:
        for levels in comparison.levels:
            yield levels, _judge_p(comparison, criterion, levels)
    elif criterion.mentions("drop"):
        for others in comparison.other_levels:
            stressed, _ = comparison.stressed_and_clean(others)
            yield others, judge(criterion, partial(_values, comparison, levels=stressed, others=others))
    else:
        for levels in comparison.levels:
            yield levels, judge(criterion, partial(_values, comparison, levels=levels, others=levels))


def _judge_p(comparison: Comparison, criterion: Criterion, levels: Levels) -> Judgement:
    metric, (a, b) = comparison.study.metric, criterion.quantities[0].labels
    for one in comparison.differences(metric, levels):
        if {one.a, one.b} == {a, b}:
            found = one if one.a == a else flipped(one)
            return judge_p(criterion, found.test, found.seeds, higher_is_better(metric))
    return judge_p(criterion, paired_test([]), (), higher_is_better(metric))


def _values(comparison: Comparison, quantity: Quantity, *, levels: Levels, others: Levels) -> Mapping[int, float]:
    """By seed: at ``levels``, and of ``drop`` at the levels of the ``others``."""
    if quantity.metric is not None:
        return comparison.values(quantity.metric, quantity.labels[-1], levels)
    metric = comparison.study.metric
    if quantity.name == "drop":
        return comparison.drops(metric, quantity.labels[0], others)
    a, b = (comparison.values(metric, label, levels) for label in quantity.labels)
    return {seed: a[seed] - b[seed] for seed in a if seed in b}


def check_criteria(comparison: Comparison) -> None:
    """Everything that the criteria mention is there; metrics may still be missing in a study whose runs are to be tested.

    Raises:
        InputError: it is not.
    """
    study = comparison.study
    for criterion in comparison.criteria:
        for quantity in criterion.quantities:
            problem = ""
            if quantity.name == "drop" and not study.degradation:
                problem = (
                    "drop(...); it is of a degradation; add 'degradation: {axis: noise, stressed: on, clean: off}' to the study"
                )
            elif quantity.name in ("rounds", "megabytes") and study.target_accuracy is None:
                problem = f"{quantity.name}(...); it is counted until a target; add 'target_accuracy: 0.9' to the study"
            elif quantity.name == "p" and len(set(quantity.labels)) < 2:
                problem = "one method; p compares two; write p(A, B) < 0.05"
            elif quantity.name == "metric" and quantity.arguments[0] not in comparison.metrics and not study.test:
                near = get_close_matches(quantity.arguments[0], comparison.metrics, n=1, cutoff=0.0)[0]
                problem = f"{quantity.arguments[0]}; no run has this metric; write {near}"
            if problem:
                raise InputError(f"criterion {criterion.text!r}: {problem}")
