"""Which class is taken for which, on the global test set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from callbacks.figures.drawing import log, never_fatal
from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.figures import new_axes
from fl_lightning.hooks import Context, RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WRITTEN = 20  # classes; the numbers in more cells than that cannot be read


class ConfusionMatrix(FigureMeter):
    """Draws ``figures/confusion_matrix``, its rows normalised, and leaves the counts in
    ``figures/confusion_matrix.csv``."""

    name = "confusion_matrix"

    def on_evaluate(
        self, probs: Tensor, target: Tensor, record: RoundRecord, context: Context
    ) -> None:
        if not torch.isfinite(probs).all():
            log.warning(
                "round %d: the model's probabilities are not finite; the confusion matrix leaves it out",
                record.round,
            )
            return
        self.seen = {"round": record.round, "counts": confusion_counts(probs, target).tolist()}

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if self.seen.get("round") == record.round:
            super().on_round_end(record, context)

    def on_fit_end(self, summary: dict[str, float], context: Context) -> None:
        if self.seen:
            with never_fatal("figures/confusion_matrix.csv"):
                context.log_text("confusion_matrix.csv", as_csv(self._counts()))
        super().on_fit_end(summary, context)

    def figure(self, context: Context) -> Figure:
        if not self.seen:
            raise ValueError("no round had finite probabilities")
        return confusion_figure(self._counts(), f"Confusion matrix, round {self.seen['round']}")

    def _counts(self) -> np.ndarray:
        return np.array(self.seen["counts"], np.int64)


def confusion_counts(probs: Tensor, target: Tensor) -> np.ndarray:
    """Examples of each true class (row) that are taken for each class (column), int64 ``[C,
    C]``."""
    C = probs.shape[1]
    return torch.bincount(target * C + probs.argmax(1), minlength=C * C).view(C, C).cpu().numpy()


def as_csv(counts: np.ndarray) -> str:
    """Return the counts as CSV: a line for each true class, a column for each predicted one."""
    import pandas as pd

    return pd.DataFrame(counts).to_csv(index_label="true class", lineterminator="\n")


def confusion_figure(counts: np.ndarray, title: str) -> Figure:
    """True classes down, predicted ones across, colour = share of the row; a class without examples
    is left blank."""
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    C, total = len(counts), counts.sum(axis=1, keepdims=True)
    percent = np.ma.masked_where(
        np.broadcast_to(total == 0, counts.shape), 100 * counts / np.maximum(total, 1)
    )
    accuracy = 100 * np.trace(counts) / max(counts.sum(), 1)
    figure, axes = new_axes(
        f"{title}: {accuracy:.1f} % correct", "predicted class", "true class", size=(6.6, 5.6)
    )
    axes.grid(False)
    # without numbers, what is rare must be seen
    scale = "" if C <= WRITTEN else ", square-root scale"
    norm = PowerNorm(1 if C <= WRITTEN else 0.5, vmin=0, vmax=100)
    image = axes.imshow(percent, cmap="Blues", norm=norm, interpolation="nearest")
    figure.colorbar(
        image, ax=axes, label=f"share of the true class's examples (%{scale})", pad=0.02
    )
    for locator in (axes.xaxis, axes.yaxis):
        locator.set_major_locator(MaxNLocator(min(C, WRITTEN), integer=True))
    for row, column in np.argwhere(counts) if C <= WRITTEN else ():
        share = percent[row, column]
        axes.text(
            column,
            row,
            f"{share:.0f}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if share > 50 else "black",
        )
    return figure
