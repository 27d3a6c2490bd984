"""Does a probability mean what it says? torchmetrics, given probabilities (never logits) and
targets.

Legend: n examples, C classes, M bins. Sources: expected calibration error, Guo et al., ICML 2017,
equation 3; Brier score, Brier, Monthly Weather Review 1950.

torchmetrics guesses from the values whether they are logits, so it is handed what has been checked
to be probabilities. Its bins are closed below and open above, and a confidence of exactly 1 has a
bin of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fl_lightning.errors import MisuseError

Numbers = Tensor | np.ndarray | Sequence


class CalibrationBins(NamedTuple):
    """What a reliability diagram draws: bin m < M holds the confidences in [m / M, (m + 1) / M),
    and bin M those that are exactly 1. An empty bin has means of 0.

    Args:
        counts: examples per bin, int64 ``[M + 1]``.
        confidence: mean confidence per bin, float32 ``[M + 1]``, in [0, 1].
        accuracy: share of correct predictions per bin, float32 ``[M + 1]``, in [0, 1].
    """

    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray


def expected_calibration_error(probs: Numbers, target: Numbers, bins: int = 15) -> float:
    """Return the expected calibration error (ECE) in [0, 1] to the last bit as
    ``MulticlassCalibrationError`` of torchmetrics gives it with ``norm="l1"``: equal-width bins,
    confidence = largest probability.

    Args:
        probs: probabilities ``[n, C]``, rows summing to 1; tensor on any device, array or nested
            list.
        target: class indices ``[n]`` in 0 .. C - 1.
        bins: number of bins M, at least 1.

    Raises:
        MisuseError: wrong shapes or ranges, or no examples.

    >>> round(expected_calibration_error([[0.9, 0.1], [0.9, 0.1]], [0, 1]), 6)
    0.4
    """
    from torchmetrics.functional.classification import multiclass_calibration_error

    p, t = _checked(probs, target, bins)
    return multiclass_calibration_error(p, t, p.shape[1], bins, "l1", validate_args=False).item()


def calibration_bins(probs: Numbers, target: Numbers, bins: int = 15) -> CalibrationBins:
    """Return the bins that :func:`expected_calibration_error` is the mean gap of, by the function
    of torchmetrics that it calls; arguments and errors are the same."""
    from torchmetrics.functional.classification.calibration_error import _binning_bucketize

    p, t = _checked(probs, target, bins)
    confidence, predicted = p.max(1)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float32)
    accuracy, mean, share = _binning_bucketize(confidence.float(), (predicted == t).float(), edges)
    counts = (share.double() * len(t)).round().long()
    return CalibrationBins(counts.numpy(), mean.numpy(), accuracy.numpy())


def brier_score(probs: Numbers, target: Numbers) -> float:
    """Return the multiclass Brier score in [0, 2]: squared distance to the one-hot target, summed
    over classes, mean over examples. It is C times the mean squared error of torchmetrics, in
    float64.

    Arguments and errors as :func:`expected_calibration_error`.

    >>> brier_score([[1.0, 0.0], [1.0, 0.0]], [0, 1])
    1.0
    """
    from torchmetrics.functional.regression import mean_squared_error

    p, t = _checked(probs, target)
    C = p.shape[1]
    return C * mean_squared_error(p.double(), one_hot(t, C).double()).item()


def _checked(probs: Numbers, target: Numbers, bins: int = 1) -> tuple[Tensor, Tensor]:
    """Return probabilities in [0, 1] as a float tensor ``[n, C]`` and targets int64 ``[n]``, on the
    CPU."""
    if bins < 1:
        raise MisuseError(f"calibration with {bins} bins", "at least 1 is needed", "15 is usual")
    p, t = _array(probs), _array(target)
    if p.ndim != 2 or t.shape != p.shape[:1]:
        raise MisuseError(
            f"probs {list(p.shape)} and target {list(t.shape)}",
            "[n, C] and [n] are needed",
            "give one row per target",
        )
    if not p.size:
        raise MisuseError(
            f"probs of shape {list(p.shape)}",
            "calibration of no examples is undefined",
            "give at least one",
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
    return torch.tensor(p).clamp(0, 1), torch.tensor(whole)


def _array(values: Numbers) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (
            values.float().numpy()
            if values.is_floating_point() and values.itemsize < 4
            else values.numpy()
        )
    return np.asarray(values)
