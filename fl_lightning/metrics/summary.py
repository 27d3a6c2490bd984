"""From the accuracies of many rounds to the few numbers that a table shows. All accuracies in [0,
1]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fl_lightning.errors import MisuseError


def auc_accuracy(accuracies: Sequence[float], rounds: Sequence[int] | None = None) -> float:
    """AUC_acc: area under accuracy in percent over rounds, by the trapezoid rule (percent x
    rounds).

    Over rounds 1 .. R, each evaluated, these are R - 1 intervals; rounds that were not evaluated
    are bridged by a straight line.

    Args:
        accuracies: accuracy at each evaluated round, in [0, 1] ``[E]``.
        rounds: numbers of those rounds, increasing ``[E]``; 1 .. E when left out.

    Raises:
        ValueError: different lengths, rounds that do not increase, or accuracies outside [0, 1]
            (percent, perhaps).

    >>> auc_accuracy([0.0, 0.5, 0.5])
    75.0
    """
    a = np.asarray(accuracies, np.float64)
    r = np.arange(1.0, a.size + 1) if rounds is None else np.asarray(rounds, np.float64)
    if r.shape != a.shape or r.ndim != 1:
        raise MisuseError(
            f"{a.size} accuracies for {r.size} rounds",
            "one per evaluated round is needed",
            "leave out the other rounds",
        )
    if (np.diff(r) <= 0).any():
        raise MisuseError(
            f"rounds {r.tolist()}", "they must increase", "sort them and drop the doubles"
        )
    if a.size and (a.min() < 0 or a.max() > 1):
        raise MisuseError(
            f"accuracies from {a.min():g} to {a.max():g}",
            "they lie in [0, 1]",
            "divide percentages by 100",
        )
    return _area(a, r) * 100


def _area(values: np.ndarray, rounds: np.ndarray) -> float:
    return float((np.diff(rounds) * (values[1:] + values[:-1]) / 2).sum())


def final_summary(
    history: Iterable[Mapping[str, Any]],
    primary: str = "accuracy",
    *,
    higher_is_better: bool = True,
    is_share: bool = True,
) -> dict[str, float]:
    """Return the ``final/*`` metrics of a run.

    Args:
        history: one row per round, in order, with ``round`` and, where the round was evaluated,
            ``test/<primary>`` and ``val/<primary>``. Rows without them are skipped.
        primary: the task's primary metric.
        higher_is_better: whether more of it is better.
        is_share: whether it lies in [0, 1], so that its area is in percent x rounds.

    Returns:
        ``final/<primary>`` (last evaluated round), ``final/last5_<primary>`` (mean of the last five
        evaluated rounds), ``final/auc_<primary>`` (percent x rounds, or the metric's unit x rounds;
        there is no area with fewer than two evaluated rounds), ``final/last5_val_<primary>`` (the
        validation's mean of the last five) and, chosen by validation alone,
        ``final/best_val_round`` (the first of equals) and ``final/best_val_<primary>`` (its value
        on the validation examples). Names whose values do not exist are left out.
    """
    tested: list[tuple[int, float]] = []
    validated: list[tuple[int, float]] = []
    for row in history:
        for found, name in ((tested, f"test/{primary}"), (validated, f"val/{primary}")):
            if row.get(name) is not None:
                found.append((row["round"], row[name]))
    summary: dict[str, float] = {}
    if tested:
        rounds, values = zip(*tested, strict=True)
        summary[f"final/{primary}"] = float(values[-1])
        summary[f"final/last5_{primary}"] = float(np.mean(values[-5:]))
        if len(tested) > 1:
            summary[f"final/auc_{primary}"] = (
                auc_accuracy(values, rounds)
                if is_share
                else _area(np.array(values), np.array(rounds))
            )
    if numbers := [pair for pair in validated if not math.isnan(pair[1])]:
        sign = 1 if higher_is_better else -1
        # max keeps the first of equals
        best_round, best = max(numbers, key=lambda pair: sign * pair[1])
        summary["final/best_val_round"] = int(best_round)
        summary[f"final/best_val_{primary}"] = float(best)
    if validated:
        summary[f"final/last5_val_{primary}"] = float(
            np.mean([value for _, value in validated[-5:]])
        )
    return summary
