"""The figure of negative transfer: what each client gains against itself alone, a panel for each
method."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fl_lightning.figures import BLACK, BLUE, GREY, RED, legend_outside, new_panels
from fl_lightning.study.metric_names import Column, measure_column
from fl_lightning.study.report.comparison import Comparison, Levels
from fl_lightning.study.report.curves import title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_NAMED_CLIENTS = 40
"""With more clients, or where clients hold other examples with every seed, the distribution is
drawn."""
PANELS_PER_ROW = 3
MAX_RANGE_RATIO = 5.0
"""Where the gains of one method reach so many times as far as another's, each panel has its own
axis."""


def negative_transfer(comparison: Comparison, levels: Levels) -> Figure | None:
    """Draw the gains of all clients in the primary metric; None where there are none."""
    transfer, metric = comparison.transfer, comparison.study.task.primary
    written = measure_column(metric, comparison.study.task)
    rows = {
        label: transfer.rows(levels, label, "client", metric) for label in transfer.labels("client")
    }
    rows = {
        label: found for label, found in rows.items() if label != transfer.alone and not found.empty
    }
    if not rows:
        return None
    reaches = [float(found.gain.abs().max()) for found in rows.values()]
    apart = max(reaches) > MAX_RANGE_RATIO * min(reaches)
    runs = [
        run for run in comparison.results.runs if run.levels == dict(levels) and run.label in rows
    ]
    clients = max(found.name.nunique() for found in rows.values())
    named = len({run.partition for run in runs}) == 1 and clients <= MAX_NAMED_CLIENTS
    lines = -(-len(rows) // PANELS_PER_ROW)
    columns = -(-len(rows) // lines)
    height = 1.6 + (0.3 * clients if named else 2.6)
    size = (1.4 + 3.2 * columns, 0.8 + height * lines)
    figure, grid = new_panels(size, lines, columns, sharex=not apart, sharey=True)
    panels = grid.flatten()
    for axes, (label, found) in zip(panels, rows.items(), strict=False):
        axes.axvline(0, color=BLACK, linewidth=0.8)
        (_by_client if named else _distribution)(axes, found, written)
        axes.set_title(label, fontsize="medium")
        axes.tick_params(labelbottom=True)  # below another row, too
        unit = written.unit.strip()
        axes.set_xlabel(f"gain in {written.title.replace('(%)', f'({unit})')}", fontsize="small")
    if not named:
        for axes in panels[::columns]:
            axes.set_ylabel("clients with at most that gain (%)", fontsize="small")
    for axes in panels[len(rows) :]:
        axes.remove()
    own = "; each panel has its own axis" if apart and len(rows) > 1 else ""
    title = f"Gain of each client against {transfer.alone}; left of 0 it is harmed{own}"
    figure.suptitle(title_of(title, levels), fontsize="medium")
    legend_outside(figure)
    return figure


def _by_client(axes: Axes, rows: pd.DataFrame, written: Column) -> None:
    """Draw a line for each client: every seed, and the mean; the worst client in red."""
    once = rows.drop_duplicates("name").itertuples()
    clients: list[Any] = sorted(once, key=lambda row: (str(row.group), int(str(row.name))))
    means = rows.groupby("name").gain.mean()
    worst = means.idxmin()
    for place, client in enumerate(clients):
        gains = rows.gain[rows.name == client.name].to_numpy() * written.scale
        heights = place + 0.16 + 0.2 * np.arange(len(gains)) / len(gains)
        is_worst = client.name == worst
        first = "one seed" if place == 0 and len(gains) > 1 else None
        if len(gains) > 1:
            axes.plot(gains, heights, "o", color=GREY, markersize=3, label=first)
        mean = means[client.name] * written.scale
        axes.plot([0, mean], [place, place], color=RED if is_worst else BLUE, linewidth=1.2)
        look: dict[str, Any] = (
            {"color": RED, "marker": "X"} if is_worst else {"color": BLUE, "marker": "D"}
        )
        axes.plot(mean, place, linestyle="none", **look)
    axes.plot([], [], "D", color=BLUE, label="mean over seeds")
    axes.plot([], [], "X", color=RED, markersize=8, label="worst client")
    names = [f"{client.group} {client.name}".strip() for client in clients]
    axes.set_yticks(range(len(clients)), names, fontsize="small")
    axes.set_ylim(len(clients) - 0.4, -0.6)


def _distribution(axes: Axes, rows: pd.DataFrame, written: Column) -> None:
    """Draw the share of clients with at most a gain, a curve for each seed; where it crosses 0 is
    the share that is harmed. The worst client of each seed is marked."""
    for number, (_, found) in enumerate(rows.groupby("seed")):
        gains = np.sort(found.gain.to_numpy()) * written.scale
        share = 100 * np.arange(1, len(gains) + 1) / len(gains)
        first = number == 0
        look: dict[str, Any] = {"color": BLUE, "linewidth": 1.2, "alpha": 0.8}
        axes.step(
            [gains[0], *gains],
            [0, *share],
            where="post",
            label="one seed" if first else None,
            **look,
        )
        axes.plot(
            gains[0],
            share[0],
            "X",
            color=RED,
            markersize=7,
            label="worst client" if first else None,
        )
    axes.set_ylim(-2, 102)
