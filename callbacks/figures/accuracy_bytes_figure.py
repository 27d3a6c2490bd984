"""What accuracy costs: test accuracy against everything that has crossed the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.figures import BLACK, BLUE, ORANGE, RED, legend_outside, open_frame
from fl_lightning.hooks import Context, RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("comm/download_bytes", "comm/upload_bytes", "comm/wasted_bytes", "test/accuracy")


class AccuracyBytesFigure(FigureMeter):
    """Draws ``figures/accuracy_bytes``: test accuracy against cumulative megabytes, down and up, wasted
    uploads included."""

    name = "accuracy_bytes"
    empty: ClassVar = {"rows": []}

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        self.seen["rows"].append([float(record.metrics.get(name, float("nan"))) for name in COLUMNS])
        super().on_round_end(record, context)

    def figure(self, context: Context) -> Figure:
        rows = np.array(self.seen["rows"]).reshape(-1, len(COLUMNS))
        return accuracy_bytes_figure(*rows.T)


def accuracy_bytes_figure(
    down: np.ndarray, up: np.ndarray, wasted: np.ndarray, accuracy: np.ndarray
) -> Figure:
    """Above: accuracy after each evaluated round. Below, on the same axis: what the megabytes of the whole
    run were.

    Args:
        down, up: bytes of each round ``[R]``, over the whole cohort.
        wasted: those of ``up`` that never counted.
        accuracy: test accuracy in [0, 1], NaN where the round was not evaluated.
    """
    from matplotlib.figure import Figure

    evaluated = np.isfinite(accuracy)
    if not evaluated.any():
        raise ValueError("no round has a finite test/accuracy")
    figure = Figure(figsize=(6.8, 4.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    open_frame(top, bottom)
    megabytes = (down + up).cumsum() / 1e6
    percent = 100 * accuracy[evaluated]
    top.plot(megabytes[evaluated], percent, color=BLUE, marker=".", markersize=4, linewidth=1.5)
    best = int(percent.argmax())
    top.plot(
        megabytes[evaluated][best], percent[best], "o", markerfacecolor="none", color=BLACK, markersize=9
    )
    top.set(
        ylabel="test accuracy (%)",
        title=(
            f"{len(accuracy)} rounds, {megabytes[-1]:.2f} MB: {percent[-1]:.1f} % at the end, "
            f"{percent[best]:.1f} % at best (circle)"
        ),
    )
    left = 0.0
    parts = (
        ("down", down, BLUE, ""),
        ("up, counted", up - wasted, ORANGE, ""),
        ("up, wasted", wasted, RED, "////"),
    )
    for label, part, colour, hatch in parts:
        width = part.sum() / 1e6
        style = {"facecolor": "white", "edgecolor": colour} if hatch else {"color": colour}
        bottom.barh(0, width, left=left, height=0.6, hatch=hatch, label=f"{label} {width:.2f} MB", **style)
        left += width
    bottom.set(
        yticks=[],
        xlabel="cumulative megabytes over the wire, whole cohort (1 MB = 10⁶ bytes)",
        xlim=(0, 1.03 * megabytes[-1] or 1),
    )
    bottom.grid(False)
    legend_outside(figure)
    return figure
