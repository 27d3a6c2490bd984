"""The criteria of a study, each judged at every level of its grid.

A criterion *holds* when all of the 95 % interval of left - right satisfies it, *fails* when none does, and is
*undecided* otherwise.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from math import isnan, nan
from typing import Literal

import pandas as pd

from fl_lightning.errors import InputError
from fl_lightning.study.metric_names import higher_is_better
from fl_lightning.study.report.comparison import NO_SPREAD, Comparison, Levels
from fl_lightning.study.spec.criteria import (
    OPERATORS,
    RELATIONS,
    Criterion,
    Quantity,
    arguments_of,
    check_needs,
)
from fl_lightning.study.statistics import PairedTest, mean_interval, mean_std, paired_test

Decision = Literal["holds", "fails", "undecided"]


@dataclass(frozen=True)
class Judgement:
    """The decision on one criterion at one level of the grid.

    Args:
        decision: holds, fails or undecided.
        left, right: the means of both sides over seeds; for ``p``, the p and the number it is compared with.
        difference: the mean of left - right; for ``p``, of A - B.
        low, high: the 95 % interval of the difference; NaN where there is none.
        seeds: the seeds that were used.
        reason: why, in words.
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
    """The verdict on one criterion over all levels.

    Args:
        criterion: the criterion.
        judgements: one per level of the grid (for a criterion with ``drop``: of the axes but the stressor's).
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
    """Judge every criterion, in the study's order."""
    return [Verdict(criterion, list(_judgements(comparison, criterion))) for criterion in comparison.criteria]


def _judgements(comparison: Comparison, criterion: Criterion) -> Iterator[tuple[Levels, Judgement]]:
    """Judge a criterion at every planned level; at one without a run it is undecided."""
    planned = comparison.planned_levels
    if criterion.is_p:
        for levels in planned:
            yield levels, _judge_p(comparison, criterion, levels)
    elif criterion.mentions("drop"):
        for others in comparison.without_stressor(planned):
            stressed, _ = comparison.stressed_and_clean(others)
            values = partial(_values, comparison, levels=stressed, others=others)
            yield others, judge(criterion, values, comparison.is_sequential)
    else:
        for levels in planned:
            values = partial(_values, comparison, levels=levels, others=levels)
            yield levels, judge(criterion, values, comparison.is_sequential)


def _values(comparison: Comparison, quantity: Quantity, *, levels: Levels, others: Levels) -> pd.Series:
    """Return a quantity by seed: at ``levels``, and for ``drop`` at the levels of the ``others``."""
    if quantity.metric is not None:
        return comparison.values(quantity.metric, quantity.labels[-1], levels)
    metric = comparison.study.metric
    if quantity.name == "drop":
        return comparison.drops(metric, quantity.labels[0], others)
    a, b = (comparison.values(metric, label, levels) for label in quantity.labels)
    return (a - b).dropna()


def judge(
    criterion: Criterion, values: Callable[[Quantity], pd.Series], sequential: bool = False
) -> Judgement:
    """Decide a criterion that has no ``p``.

    Args:
        criterion: what is claimed.
        values: returns a quantity by seed, for the seeds that have it.
    """
    known = {quantity: values(quantity) for quantity in criterion.quantities}
    table = pd.concat(known.values(), axis=1, join="inner", keys=range(len(known))).sort_index()
    seeds = tuple(table.index.tolist())
    columns = {(q.name, q.arguments): table[number] for number, q in enumerate(known)}
    left, right = (_evaluated(side, columns, table.index) for side in (criterion.left, criterion.right))
    differences = left - right
    if not seeds or differences.isna().any():
        reason = "division by zero" if seeds else _missing(known)
        return Judgement("undecided", nan, nan, nan, nan, nan, seeds, reason)
    low, high = mean_interval(differences, sequential)
    decision, reason = _decide(criterion, left, right, low, high)
    of_left, of_right, of_both = (mean_std(side)[0] for side in (left, right, differences))
    return Judgement(decision, of_left, of_right, of_both, low, high, seeds, reason)


