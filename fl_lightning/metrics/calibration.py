"""Does a probability mean what it says? Pure functions of probabilities (never logits) and targets.

Legend: n examples, C classes, M bins. Sources: expected calibration error, Guo et al., ICML 2017, equation 3;
Brier score, Brier, Monthly Weather Review 1950.

The bins are Guo et al.'s, open below and closed above. Those of torchmetrics are closed below and open above:
its error of the confidences 0.6 (right) and 0.7 (wrong) in 5 bins is 0.15, where equation 3 gives 0.55; and a
confidence of exactly 1 has a bin of its own. A reliability diagram needs the bins themselves, which it keeps
private.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fl_lightning.errors import MisuseError

Numbers = Tensor | np.ndarray | Sequence


class CalibrationBins(NamedTuple):
    """What a reliability diagram draws. Bin m holds confidences in (m / M, (m + 1) / M]; an empty bin has
    means of 0.

    Args:
        counts: examples per bin, int64 ``[M]``.
        confidence: mean confidence per bin, float64 ``[M]``, in [0, 1].
        accuracy: share of correct predictions per bin, float64 ``[M]``, in [0, 1].
    """

    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray

    @property
    def error(self) -> float:
        """Expected calibration error: ``sum_m counts_m / n * |accuracy_m - confidence_m|`` (L1)."""
        return float((self.counts * np.abs(self.accuracy - self.confidence)).sum() / self.counts.sum())


def expected_calibration_error(probs: Numbers, target: Numbers, bins: int = 15) -> float:
    """Expected calibration error (ECE) in [0, 1]: L1, equal-width bins ``(lo, hi]``, confidence = largest
    probability.

    Args:
        probs: probabilities ``[n, C]``, rows summing to 1; tensor on any device, array or nested list.
        target: class indices ``[n]`` in 0 .. C - 1.
        bins: number of bins M, at least 1.

    Raises:
        MisuseError: wrong shapes or ranges, or no examples.

    >>> round(expected_calibration_error([[0.9, 0.1], [0.9, 0.1]], [0, 1]), 6)
    0.4
    """
    return calibration_bins(probs, target, bins).error


def calibration_bins(probs: Numbers, target: Numbers, bins: int = 15) -> CalibrationBins:
    """Count, mean confidence and accuracy per bin; arguments and errors as
    :func:`expected_calibration_error`."""
    if bins < 1:
        raise MisuseError(f"calibration with {bins} bins", "at least 1 is needed", "15 is usual")
    p, t = _checked(probs, target)
    confidence = p.max(axis=1)
    edges = (np.arange(1, bins) / bins).astype(
        p.dtype
    )  # in the precision of p: 0.6 in float32 is on the edge 0.6, not above it
    index = np.searchsorted(edges, confidence, side="left")
    counts = np.bincount(index, minlength=bins)
    correct = (p.argmax(axis=1) == t).astype(np.float64)
    total = np.maximum(counts, 1)
    return CalibrationBins(
        counts,
        np.bincount(index, weights=confidence.astype(np.float64), minlength=bins) / total,
        np.bincount(index, weights=correct, minlength=bins) / total,
    )


def brier_score(probs: Numbers, target: Numbers) -> float:
    """Multiclass Brier score in [0, 2]: squared distance to the one-hot target, summed over classes, mean
    over examples.

    Arguments and errors as :func:`expected_calibration_error`.

    >>> brier_score([[1.0, 0.0], [1.0, 0.0]], [0, 1])
    1.0
    """
    p, t = _checked(probs, target)
    p = p.astype(np.float64)
    of_target = p[np.arange(len(t)), t]
    return float(((p**2).sum(axis=1) - 2 * of_target + 1).mean())


def _checked(probs: Numbers, target: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities as a float array ``[n, C]``, targets as int64 ``[n]``."""
    p, t = _array(probs), _array(target)
    if p.ndim != 2 or t.shape != p.shape[:1]:
        raise MisuseError(
            f"probs {list(p.shape)} and target {list(t.shape)}",
            "[n, C] and [n] are needed",
            "give one row per target",
        )
    if not p.size:
        raise MisuseError(
            f"probs of shape {list(p.shape)}", "calibration of no examples is undefined", "give at least one"
        )
    if p.dtype not in (np.float32, np.float64):
        p = p.astype(np.float32 if p.dtype == np.float16 else np.float64)
    if not (
        np.isfinite(p).all()
        and p.min() >= 0
        and p.max() <= 1 + 1e-6
        and np.abs(p.sum(axis=1) - 1).max() < 1e-3
    ):
        sums = p.sum(axis=1)
        raise MisuseError(
            f"probs from {p.min():g} to {p.max():g} in rows that sum to {sums.min():g} to {sums.max():g}",
            "probabilities lie in [0, 1] and sum to 1",
            "give softmax(logits)",
        )
    whole = t.astype(np.int64)
    if (whole != t).any() or whole.min() < 0 or whole.max() >= p.shape[1]:
        raise MisuseError(
            f"target from {t.min()} to {t.max()}",
            f"class indices 0 to {p.shape[1] - 1} are needed",
            "check the labels",
        )
    return p, whole


def _array(values: Numbers) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (
            values.float().numpy() if values.is_floating_point() and values.itemsize < 4 else values.numpy()
        )
    return np.asarray(values)
