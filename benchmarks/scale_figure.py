"""The figure of ``scale.py``: rounds a second, memory and shares of the time, above against the
cohort, below against the population."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fl_lightning.figures import BLUE, COLOURS, GREY, LINE_STYLES, MARKERS, ORANGE, open_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = ("training", "collecting", "orders", "sampling", "aggregation", "checkpoints")
"""Phases with a colour of their own; what is left is the rest."""


def draw(points: Sequence[dict[str, Any]]) -> Figure:
    """What ``scale.py`` measured, without the points that failed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 7.2), layout="constrained")
    rows = figure.subplots(2, 3)
    for axes, vary, fixed in zip(
        rows, ("cohort", "population"), ("population", "cohort"), strict=True
    ):
        values = [point[fixed] for point in points]
        held = max(set(values), key=values.count)  # most points are of this one
        row = sorted(
            (point for point in points if point[fixed] == held), key=lambda point: point[vary]
        )
        _speed(axes[0], row, vary)
        _memory(axes[1], row, vary)
        _shares(axes[2], row, vary)
        of = f"{fixed} {held:,}".replace(",", " ")
        for one, title in zip(
            axes,
            ("Rounds a second", "Memory held", "Where the time goes, one process"),
            strict=True,
        ):
            one.set_title(f"{title} ({of})", fontsize="medium")
    return figure


def _by_workers(row: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    return {
        workers: [p for p in row if p["workers"] == workers]
        for workers in sorted({p["workers"] for p in row})
    }


def _style(at: int) -> dict[str, Any]:
    return {
        "color": (BLUE, ORANGE, *COLOURS[2:])[at],
        "linestyle": LINE_STYLES[at],
        "marker": MARKERS[at],
    }


def _name(workers: int) -> str:
    return "1 process" if workers == 1 else f"{workers} processes"


def _speed(axes: Axes, row: Sequence[dict[str, Any]], vary: str) -> None:
    for at, (workers, points) in enumerate(_by_workers(row).items()):
        axes.plot(
            [p[vary] for p in points],
            [1 / p["seconds"] for p in points],
            label=_name(workers),
            **_style(at),
        )
        hollow = [p for p in points if p["engine"] == "sequential"]
        place = [p[vary] for p in hollow], [1 / p["seconds"] for p in hollow]
        axes.plot(*place, **{**_style(at), "linestyle": "none"}, markerfacecolor="white", zorder=3)
    if any(p["engine"] == "sequential" for p in row):
        marker = {**_style(0), "linestyle": "none", "color": GREY, "markerfacecolor": "white"}
        axes.plot([], [], **marker, label="one client after another")
    speeds = [1 / p["seconds"] for p in row]
    axes.set(xscale="log", yscale="log", xlabel=f"{vary} (clients)", ylabel="rounds per second")
    # small differences stay small
    axes.set_ylim(min(speeds) / 2, max(max(speeds), 10 * min(speeds)) * 2)
    _plain_ticks(axes)
    open_frame(axes)
    axes.legend(frameon=False)


def _memory(axes: Axes, row: Sequence[dict[str, Any]], vary: str) -> None:
    for at, (workers, points) in enumerate(_by_workers(row).items()):
        axes.plot(
            [p[vary] for p in points],
            [p["memory_mib"] for p in points],
            label=_name(workers),
            **_style(at),
        )
    if vary == "population":
        own = {p[vary]: 2 * p["labels_mib"] for p in row}
        axes.plot(
            *zip(*own.items(), strict=True),
            label="labels and indices of all examples",
            color=GREY,
            linestyle=":",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=f"{vary} (clients)",
        ylabel="all processes, without libraries (MiB)",
        ylim=(10, 2000),
    )
    _plain_ticks(axes)
    open_frame(axes)
    axes.legend(frameon=False, loc="upper left")


def _shares(axes: Axes, row: Sequence[dict[str, Any]], vary: str) -> None:
    points = next(iter(_by_workers(row).values()))
    place, bottom = range(len(points)), [0.0] * len(points)
    for name, colour in zip((*SHOWN, "rest"), (*COLOURS[: len(SHOWN)], GREY), strict=True):
        rest = [1 - sum(p["shares"][other] for other in SHOWN) for p in points]
        height = [
            100 * (p["shares"][name] if name != "rest" else left)
            for p, left in zip(points, rest, strict=True)
        ]
        axes.bar(
            place,
            height,
            bottom=bottom,
            width=0.7,
            color=colour,
            label=name,
            edgecolor="white",
            linewidth=0.5,
        )
        bottom = [low + high for low, high in zip(bottom, height, strict=True)]
    axes.set_xticks(place, [f"{p[vary]:,}".replace(",", " ") for p in points])
    axes.set(xlabel=f"{vary} (clients)", ylabel="share of a round (%)", ylim=(0, 100))
    open_frame(axes)
    axes.grid(visible=False, axis="x")
    axes.legend(
        frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True
    )


def _plain_ticks(axes: Axes) -> None:
    """1, 2, 5, 10 in place of powers of ten, where there are few of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
