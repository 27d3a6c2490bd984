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
    return float((np.diff(r) * (a[1:] + a[:-1]) / 2).sum() * 100)


MIN_CLIENT_EXAMPLES = 5
"""Validation examples from which on a client's accuracy says something of that client."""


def client_spread(
    accuracies: Sequence[float] | np.ndarray, examples: Sequence[int] | np.ndarray | None = None
) -> dict[str, float]:
    """Return how evenly clients are served.

    ``val/accuracy``, ``val/accuracy_std`` and ``val/accuracy_worst_decile`` are of all clients, each of the
    same weight, however many examples it has. The standard deviation is the population's (divided by n). The
    worst decile is the mean over the worst 10 % of clients, rounded up, so at least one. Both include the
    binomial noise of few examples: with one example a client they are a function of the mean.

    With ``examples`` there are also, over the clients with at least ``MIN_CLIENT_EXAMPLES`` (5) of them,
    ``val/clients_min5``, their number; ``val/accuracy_worst_decile_min5``; and, of two clients or more,
    ``val/accuracy_std_corrected``, see :func:`corrected_std`.

    Args:
        accuracies: accuracy of each client in [0, 1] ``[K]``; clients without validation examples are given
            as NaN and left out; with none left, the result is empty.
        examples: validation examples of each client ``[K]``.

    >>> client_spread([1.0, 0.5])
    {'val/accuracy': 0.75, 'val/accuracy_std': 0.25, 'val/accuracy_worst_decile': 0.5}
    """
    a = np.asarray(accuracies, np.float64)
    known = ~np.isnan(a)
    if not known.any():
        return {}
    spread = {
        "val/accuracy": float(np.sort(a[known]).mean()),
        "val/accuracy_std": float(np.sort(a[known]).std()),
        "val/accuracy_worst_decile": worst_decile(a[known]),
    }
    if examples is None:
        return spread
    n = np.asarray(examples, np.int64)
    enough = known & (n >= MIN_CLIENT_EXAMPLES)
    spread["val/clients_min5"] = int(enough.sum())
    if enough.any():
        spread["val/accuracy_worst_decile_min5"] = worst_decile(a[enough])
    if enough.sum() > 1:
        spread["val/accuracy_std_corrected"] = corrected_std(a[enough], n[enough])
    return spread


def worst_decile(accuracies: np.ndarray) -> float:
    """Return the mean over the lowest 10 % of the values ``[K]``, rounded up, so at least one."""
    a = np.sort(accuracies)
    return float(a[: -(-a.size // 10)].mean())


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


def final_summary(history: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the ``final/*`` metrics of a run.

    Args:
        history: one row per round, in order, with ``round`` and, where the round was evaluated,
            ``test/accuracy`` and ``val/accuracy``. Rows without them are skipped.

    Returns:
        ``final/accuracy`` (last evaluated round), ``final/last5_accuracy`` (mean of the last five evaluated
        rounds), ``final/auc_accuracy`` (percent x rounds), ``final/last5_val_accuracy`` (the validation
        accuracy's mean of the last five) and, chosen by validation alone, ``final/best_val_round`` (the first
        of equals) and ``final/best_val_accuracy`` (its validation accuracy). Names whose values
        do not exist are left out.
    """
    rows = list(history)
    tested = [(row["round"], row["test/accuracy"]) for row in rows if row.get("test/accuracy") is not None]
    validated = [(row["round"], row["val/accuracy"]) for row in rows if row.get("val/accuracy") is not None]
    summary: dict[str, float] = {}
    if tested:
        rounds, accuracies = zip(*tested, strict=True)
        summary["final/accuracy"] = float(accuracies[-1])
        summary["final/last5_accuracy"] = float(np.mean(accuracies[-5:]))
        summary["final/auc_accuracy"] = auc_accuracy(accuracies, rounds)
    if validated:
        best_round, best = max(validated, key=lambda pair: pair[1])  # max keeps the first of equals
        summary["final/best_val_round"] = int(best_round)
        summary["final/best_val_accuracy"] = float(best)
        summary["final/last5_val_accuracy"] = float(np.mean([accuracy for _, accuracy in validated[-5:]]))
    return summary
