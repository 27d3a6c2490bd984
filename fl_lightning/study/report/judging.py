"""How one condition is decided by what the runs say: every decision of a report is made here.

- A comparison *holds* when all of the 95 % interval of left - right satisfies it, *fails* when no
  point of it does, and is *undecided* otherwise. Of counted quantities (bytes) it needs no
  interval: all seeds, no seed, or undecided. Counts over rounds (bits that moved) are decided so
  where all seeds have the same difference, which leaves no interval.
- ``p(A, B) < 0.05`` holds when A is significantly better, fails when it is significantly worse, and
  is undecided when the test says nothing.
- ``no_increase(upload, A, B)`` is the one-sided paired test at 5 %: it fails when A is
  significantly greater and holds otherwise, which is absence of evidence and not evidence of
  absence. With a margin it holds when the one-sided 95 % bound of A - B - margin |B| is not above
  0, which is evidence.
- Where a run has no number of what is compared (a perplexity that is not finite, a target that was
  never reached), nothing is decided by the seeds that are left: they are a choice by the outcome.
- Nor is anything by areas over unlike numbers of rounds, or by rounds that are unlike themselves.
- ``and`` and ``or`` follow Kleene's logic of three values. Each part keeps its own 95 %: an ``or``
  of k parts that are all false is held with a probability of up to k x 2.5 %, and an ``and`` of
  k parts that are all true fails with as much. So does a criterion over k levels; where a share of
  them is enough, it may also be held wrongly so.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan, nan
from typing import Literal, Protocol

import numpy as np
import pandas as pd

from fl_lightning.study.plan.criteria import (
    OPERATORS,
    RELATIONS,
    AllOf,
    AnyOf,
    Condition,
    Inequality,
    NoIncrease,
)
from fl_lightning.study.plan.quantities import Quantity, quantity_of
from fl_lightning.study.statistics import LEVEL, Interval, PairedTest, mean_std, t_interval

NO_SPREAD = "all seeds give the same difference, so that its spread cannot be estimated"
Decision = Literal["holds", "fails", "undecided", "not tested"]
DECISIONS: tuple[Decision, ...] = ("holds", "fails", "undecided", "not tested")


@dataclass(frozen=True)
class Judgement:
    """The decision on one criterion, or one part of it, at one level of the grid.

    Args:
        decision: holds, fails, undecided or not tested.
        left, right: the means of both sides over seeds; for ``p``, the p and the number it is
            compared with; NaN where the criterion has several parts.
        difference: the mean of left - right; for ``p``, of A - B.
        low, high: the 95 % interval of the difference; NaN where there is none.
        seeds: the seeds that were used.
        reason: why, in words.
        parts: the text and the judgement of each part that ``and`` or ``or`` joins.
        lost: whether it is undecided for good: a seed has no number of what is compared, or one
            that is infinite, or seeds disagree on what is counted, and more seeds change none.
    """

    decision: Decision
    left: float
    right: float
    difference: float
    low: float
    high: float
    seeds: tuple[int, ...]
    reason: str
    parts: tuple[tuple[str, Judgement], ...] = ()
    lost: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it is undecided, and more seeds may decide it."""
        return self.decision == "undecided" and not self.lost

    @classmethod
    def without_numbers(
        cls, decision: Decision, reason: str, seeds: Sequence[int] = (), lost: bool = False
    ) -> Judgement:
        return cls(decision, nan, nan, nan, nan, nan, tuple(seeds), reason, lost=lost)


class Evidence(Protocol):
    """What the runs say, as far as a condition needs it."""

    def values(self, quantity: Quantity) -> pd.Series:
        """Return a quantity by seed, for the seeds that have it; what is counted may be infinite."""

    def without_number(self, quantity: Quantity) -> Sequence[int]:
        """Return the seeds that have a run, and no number of a quantity."""

    def unlike_rounds(self, quantities: Sequence[Quantity]) -> str:
        """Return over how many rounds the runs are, where these differ and the quantities cannot be
        compared therefore; else empty."""

    def is_known(self, quantity: Quantity) -> bool:
        """Return whether the runs say a quantity, which published ones do not of all."""

    def test(self, a: str, b: str) -> tuple[PairedTest, Sequence[int], bool]:
        """Return the test of A - B in the study's metric, its seeds, and whether higher is
        better."""


