"""What the primary metric costs: accuracy, or what the task has, against everything that has
crossed the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.figures import BLACK, BLUE, ORANGE, RED, legend_outside, new_panels
from fl_lightning.hooks import Context, RoundRecord
from fl_lightning.tasks import Classification, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("comm/download_bytes", "comm/upload_bytes", "comm/wasted_bytes")

CLASSIFICATION = Classification()


class AccuracyBytesFigure(FigureMeter):
    """Draws ``figures/accuracy_bytes``, or the same of another primary metric: its value on the
    test set against cumulative megabytes, down and up, wasted uploads included."""

    name = "accuracy_bytes"
    empty: ClassVar = {"rows": []}

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        found, primary = record.metrics, f"test/{context.data.task.primary}"
        value = float(found[primary]) if primary in found else None  # it was not evaluated
        own = [float(found.get(name, float("nan"))) for name in COLUMNS]
        self.seen["rows"].append([*own, value])
        super().on_round_end(record, context)

    def on_check(self, context: Context) -> None:
        super().on_check(context)
        self.name = f"{context.data.task.primary}_bytes"  # type: ignore[misc]

    def figure(self, context: Context) -> Figure:
        rows = np.array(self.seen["rows"], float).reshape(-1, len(COLUMNS) + 1)
        down, up, wasted, value = rows.T
        last = next((row[-1] for row in reversed(self.seen["rows"]) if row[-1] is not None), None)
        return accuracy_bytes_figure(down, up, wasted, value, context.data.task, last)


def accuracy_bytes_figure(
    down: np.ndarray,
    up: np.ndarray,
    wasted: np.ndarray,
    value: np.ndarray,
    task: Task = CLASSIFICATION,
    last: float | None = None,
) -> Figure:
    """Above: the primary metric after each evaluated round. Below, on the same axis: what the
    megabytes of the whole run were.

    Args:
        down, up: bytes of each round ``[R]``, over the whole cohort.
        wasted: those of ``up`` that never counted.
        value: the task's primary metric on the test set, NaN where the round was not evaluated.
        task: names that metric.
        last: value of the last round that was evaluated; None: the last one that is finite.
    """
    evaluated, primary = np.isfinite(value), task.primary
    if not evaluated.any():
        raise ValueError(f"no round has a finite test/{primary}")
    figure, ((top,), (bottom,)) = new_panels((6.8, 4.6), 2, 1, sharex=True, height_ratios=[5, 1])
    megabytes = (down + up).cumsum() / 1e6
    known = value[evaluated]
    at_end = task.shown(primary, known[-1] if last is None else last)
    shown = task.scale(primary) * known
    top.plot(megabytes[evaluated], shown, color=BLUE, marker=".", markersize=4, linewidth=1.5)
    best = int(known.argmax() if task.higher_is_better else known.argmin())
    top.plot(
        megabytes[evaluated][best],
        shown[best],
        "o",
        markerfacecolor="none",
        color=BLACK,
        markersize=9,
    )
    top.set(
        ylabel=f"test {task.title(primary)}",
        title=(
            f"{len(value)} rounds, {megabytes[-1]:.2f} MB: {at_end} at the end, "
            f"{task.shown(primary, known[best])} at best (circle)"
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
        bottom.barh(
            0, width, left=left, height=0.6, hatch=hatch, label=f"{label} {width:.2f} MB", **style
        )
        left += width
    bottom.set(
        yticks=[],
        xlabel="cumulative megabytes over the wire, whole cohort (1 MB = 10⁶ bytes)",
        xlim=(0, 1.03 * megabytes[-1] or 1),
    )
    bottom.grid(False)
    legend_outside(figure)
    return figure