def _missing(known: dict[Quantity, pd.Series]) -> str:
    empty = [
        f"{quantity.name}({', '.join(quantity.arguments)})"
        for quantity, found in known.items()
        if found.empty
    ]
    return f"no value of {', '.join(empty)}" if empty else "no seed that all of its methods have"


def _decide(
    criterion: Criterion, left: pd.Series, right: pd.Series, low: float, high: float
) -> tuple[Decision, str]:
    symbol, compare = RELATIONS[criterion.relation]
    if criterion.is_exact:
        true, count = int(compare(left, right).sum()), len(left)
        decision: Decision = "holds" if true == count else "undecided" if true else "fails"
        return decision, f"counted: true for {true} of {count} seeds"
    if len(left) < 2:
        return "undecided", "one seed has no interval"
    if isnan(low):
        return "undecided", NO_SPREAD
    if compare(low, 0) and compare(high, 0):
        return "holds", f"the whole interval is {symbol} 0"
    if not compare(low, 0) and not compare(high, 0):
        return "fails", f"no point of the interval is {symbol} 0"
    return "undecided", "0 is inside the interval"


def _judge_p(comparison: Comparison, criterion: Criterion, levels: Levels) -> Judgement:
    metric, (a, b) = comparison.study.metric, criterion.quantities[0].labels
    found = comparison.difference(metric, a, b, levels)
    test, seeds = (found.test, found.seeds) if found else (paired_test([]), ())
    return judge_p(criterion, test, seeds, higher_is_better(metric))


def judge_p(
    criterion: Criterion, test: PairedTest, seeds: Sequence[int], higher_is_better: bool
) -> Judgement:
    """Decide ``p(A, B) < number`` from the test of A - B, whose p is corrected for the family."""
    assert isinstance(criterion.right, ast.Constant)
    level = float(criterion.right.value)  # type: ignore[arg-type]
    better = (test.mean > 0) == higher_is_better
    below = RELATIONS[criterion.relation][1](test.p_holm, level)
    decision: Decision = "undecided" if not below else "holds" if better else "fails"
    if below:
        reason = f"significantly {'better' if better else 'worse'}"
    else:
        reason = "no p" if isnan(test.p_holm) else "not significant, which decides nothing"
    reason = f"{reason}; Holm over {test.family}"
    return Judgement(decision, test.p_holm, level, test.mean, test.low, test.high, tuple(seeds), reason)


def _evaluated(
    node: ast.expr, columns: dict[tuple[str, tuple[str, ...]], pd.Series], seeds: pd.Index
) -> pd.Series:
    """Return one side of a criterion by seed; a division by zero gives NaN."""
    if isinstance(node, ast.BinOp):
        left, right = (_evaluated(side, columns, seeds) for side in (node.left, node.right))
        if isinstance(node.op, ast.Div):
            right = right.where(right != 0)
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp):
        value = _evaluated(node.operand, columns, seeds)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        return columns[node.func.id, arguments_of(node)]
    assert isinstance(node, ast.Constant)
    return pd.Series(float(node.value), index=seeds)  # type: ignore[arg-type]


def check_criteria(comparison: Comparison) -> None:
    """Check that some run has the metrics that the criteria mention.

    In a study whose runs are still to be tested they may be missing.

    Raises:
        InputError: a metric is missing.
    """
    for criterion in comparison.criteria:
        check_needs(criterion, comparison.study.degradation, comparison.study.target_accuracy)
        for quantity in criterion.quantities:
            metric = quantity.arguments[0]
            if quantity.name == "metric" and metric not in comparison.metrics and not comparison.study.test:
                near = get_close_matches(metric, comparison.metrics, n=1, cutoff=0.0)[0]
                given = f"criterion {criterion.text!r}: {metric}"
                raise InputError(given, "no run has this metric", f"write {near}")