def judge(condition: Condition, evidence: Evidence, interval: Interval = t_interval) -> Judgement:
    """Decide a condition.

    Args:
        condition: what is claimed.
        evidence: what the runs say.
        interval: the interval of the mean of differences that decides. It is asked for level 0.05,
            and by ``no_increase`` for 0.1, whose two ends are one-sided bounds at 0.05.
    """
    if isinstance(condition, (AllOf, AnyOf)):
        return _joined(condition, [judge(part, evidence, interval) for part in condition.parts])
    if isinstance(condition, NoIncrease):
        found = _judge_no_increase(condition, evidence, interval)
    elif condition.is_p:
        test, seeds, higher = evidence.test(*condition.quantities[0].labels)
        found = judge_p(condition, test, seeds, higher)
    else:
        found = _judge_inequality(condition, evidence, interval)
    if rounds := evidence.unlike_rounds(condition.quantities):
        unlike = f"its runs are of {rounds} rounds, which cannot be compared"
        return replace(found, decision="undecided", reason=unlike, lost=True)
    told = [
        f"no {one} in seed {', '.join(map(str, seeds))}"
        if evidence.is_known(one)
        else f"{one} is not known of the published runs"
        for one in dict.fromkeys(condition.quantities)
        if (seeds := evidence.without_number(one))
    ]
    if not told:
        return found
    others = f"; without them it {found.decision}" if found.decision in ("holds", "fails") else ""
    return replace(found, decision="undecided", reason=f"{' and '.join(told)}{others}", lost=True)


def _joined(condition: AllOf | AnyOf, judged: Sequence[Judgement]) -> Judgement:
    """Join the parts: the first decision that settles it, or the other one if all parts agree on
    it."""
    settles: Decision = "fails" if isinstance(condition, AllOf) else "holds"
    agreed: Decision = "holds" if isinstance(condition, AllOf) else "fails"
    found = [one.decision for one in judged]
    if settles in found:
        decision = settles
    else:
        decision = agreed if set(found) == {agreed} else "undecided"
    seeds = tuple(sorted({seed for one in judged for seed in one.seeds}))
    counted = ", ".join(f"{found.count(one)} {one}" for one in DECISIONS if one in found)
    joined = "all of" if isinstance(condition, AllOf) else "at least one of"
    parts = tuple(zip(map(_text, condition.parts), judged, strict=True))
    reason = f"{joined} {len(judged)} parts: {counted}"
    lost = decision == "undecided" and not any(one.is_open for one in judged)
    return replace(Judgement.without_numbers(decision, reason, seeds, lost), parts=parts)


def _text(condition: Condition) -> str:
    if isinstance(condition, (AllOf, AnyOf)):
        word = " and " if isinstance(condition, AllOf) else " or "
        return f"({word.join(map(_text, condition.parts))})"
    return condition.text


def _paired(
    quantities: Sequence[Quantity], evidence: Evidence
) -> tuple[dict[Quantity, pd.Series], pd.Index, str]:
    """Return the quantities over the seeds that have all of them, these seeds, and why there are
    none."""
    known = {quantity: evidence.values(quantity) for quantity in quantities}
    table = pd.concat(known.values(), axis=1, join="inner", keys=range(len(known))).sort_index()
    empty = [str(quantity) for quantity, found in known.items() if found.empty]
    reason = f"no value of {', '.join(empty)}" if empty else "no seed that all of its methods have"
    return {q: table[number] for number, q in enumerate(known)}, table.index, reason


def _judge_inequality(condition: Inequality, evidence: Evidence, interval: Interval) -> Judgement:
    columns, index, missing = _paired(condition.quantities, evidence)
    seeds = tuple(index.tolist())
    left, right = (_evaluated(side, columns, index) for side in (condition.left, condition.right))
    if not seeds or left.isna().any() or right.isna().any():
        reason = "division by zero, or infinity less infinity" if seeds else missing
        return Judgement.without_numbers("undecided", reason, seeds, lost=bool(seeds))
    differences = left - right
    low, high = _bounds(differences, interval)
    decision, reason = _decide(condition, left, right, low, high)
    of_left, of_right, of_both = map(_mean, (left, right, differences))
    is_exact = all(quantity.is_exact for quantity in condition.quantities)
    lost = decision == "undecided" and (is_exact or not np.isfinite(differences).all())
    return Judgement(decision, of_left, of_right, of_both, low, high, seeds, reason, lost=lost)


def _bounds(differences: pd.Series, interval: Interval) -> tuple[float, float]:
    """Return the interval of the mean; of differences that are not all finite there is none."""
    return interval(differences.to_numpy()) if np.isfinite(differences).all() else (nan, nan)


def _mean(values: pd.Series) -> float:
    return mean_std(values)[0] if np.isfinite(values).all() else float(values.mean())


