"""The criteria of a study, each judged at every level of its grid.

A criterion *holds* when all of the 95 % interval of left - right satisfies it, *fails* when none does, and is
*undecided* otherwise.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from math import isnan, nan
from typing import Literal

from fl_lightning.errors import InputError
from fl_lightning.study.metric_names import higher_is_better
from fl_lightning.study.report.comparison import Comparison, Levels, flipped
from fl_lightning.study.spec.criteria import (
    OPERATORS,
    RELATIONS,
    Criterion,
    Quantity,
    arguments_of,
    check_needs,
)
from fl_lightning.study.statistics import PairedTest, mean_std, paired_test, t_interval

Decision = Literal["holds", "fails", "undecided"]


@dataclass(frozen=True)
class Judgement:
    """Of a criterion at one level of the grid.

    Args:
        decision: holds, fails or undecided.
        left, right: means over seeds.
        difference: mean of left - right; of ``p``, of A - B.
        low, high: its 95 % interval; NaN where there is none.
        seeds: that were used.
        reason: in words.
    """

    decision: Decision
    left: float
    right: float
    difference: float
    low: float
    high: float
    seeds: tuple[int, ...]
    reason: str


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
    """Also at levels without a run: there it is undecided."""
    planned = comparison.planned_levels
    if criterion.is_p:
        for levels in planned:
            yield levels, _judge_p(comparison, criterion, levels)
    elif criterion.mentions("drop"):
        for others in comparison.without_stressor(planned):
            stressed, _ = comparison.stressed_and_clean(others)
            yield others, judge(criterion, partial(_values, comparison, levels=stressed, others=others))
    else:
        for levels in planned:
            yield levels, judge(criterion, partial(_values, comparison, levels=levels, others=levels))


def _judge_p(comparison: Comparison, criterion: Criterion, levels: Levels) -> Judgement:
    metric, (a, b) = comparison.study.metric, criterion.quantities[0].labels
    for one in comparison.differences(metric, levels):
        if {one.a, one.b} == {a, b}:
            found = one if one.a == a else flipped(one)
            return judge_p(criterion, found.test, found.seeds, higher_is_better(metric))
    return judge_p(criterion, paired_test([]), (), higher_is_better(metric))


def _values(
    comparison: Comparison, quantity: Quantity, *, levels: Levels, others: Levels
) -> Mapping[int, float]:
    """By seed: at ``levels``, and of ``drop`` at the levels of the ``others``."""
    if quantity.metric is not None:
        return comparison.values(quantity.metric, quantity.labels[-1], levels)
    metric = comparison.study.metric
    if quantity.name == "drop":
        return comparison.drops(metric, quantity.labels[0], others)
    a, b = (comparison.values(metric, label, levels) for label in quantity.labels)
    return {seed: a[seed] - b[seed] for seed in a if seed in b}


def judge(criterion: Criterion, values: Callable[[Quantity], Mapping[int, float]]) -> Judgement:
    """Decide a criterion that has no ``p``.

    Args:
        criterion: what is claimed.
        values: seed -> value of a quantity, where it has one.
    """
    known = {quantity: values(quantity) for quantity in criterion.quantities}
    seeds = sorted(set.intersection(*(set(found) for found in known.values())))
    sides = []
    for seed in seeds:
        at = {(quantity.name, quantity.arguments): found[seed] for quantity, found in known.items()}
        sides.append((_value(criterion.left, at), _value(criterion.right, at)))
    if not sides or any(isnan(left - right) for left, right in sides):
        reason = "division by zero" if sides else _missing(known)
        return Judgement("undecided", nan, nan, nan, nan, nan, tuple(seeds), reason)
    differences = [left - right for left, right in sides]
    left, right = (mean_std(side)[0] for side in zip(*sides, strict=True))
    low, high = t_interval(differences)
    decision, reason = _decide(criterion, sides, low, high)
    return Judgement(decision, left, right, mean_std(differences)[0], low, high, tuple(seeds), reason)


def _missing(known: Mapping[Quantity, Mapping[int, float]]) -> str:
    empty = [
        f"{quantity.name}({', '.join(quantity.arguments)})" for quantity, found in known.items() if not found
    ]
    return f"no value of {', '.join(empty)}" if empty else "no seed that all of its methods have"


def _decide(
    criterion: Criterion, sides: Sequence[tuple[float, float]], low: float, high: float
) -> tuple[Decision, str]:
    symbol, compare = RELATIONS[criterion.relation]
    if criterion.is_exact:
        true = sum(compare(left, right) for left, right in sides)
        return (
            "holds" if true == len(sides) else "undecided" if true else "fails"
        ), f"counted: true for {true} of {len(sides)} seeds"
    if len(sides) < 2:
        return "undecided", "one seed has no interval"
    if isnan(low):
        return "undecided", "all seeds give the same difference, so that its spread cannot be estimated"
    if compare(low, 0) and compare(high, 0):
        return "holds", f"the whole interval is {symbol} 0"
    if not compare(low, 0) and not compare(high, 0):
        return "fails", f"no point of the interval is {symbol} 0"
    return "undecided", "0 is inside the interval"


def judge_p(
    criterion: Criterion, test: PairedTest, seeds: Sequence[int], higher_is_better: bool
) -> Judgement:
    """Decide ``p(A, B) < number`` from the test of A - B, whose p is corrected for the family."""
    assert isinstance(criterion.right, ast.Constant)
    level = float(criterion.right.value)  # type: ignore[arg-type]
    better = (test.mean > 0) == higher_is_better
    below = RELATIONS[criterion.relation][1](test.p_holm, level)
    decision: Decision = "undecided" if not below else "holds" if better else "fails"
    way = "better" if better else "worse"
    reason = (
        f"significantly {way}"
        if below
        else "no p"
        if isnan(test.p_holm)
        else "not significant, which decides nothing"
    )
    return Judgement(
        decision,
        test.p_holm,
        level,
        test.mean,
        test.low,
        test.high,
        tuple(seeds),
        f"{reason}; Holm over {test.family}",
    )


def _value(node: ast.expr, at: Mapping[tuple[str, tuple[str, ...]], float]) -> float:
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, at), _value(node.right, at)
        if isinstance(node.op, ast.Div) and right == 0:
            return nan
        return float(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, at)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        return at[node.func.id, arguments_of(node)]
    assert isinstance(node, ast.Constant)
    return float(node.value)  # type: ignore[arg-type]


def check_criteria(comparison: Comparison) -> None:
    """The metrics that the criteria mention are there; they may still be missing in a study whose runs are to
    be tested.

    Raises:
        InputError: one is not.
    """
    for criterion in comparison.criteria:
        check_needs(criterion, comparison.study.degradation, comparison.study.target_accuracy)
        for quantity in criterion.quantities:
            if (
                quantity.name == "metric"
                and quantity.arguments[0] not in comparison.metrics
                and not comparison.study.test
            ):
                near = get_close_matches(quantity.arguments[0], comparison.metrics, n=1, cutoff=0.0)[0]
                raise InputError(
                    f"criterion {criterion.text!r}: {quantity.arguments[0]}",
                    "no run has this metric",
                    f"write {near}",
                )
