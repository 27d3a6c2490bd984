"""The criteria of a study, each judged at every level of its grid and under its premises.

Over a grid a criterion has to hold at the share of the levels that it names, or at all. A premise
says what must occur for a criterion to be tested: at a level where one fails the criterion is *not
tested*, whatever its runs say, and where one is undecided, so is the criterion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pandas as pd

from fl_lightning.config.near_names import nearest_or_list
from fl_lightning.errors import InputError, require
from fl_lightning.study.plan.criteria import Criterion, check_needs
from fl_lightning.study.plan.quantities import (
    ACCURACY,
    OF_THE_METRIC,
    PRIMARY,
    TRANSFER,
    Quantity,
    metric_of,
)
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.plan.study import Study
from fl_lightning.study.report.comparison import Comparison, Levels
from fl_lightning.study.report.judging import Decision, Judgement, judge
from fl_lightning.study.results.runs import FinishedRun, unlike_rounds
from fl_lightning.study.statistics import PairedTest, paired_test


@dataclass(frozen=True)
class Verdict:
    """The verdict on one criterion over all levels.

    Args:
        criterion: the criterion.
        judgements: one per level of the grid (for a criterion with ``drop``: of the axes but the
            stressor's).
        is_timing: whether a clock decides it.
    """

    criterion: Criterion
    judgements: Sequence[tuple[Levels, Judgement]]
    is_timing: bool

    @property
    def needed(self) -> int:
        """The number of levels at which the criterion has to hold."""
        return self.criterion.needed_levels(len(self.judgements))

    @property
    def decision(self) -> Decision:
        """It holds when it holds at enough levels, and fails when it fails at too many.

        It is not tested when the levels that were tested can show neither.
        """
        held, failed, undecided = (self.count(one) for one in ("holds", "fails", "undecided"))
        levels, needed = len(self.judgements), self.needed
        if failed > levels - needed:
            return "fails"
        if held >= needed:
            return "holds"
        return "undecided" if self._turns_with(undecided) else "not tested"

    @property
    def is_open(self) -> bool:
        """Whether it is undecided, and more seeds may decide it."""
        levels = sum(judgement.is_open for _, judgement in self.judgements)
        return self.decision == "undecided" and self._turns_with(levels)

    def _turns_with(self, levels: int) -> bool:
        """Return whether so many more levels could hold it or fail it, if all of them agreed."""
        held, failed = self.count("holds"), self.count("fails")
        return held + levels >= self.needed or failed + levels > len(self.judgements) - self.needed

    def count(self, decision: Decision) -> int:
        """Return at how many levels the decision was this."""
        return sum(judgement.decision == decision for _, judgement in self.judgements)


def verdicts(comparison: Comparison) -> list[Verdict]:
    """Judge every criterion under its premises, in the study's order, by the interval of the
    comparison."""
    premises = premise_verdicts(comparison)
    return [
        Verdict(
            criterion,
            [
                (levels, _under_premises(judgement, criterion, levels, premises, comparison))
                for levels, judgement in _judgements(comparison, criterion)
            ],
            comparison.study.is_timing(criterion),
        )
        for criterion in comparison.criteria
    ]


def premise_verdicts(comparison: Comparison) -> list[Verdict]:
    """Judge every premise, in the study's order."""
    metric = comparison.study.metric
    return [
        Verdict(premise, list(_judgements(comparison, premise)), premise.is_timing(metric))
        for premise in comparison.premises
    ]


def _under_premises(
    judgement: Judgement,
    criterion: Criterion,
    levels: Levels,
    premises: Sequence[Verdict],
    comparison: Comparison,
) -> Judgement:
    """Return the judgement as it stands once the premises at its level are known."""
    open_premises: list[tuple[str, Judgement]] = []
    for verdict in premises:
        premise = verdict.criterion
        if not premise.is_premise_of(criterion):
            continue
        for where, found in verdict.judgements:
            if not _is_about(comparison, criterion, levels, where):
                continue
            at = f" at {level_key(where)}" if where and where != levels else ""
            if found.decision == "fails":
                said = f"premise '{premise.title}' fails{at}: {found.reason}; alone it {_alone(judgement)}"
                return replace(judgement, decision="not tested", reason=said, lost=False)
            if found.decision != "holds":
                open_premises.append((f"premise '{premise.title}' is undecided{at}", found))
    if not open_premises:
        return judgement
    (first, found), *_ = open_premises
    said = f"{first}: {found.reason}; alone the criterion {_alone(judgement)}"
    # a premise that may still fail decides: the criterion is not tested then
    lost = not any(one.is_open for _, one in open_premises)
    return replace(judgement, decision="undecided", reason=said, lost=lost)


def _alone(judgement: Judgement) -> str:
    return f"{'is ' if judgement.decision == 'undecided' else ''}{judgement.decision}"


def _is_about(comparison: Comparison, criterion: Criterion, levels: Levels, where: Levels) -> bool:
    """Return whether a premise that was judged at ``where`` speaks of a criterion at ``levels``.

    A drop is about both levels of the degradation, and about no other level of that axis. A
    criterion that names levels of an axis is about these.
    """
    named = [{axis: level} for quantity in criterion.quantities for axis, level in quantity.at]
    for axis in {*criterion.pinned} & {*where}:
        if {axis: where[axis]} not in named:
            return False
    shared = {axis for axis in where if axis in levels}
    if any(where[axis] != levels[axis] for axis in shared):
        return False
    entry = comparison.study.degradation
    if criterion.mentions("drop") and entry and entry["axis"] in where:
        return where[entry["axis"]] in (entry["stressed"], entry["clean"])
    return True


def _judgements(comparison: Comparison, criterion: Criterion) -> Iterator[tuple[Levels, Judgement]]:
    """Judge a criterion at every planned level; at one without a run it is undecided."""
    planned = comparison.study.combinations()
    if criterion.mentions("drop"):
        for others in comparison.without_stressor(planned):
            stressed, _ = comparison.stressed_and_clean(others)
            evidence = RunEvidence(comparison, stressed, others)
            yield others, judge(criterion.condition, evidence, comparison.interval)
    else:
        for levels in _unpinned(planned, criterion):
            evidence = RunEvidence(comparison, levels, levels)
            yield levels, judge(criterion.condition, evidence, comparison.interval)


def _unpinned(planned: Sequence[Levels], criterion: Criterion) -> list[Levels]:
    """Return the levels without the axes that the criterion names itself, each once."""
    kept = [
        {axis: level for axis, level in levels.items() if axis not in criterion.pinned}
        for levels in planned
    ]
    return [levels for number, levels in enumerate(kept) if levels not in kept[:number]]


@dataclass(frozen=True)
class RunEvidence:
    """What the runs of a comparison say at one level.

    Args:
        comparison: the runs.
        levels: the level that quantities are taken at.
        others: the level without the stressor's axis, which a drop is taken at.
    """

    comparison: Comparison
    levels: Levels
    others: Levels

    def levels_of(self, quantity: Quantity) -> dict[str, str]:
        """Return the level at which a quantity is taken."""
        given = {**self.levels, **dict(quantity.at)}
        return {axis: given[axis] for axis in self.comparison.study.grid}

    def values(self, quantity: Quantity) -> pd.Series:
        comparison, study = self.comparison, self.comparison.study
        levels = self.levels_of(quantity)
        if quantity.is_over_rounds:
            of_round, label = quantity.arguments
            found = comparison.over_rounds(quantity.name, of_round, label, levels)
            return found if quantity.is_count else found[np.isfinite(found)]
        metric = self._metric_of(quantity)
        if metric is not None and quantity.is_count:
            return comparison.counted(metric, quantity.labels[-1], levels)
        if metric is not None:
            return comparison.measured(metric, quantity.labels[-1], levels)
        if quantity.name == "drop":
            return comparison.drops(study.metric, quantity.labels[0], self.others)
        a, b = (comparison.values(study.metric, label, levels) for label in quantity.labels)
        return (a - b).dropna()

    def without_number(self, quantity: Quantity) -> Sequence[int]:
        comparison, study = self.comparison, self.comparison.study
        if quantity.metric in TRANSFER.values():
            levels, primary = self.levels_of(quantity), study.task.primary
            return comparison.transfer.diverged(levels, quantity.labels[-1], primary)
        if quantity.name in OF_THE_METRIC:
            several = [self.levels_of(quantity)]
            if quantity.name == "drop":
                several = [*comparison.stressed_and_clean(self.others)] if study.degradation else []
            found = (
                comparison.without_number(study.metric, label, one)
                for label in quantity.labels
                for one in several
            )
            return sorted({seed for seeds in found for seed in seeds})
        runs = comparison.runs(quantity.labels[-1], self.levels_of(quantity))
        there = self.values(quantity).index
        return [seed for seed in runs if seed not in there]

    def _metric_of(self, quantity: Quantity) -> str | None:
        """Return the metric that a quantity of one method stands for; None for other quantities."""
        study = self.comparison.study
        return metric_of(quantity.name, study.selection, study.task.primary) or quantity.metric

    def unlike_rounds(self, quantities: Sequence[Quantity]) -> str:
        runs: dict[str, list[list[FinishedRun]]] = {}
        for one in dict.fromkeys(quantities):
            metric = None if one.is_over_rounds else self._metric_of(one)
            if one.name in OF_THE_METRIC:
                metric = self.comparison.study.metric
            for label in one.labels:
                found = self.comparison.runs(label, self.levels_of(one))
                runs.setdefault(metric or "", []).append([*found.values()])
        unlike = (unlike_rounds(name, chain(*of)) for name, of in runs.items() if len(of) > 1)
        return next(filter(None, unlike), "")

    def is_known(self, quantity: Quantity) -> bool:
        """Return whether the runs say a quantity.

        Published runs have no rounds, and none until another target than theirs.
        """
        runs = self.comparison.runs(quantity.labels[-1], self.levels_of(quantity)).values()
        metric = self._metric_of(quantity)
        return metric is None or not any(
            run.published and (quantity.is_over_rounds or metric not in run.metrics) for run in runs
        )

    def test(self, a: str, b: str) -> tuple[PairedTest, Sequence[int], bool]:
        metric = self.comparison.study.metric
        found = self.comparison.difference(metric, a, b, self.levels)
        test, seeds = (found.test, found.seeds) if found else (paired_test([]), ())
        return test, seeds, self.comparison.higher_is_better(metric)


def check_task(study: Study) -> None:
    """Check that a study with the task of its runs does not ask for the accuracy where they have
    none.

    Raises:
        InputError: it does.
    """
    primary = study.task.primary
    if primary == ACCURACY:
        return
    rule = f"the primary metric of the runs is {primary}"
    given = f"target_accuracy: {study.target_accuracy}"
    require(study.target_accuracy is None, given, rule, f"write target: and a value of {primary}")
    for criterion in (*study.parsed_criteria(), *study.parsed_premises()):
        if criterion.mentions(ACCURACY):
            (asked, *_) = (str(one) for one in criterion.quantities if one.name == ACCURACY)
            instead = f"write {asked.replace(ACCURACY, PRIMARY, 1)}"
            raise InputError(f"criterion {criterion.text!r}: {asked}", rule, instead)


def check_criteria(comparison: Comparison) -> None:
    """Check that some run has the metrics that criteria and premises mention, and that these, and
    the target, are of the runs' task.

    They may be missing for a method without a finished run, and in a study whose runs are still to
    be tested.

    Raises:
        InputError: a metric is missing, or the accuracy is asked of runs of another task.
    """
    check_task(comparison.study)
    rounds = sorted(
        {name for run in comparison.results.runs for row in run.record.history for name in row}
    )
    for criterion in (*comparison.criteria, *comparison.premises):
        study = comparison.study
        check_needs(criterion, study.degradation, study.target_value, study.alone, study.controls)
        for quantity in criterion.quantities:
            known = rounds if quantity.is_over_rounds else comparison.metrics
            for metric in quantity.recorded:
                there = metric in known or quantity.labels[0] not in comparison.labels
                if not there and not comparison.study.test:
                    given = f"criterion {criterion.text!r}: {metric}"
                    near = nearest_or_list(metric, sorted(known))
                    raise InputError(given, "no run has this metric", f"write {near}")
