"""How evenly clients are served, in the few numbers that a table shows. All accuracies in [0,
1]."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

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

    ``val/accuracy``, ``val/accuracy_std`` and ``val/accuracy_worst_decile``, or those of another
    metric, are of all clients, each of the same weight, however many examples it has. The standard
    deviation is the population's (divided by n). The worst decile is the mean over the worst 10 %
    of clients, rounded up, so at least one. Both include the binomial noise of few examples: with
    one example a client they are a function of the mean.

    With ``examples`` there are also, over the clients with at least ``MIN_CLIENT_EXAMPLES`` (5) of
    them, ``val/clients_min5``, their number; ``val/accuracy_worst_decile_min5``; and, of two
    clients or more and where the metric is a share of examples, ``val/accuracy_std_corrected``, see
    :func:`corrected_std`.

    Args:
        values: the metric of each client ``[K]`` that has one; of none, the result is empty. One
            that is NaN, since outputs were not finite, makes all of them NaN.
        examples: validation examples of each client ``[K]``.
        metric: its name.
        higher_is_better: whether the worst clients are those with the lowest values.
        is_hits: whether a client's value is the share of its examples that are right.

    >>> client_spread([1.0, 0.5])
    {'val/accuracy': 0.75, 'val/accuracy_std': 0.25, 'val/accuracy_worst_decile': 0.5}
    """
    a, name = np.asarray(values, np.float64), f"val/{metric}"
    if not len(a):
        return {}
    spread = {
        name: float(np.sort(a).mean()),
        f"{name}_std": float(np.sort(a).std()),
        f"{name}_worst_decile": worst_decile(a, higher_is_better),
    }
    if examples is None:
        return spread
    n = np.asarray(examples, np.int64)
    enough = n >= MIN_CLIENT_EXAMPLES
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
    if np.isnan(a[-1]):
        return math.nan
    return float((a[:worst] if higher_is_better else a[-worst:]).mean())


def corrected_std(accuracies: np.ndarray, examples: np.ndarray) -> float:
    """Return the standard deviation of the clients' true accuracies, without the noise of few
    examples.

    A client with true accuracy p and n examples is seen at a with variance p (1 - p) / n, of which
    a (1 - a) / (n - 1) is an unbiased estimate. The variance over clients (divided by K - 1) minus
    the mean of these estimates is an unbiased estimate of the variance of p. Where chance makes it
    negative, the result is 0.

    Args:
        accuracies: accuracy of each client in [0, 1] ``[K]``, K at least 2.
        examples: validation examples of each client ``[K]``, each at least 2.

    >>> round(corrected_std(np.array([0.5, 1.0]), np.array([11, 11])), 4)
    0.3354
    """
    noise = float((accuracies * (1 - accuracies) / (examples - 1)).mean())
    variance = float(accuracies.var(ddof=1)) - noise
    return 0.0 if variance < 0 else math.sqrt(variance)