def _decide(
    condition: Inequality, left: pd.Series, right: pd.Series, low: float, high: float
) -> tuple[Decision, str]:
    symbol, compare = RELATIONS[condition.relation]
    true, count = int(compare(left, right).sum()), len(left)
    if all(quantity.is_exact for quantity in condition.quantities):
        return _counted(true, count)
    if count < 2:
        return "undecided", "one seed has no interval"
    if isnan(low):
        is_count = all(quantity.is_count for quantity in condition.quantities)
        return _counted(true, count) if is_count else ("undecided", NO_SPREAD)
    if compare(low, 0) and compare(high, 0):
        return "holds", f"the whole interval is {symbol} 0"
    if not compare(low, 0) and not compare(high, 0):
        return "fails", f"no point of the interval is {symbol} 0"
    return "undecided", "0 is inside the interval"


def _counted(true: int, count: int) -> tuple[Decision, str]:
    decision: Decision = "holds" if true == count else "undecided" if true else "fails"
    return decision, f"counted: true for {true} of {count} seeds"


def _judge_no_increase(condition: NoIncrease, evidence: Evidence, interval: Interval) -> Judgement:
    """Decide ``no_increase``: by the one-sided bounds of A - B, or of A - B - margin |B|."""
    columns, index, missing = _paired(condition.quantities, evidence)
    seeds = tuple(index.tolist())
    a, b = (columns[quantity] for quantity in condition.quantities)
    limit = b + condition.margin * b.abs() if condition.margin else b
    differences = a - limit
    if not seeds or differences.isna().any():
        reason = "infinity less infinity" if seeds else missing
        return Judgement.without_numbers("undecided", reason, seeds, lost=bool(seeds))
    if np.isfinite(differences).all():
        low, high = interval(differences.to_numpy(), 2 * LEVEL)
        counted = all(quantity.is_count for quantity in condition.quantities)
        decision, reason = _decide_no_increase(condition, differences, low, high, counted)
    elif all(quantity.is_exact for quantity in condition.quantities):
        decision, reason = _counted(int((differences <= 0).sum()), len(differences))
    else:
        decision, reason = "undecided", "a difference is infinite"
    of_a, of_limit, of_both = map(_mean, (a, limit, differences))
    low, high = _bounds(differences, interval)
    lost = decision == "undecided" and not np.isfinite(differences).all()
    return Judgement(decision, of_a, of_limit, of_both, low, high, seeds, reason, lost=lost)


def _decide_no_increase(
    condition: NoIncrease, differences: pd.Series, low: float, high: float, counted: bool
) -> tuple[Decision, str]:
    if len(differences) < 2:
        return "undecided", "one seed has no test"
    if isnan(low):  # equal differences have no spread
        if counted:
            same = f"counted: the same difference in all of {len(differences)} seeds"
            return ("fails" if differences.iloc[0] > 0 else "holds"), same
        return "undecided", NO_SPREAD
    if condition.margin is not None:
        if high <= 0:
            return "holds", f"within the margin of {condition.margin:.1%}, one-sided 95 %"
        if low > 0:
            return "fails", f"beyond the margin of {condition.margin:.1%}, one-sided 95 %"
        return "undecided", f"the margin of {condition.margin:.1%} is inside the interval"
    if low > 0:
        return "fails", "significantly greater, one-sided 5 %"
    if high <= 0:
        return "holds", "not greater: the one-sided 95 % bound is not above 0"
    could_be = f"an increase of {high:.4g}" if isfinite(high) else "any increase"
    return (
        "holds",
        f"not significantly greater, one-sided 5 %; absence of evidence: {could_be} is possible",
    )


def judge_p(
    condition: Inequality, test: PairedTest, seeds: Sequence[int], higher_is_better: bool
) -> Judgement:
    """Decide ``p(A, B) < number`` from the test of A - B, whose p is corrected for the family."""
    assert isinstance(condition.right, ast.Constant)
    level = float(condition.right.value)  # type: ignore[arg-type]
    better = (test.mean > 0) == higher_is_better
    below = RELATIONS[condition.relation][1](test.p_holm, level)
    decision: Decision = "undecided" if not below else "holds" if better else "fails"
    if below:
        reason = f"significantly {'better' if better else 'worse'}"
    else:
        reason = "no p" if isnan(test.p_holm) else "not significant, which decides nothing"
    reason = f"{reason}; Holm over {test.family}"
    return Judgement(
        decision, test.p_holm, level, test.mean, test.low, test.high, tuple(seeds), reason
    )


def _evaluated(node: ast.expr, columns: dict[Quantity, pd.Series], seeds: pd.Index) -> pd.Series:
    """Return one side of a comparison by seed; a division by zero gives NaN."""
    if isinstance(node, ast.BinOp):
        left, right = (_evaluated(side, columns, seeds) for side in (node.left, node.right))
        if isinstance(node.op, ast.Div):
            right = right.where(right != 0)
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp):
        value = _evaluated(node.operand, columns, seeds)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Call):
        return columns[quantity_of(node)]
    assert isinstance(node, ast.Constant)
    return pd.Series(float(node.value), index=seeds)  # type: ignore[arg-type]
