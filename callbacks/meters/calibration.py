"""Calibration on the global test set: numbers each evaluated round, a reliability diagram when
asked for and at the end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor

from callbacks.figures.drawing import Every, draw
from fl_lightning.config.constraints import within
from fl_lightning.errors import require
from fl_lightning.figures import GREY, RED, SKY, new_panels
from fl_lightning.hooks import Context, Meter, RoundRecord
from fl_lightning.metrics import (
    CalibrationBins,
    brier_score,
    calibration_bins,
    expected_calibration_error,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fl_lightning")

HATCHED = 30
"""Up to so many bins have room for a pattern."""


class Calibration(Meter):
    """Adds ``test/ece`` (in [0, 1]) and ``test/brier`` (in [0, 2]) to each evaluated round; both
    are NaN where probabilities are.

    Args:
        bins: equal-width bins of confidence, at least 1, of the metric and the diagram; the
            ``test`` command has a ``test/ece`` of 15 bins.
        every: rounds between reliability diagrams (``figures/reliability_round_0060``); 0: only the
            last.
    """

    def __init__(
        self,
        bins: Annotated[int, within("[1, inf)", "bins of confidence, 1 or more", 15)] = 15,
        every: Every = 0,
    ) -> None:
        self.bins, self.every = bins, every
        self._last: tuple[int, CalibrationBins, float | None] | None = None
        self._drawn = 0

    def on_check(self, context: Context) -> None:
        bins = sorted({other.bins for other in context.callbacks if isinstance(other, Calibration)})
        require(
            len(bins) <= 1,
            "callbacks.Calibration",
            f"there are several, of {' and '.join(map(str, bins))} bins, and one test/ece",
            "leave one",
        )
        self._last, self._drawn = None, 0

    def on_evaluate(
        self, probs: Tensor, target: Tensor, record: RoundRecord, context: Context
    ) -> None:
        if not torch.isfinite(probs).all():
            record.metrics |= {"test/ece": float("nan"), "test/brier": float("nan")}
            log.warning(
                "round %d: the model's probabilities are not finite; ECE and Brier are NaN",
                record.round,
            )
            return
        ece = expected_calibration_error(probs, target, self.bins)
        record.metrics |= {"test/ece": ece, "test/brier": brier_score(probs, target)}
        self._last = record.round, calibration_bins(probs, target, self.bins), ece
        if self.every and record.round % self.every == 0:
            self._draw(context)

    def on_fit_end(self, summary: dict[str, float], context: Context) -> None:
        if self._last and self._last[0] != self._drawn:
            self._draw(context)

    def state_dict(self) -> dict[str, Any]:
        """Return the last bins: a run that was killed between its last evaluation and its end still
        draws its diagram."""
        if self._last is None:
            return {}
        round, bins, ece = self._last
        return {"round": round, "bins": [values.tolist() for values in bins], "ece": ece}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; that of a version before has M bins and no
        ECE."""
        self._last = None
        if state:
            bins = CalibrationBins(*map(np.array, state["bins"]))
            self._last = state["round"], bins, state.get("ece")

    def _draw(self, context: Context) -> None:
        assert self._last is not None
        self._drawn, bins, ece = self._last
        title = f"round {self._drawn}" + ("" if ece is None else f": ECE {ece:.3f}")
        draw(
            context, "reliability", lambda: reliability_diagram(bins, title, self.bins), self._drawn
        )


def reliability_diagram(bins: CalibrationBins, title: str, M: int) -> Figure:
    """Draw accuracy and mean confidence of each of M bins with the gap between them; below, how
    many examples each bin holds. The bin of confidences that are exactly 1 is a narrow bar at the
    right end."""
    width = np.r_[np.full(M, 1 / M), 0.2 / M][: len(bins.counts)]
    centre = np.r_[(np.arange(M) + 0.5) / M, 1 - 0.1 / M][: len(bins.counts)]
    full = bins.counts > 0
    figure, ((top,), (bottom,)) = new_panels((5, 6), 2, 1, sharex=True, height_ratios=[3, 1])
    top.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="perfect calibration")
    top.bar(
        centre[full],
        bins.accuracy[full],
        width[full],
        color=SKY,
        edgecolor="white",
        label="accuracy",
    )
    low = np.minimum(bins.accuracy, bins.confidence)
    high = np.maximum(bins.accuracy, bins.confidence)
    gap: dict[str, Any] = {"color": "none", "edgecolor": RED, "hatch": "////", "linewidth": 1.0}
    if M > HATCHED:  # the hatching of narrow bars hides what is behind it
        gap = {"color": RED, "alpha": 0.35, "linewidth": 0}
    top.bar(
        centre[full],
        (high - low)[full],
        0.86 * width[full],
        bottom=low[full],
        label="gap to mean confidence",
        **gap,
    )
    top.plot(bins.confidence[full], bins.confidence[full], "o", color=RED, markersize=3.5)
    top.set(
        xlim=(0, 1),
        ylim=(0, 1),
        ylabel="share of correct predictions",
        title=f"Reliability, {title}",
    )
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize="small")
    bottom.bar(centre, bins.counts, width, color=GREY, edgecolor="white")
    bottom.set(xlabel=f"confidence (largest probability), {M} bins", ylabel="examples")
    return figure
