"""Costs from measured joules: a line where one is good enough, and else a curve through the
points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import nnls

from fl_lightning.energy.cost_shapes import Cost, CostCurve, CostLine, MeasuredCost

MAX_RELATIVE_ERROR = 0.25
"""A cost that is farther from held-out measurements is not good enough; tables show it in red."""
MAX_ERROR_OF_LINE = 0.1
"""A line that is farther from one of the points it was fitted to is replaced by a curve through
them."""
QUANTILE = 0.99
STRETCHES = 8
SMALLEST_JOULES = 1e-12
ROUNDING = 1e-12
"""Share of a quantile by which a line through its points may miss them."""


def measured_cost(tokens: Sequence[int], means: np.ndarray, quantiles: np.ndarray) -> MeasuredCost:
    """Return the cost of one piece of work, whose quantile is nowhere below its mean up to the last
    point, and at no point below what was measured there.

    A line may pass below its points, so what is charged for enforcement would be less than the
    measured quantile, and where two lines cross, less than what is counted in training: the
    quantile is a line only where that lies on its points or above them.

    Args:
        tokens: ascending from 1.
        means: mean joules of a step, ``[points]``.
        quantiles: 0.99 quantiles ``[points]``; one below its mean counts as the mean.
    """
    mean = line_or_curve(tokens, means)
    highest = np.maximum(quantiles, mean.at(tokens))
    quantile = line_or_curve(tokens, highest)
    least = np.maximum(highest * (1 - ROUNDING), mean.at(tokens))
    if (quantile.at(tokens) < least).any():
        quantile = _curve(tokens, highest)
    return MeasuredCost(mean, quantile)


def relative_errors(
    predicted: Mapping[int, float], held_out: Mapping[int, np.ndarray]
) -> dict[int, float]:
    """Return ``predicted / measured mean - 1`` at each held-out number of tokens.

    Args:
        predicted: joules by number of tokens.
        held_out: samples ``[repeats]`` by number of tokens.
    """
    return {
        n: predicted[n] / max(robust_mean(values), SMALLEST_JOULES) - 1.0
        for n, values in sorted(held_out.items())
    }


def high_quantile(values: np.ndarray) -> float:
    """Return the 0.99 quantile of samples ``[repeats]``, the next sample above it where it is
    between two."""
    return float(np.quantile(values, QUANTILE, method="higher"))


def robust_mean(values: np.ndarray) -> float:
    """Return the median of the means of eight stretches of samples ``[repeats]``, in the order of
    their time.

    A moment in which another process disturbed the caches moves one stretch and not the result.
    """
    return float(
        np.median([part.mean() for part in np.array_split(values, min(STRETCHES, len(values)))])
    )


def line_or_curve(tokens: Sequence[int], joules: np.ndarray) -> Cost:
    """Return the best line where it is within 10 % of every point, and else the curve through all
    points.

    Args:
        tokens: ascending from 1.
        joules: ``[points]``, 0 or more.
    """
    line = best_line(np.array(tokens, dtype=float), joules)
    errors = np.abs(line.at(tokens) - joules) / np.maximum(joules, SMALLEST_JOULES)
    if errors.max() <= MAX_ERROR_OF_LINE:
        return line
    return _curve(tokens, joules)


def _curve(tokens: Sequence[int], joules: np.ndarray) -> CostCurve:
    return CostCurve(tuple(tokens), tuple(map(float, joules)))


def best_line(tokens: np.ndarray, joules: np.ndarray) -> CostLine:
    """Return the line a + b n, a and b at least 0, of least squared relative error (Lawson and
    Hanson 1974).

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
