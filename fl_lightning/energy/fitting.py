"""Costs from measured joules: a line where one is good enough, and else a curve through the points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from fl_lightning.energy.cost_shapes import KINDS, Cost, CostCurve, CostLine, MeasuredCost

MAX_RELATIVE_ERROR = 0.25
"""A line that misses one of the points it was fitted to by more is replaced by a curve."""
QUANTILE = 0.99
STRETCHES = 8
SMALLEST_JOULES = 1e-12


@dataclass(frozen=True)
class Fit:
    """A cost and how far it is from measurements that it was not fitted to.

    Args:
        cost: mean and 0.99 quantile.
        errors: relative errors of the mean at held-out n, ``{n: predicted / measured - 1}``.
    """

    cost: MeasuredCost
    errors: Mapping[int, float]


def fit(samples: Mapping[int, np.ndarray], held_out: Mapping[int, np.ndarray]) -> Fit:
    """Return the cost of one piece of work.

    Args:
        samples: joules of single steps by their number of tokens, each ``[repeats]``.
        held_out: the same at numbers of tokens that are not fitted.
    """
    tokens = sorted(samples)
    means = np.array([robust_mean(samples[n]) for n in tokens])
    highest = np.array([np.quantile(samples[n], QUANTILE, method="higher") for n in tokens])
    found = {
        "mean": line_or_curve(tokens, means),
        "q99": line_or_curve(tokens, np.maximum(highest, means)),
    }
    return Fit(MeasuredCost(*(found[kind] for kind in KINDS)), held_out_errors(found["mean"], held_out))


def held_out_errors(cost: Cost, held_out: Mapping[int, np.ndarray]) -> dict[int, float]:
    """Return ``predicted / measured - 1`` of the mean at each held-out number of tokens."""
    return {
        n: float(cost.at(n)) / max(robust_mean(values), SMALLEST_JOULES) - 1.0
        for n, values in sorted(held_out.items())
    }


def robust_mean(values: np.ndarray) -> float:
    """Return the median of the means of eight stretches of samples ``[repeats]``, in the order of their time.

    A moment in which another process disturbed the caches moves one stretch and not the result.
    """
    return float(np.median([part.mean() for part in np.array_split(values, min(STRETCHES, len(values)))]))


def line_or_curve(tokens: list[int], joules: np.ndarray) -> Cost:
    """Return the best line where it is within 25 % of every point, and else the curve through all points.

    Args:
        tokens: ascending from 1.
        joules: ``[points]``, 0 or more.
    """
    line = best_line(np.array(tokens, dtype=float), joules)
    errors = np.abs(line.at(tokens) - joules) / np.maximum(joules, SMALLEST_JOULES)
    if errors.max() <= MAX_RELATIVE_ERROR:
        return line
    return CostCurve(tuple(tokens), tuple(map(float, joules)))


def best_line(tokens: np.ndarray, joules: np.ndarray) -> CostLine:
    """Return the line a + b n, a and b at least 0, of least squared relative error (Lawson and Hanson 1974).

    Args:
        tokens: ``[points]``.
        joules: ``[points]``, 0 or more.
    """
    weights = 1.0 / np.maximum(joules, SMALLEST_JOULES)
    design = np.stack((np.ones_like(tokens), tokens), axis=1) * weights[:, None]
    scale = np.maximum(np.linalg.norm(design, axis=0), SMALLEST_JOULES)
    solution, _ = nnls(design / scale, joules * weights)
    a, b = solution / scale
    return CostLine(float(a), float(b))
