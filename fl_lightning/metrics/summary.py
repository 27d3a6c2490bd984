"""From the accuracies of many rounds, or of many clients, to the few numbers that a table shows. All
accuracies in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fl_lightning.errors import MisuseError


def auc_accuracy(accuracies: Sequence[float], rounds: Sequence[int] | None = None) -> float:
    """AUC_acc: area under accuracy in percent over rounds, by the trapezoid rule (percent x rounds).

    Over rounds 1 .. R, each evaluated, these are R - 1 intervals; rounds that were not evaluated are bridged
    by a straight line.

    Args:
        accuracies: accuracy at each evaluated round, in [0, 1] ``[E]``.
        rounds: numbers of those rounds, increasing ``[E]``; 1 .. E when left out.

    Raises:
        ValueError: different lengths, rounds that do not increase, or accuracies outside [0, 1] (percent,
            perhaps).

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
        raise MisuseError(f"rounds {r.tolist()}", "they must increase", "sort them and drop the doubles")
    if a.size and (a.min() < 0 or a.max() > 1):
        raise MisuseError(
            f"accuracies from {a.min():g} to {a.max():g}", "they lie in [0, 1]", "divide percentages by 100"
        )
    return _area(a, r) * 100


def _area(values: np.ndarray, rounds: np.ndarray) -> float:
    return float((np.diff(rounds) * (values[1:] + values[:-1]) / 2).sum())


MIN_CLIENT_EXAMPLES = 5
"""Validation examples from which on a client's accuracy says something of that client."""


def client_spread(
    values: Sequence[float] | np.ndarray,
    examples: Sequence[int] | np.ndarray | None = None,
    *,
    metric: str = "accuracy",
    higher_is_better: bool = True,
    is_hits: bool = True,
) -> dict[str, float]:
    """Return how evenly clients are served.

    ``val/accuracy``, ``val/accuracy_std`` and ``val/accuracy_worst_decile``, or those of another metric, are
    of all clients, each of the same weight, however many examples it has. The standard deviation is the
    population's (divided by n). The worst decile is the mean over the worst 10 % of clients, rounded up, so
    at least one. Both include the binomial noise of few examples: with one example a client they are a
    function of the mean.

    With ``examples`` there are also, over the clients with at least ``MIN_CLIENT_EXAMPLES`` (5) of them,
    ``val/clients_min5``, their number; ``val/accuracy_worst_decile_min5``; and, of two clients or more and
    where the metric is a share of examples, ``val/accuracy_std_corrected``, see :func:`corrected_std`.

    Args:
        values: the metric of each client ``[K]``; clients without validation examples are given as NaN and
            left out; with none left, the result is empty.
        examples: validation examples of each client ``[K]``.
        metric: its name.
        higher_is_better: whether the worst clients are those with the lowest values.
        is_hits: whether a client's value is the share of its examples that are right.

    >>> client_spread([1.0, 0.5])
    {'val/accuracy': 0.75, 'val/accuracy_std': 0.25, 'val/accuracy_worst_decile': 0.5}
    """
    a, name = np.asarray(values, np.float64), f"val/{metric}"
    known = ~np.isnan(a)
    if not known.any():
        return {}
    spread = {
        name: float(np.sort(a[known]).mean()),
        f"{name}_std": float(np.sort(a[known]).std()),
        f"{name}_worst_decile": worst_decile(a[known], higher_is_better),
    }
    if examples is None:
        return spread
    n = np.asarray(examples, np.int64)
    enough = known & (n >= MIN_CLIENT_EXAMPLES)
    spread["val/clients_min5"] = int(enough.sum())
    if enough.any():
        spread[f"{name}_worst_decile_min5"] = worst_decile(a[enough], higher_is_better)
    if enough.sum() > 1 and is_hits:
        spread[f"{name}_std_corrected"] = corrected_std(a[enough], n[enough])
    return spread


def worst_decile(values: np.ndarray, higher_is_better: bool = True) -> float:
    """Return the mean over the worst 10 % of the values ``[K]``, rounded up, so at least one."""
    a = np.sort(values)
    worst = -(-a.size // 10)
    return float((a[:worst] if higher_is_better else a[-worst:]).mean())


def corrected_std(accuracies: np.ndarray, examples: np.ndarray) -> float:
    """Return the standard deviation of the clients' true accuracies, without the noise of few examples.

    A client with true accuracy p and n examples is seen at a with variance p (1 - p) / n, of which
    a (1 - a) / (n - 1) is an unbiased estimate. The variance over clients (divided by K - 1) minus the mean
    of these estimates is an unbiased estimate of the variance of p. Where chance makes it negative, the
    result is 0.

    Args:
        accuracies: accuracy of each client in [0, 1] ``[K]``, K at least 2.
        examples: validation examples of each client ``[K]``, each at least 2.

    >>> round(corrected_std(np.array([0.5, 1.0]), np.array([11, 11])), 4)
    0.3354
    """
    noise = float((accuracies * (1 - accuracies) / (examples - 1)).mean())
    return math.sqrt(max(0.0, float(accuracies.var(ddof=1)) - noise))


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
        ``final/<primary>`` (last evaluated round), ``final/last5_<primary>`` (mean of the last five evaluated
        rounds), ``final/auc_<primary>`` (percent x rounds, or the metric's unit x rounds; there is no area
        with fewer than two evaluated rounds),
        ``final/last5_val_<primary>`` (the validation's mean of the last five) and, chosen by validation
        alone, ``final/best_val_round`` (the first of equals) and ``final/best_val_<primary>`` (its value on
        the validation examples). Names whose values do not exist are left out.
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
                auc_accuracy(values, rounds) if is_share else _area(np.array(values), np.array(rounds))
            )
    if validated:
        sign = 1 if higher_is_better else -1
        best_round, best = max(validated, key=lambda pair: sign * pair[1])  # max keeps the first of equals
        summary["final/best_val_round"] = int(best_round)
        summary[f"final/best_val_{primary}"] = float(best)
        summary[f"final/last5_val_{primary}"] = float(np.mean([value for _, value in validated[-5:]]))
    return summary
