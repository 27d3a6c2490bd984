"""Curves of a report: the primary metric over rounds, megabytes or virtual seconds.

A curve is the mean over seeds; its band is one standard deviation to either side, where there are
two seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fl_lightning.figures import (
    BLUE,
    COLOURS,
    HATCHES,
    LINE_STYLES,
    MARKERS,
    RED,
    count_rounds,
    draw_band,
    legend_outside,
    new_axes,
    new_panels,
)
from fl_lightning.study.metric_names import Column
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.report.comparison import Comparison, Levels
from fl_lightning.study.results.runs import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS_PER_CURVE = 8
LOGARITHMIC_RATIO = 8.0
"""Megabytes, and qualities without an upper bound, that differ by this factor are drawn on a
logarithmic axis."""
MOST_CURVES, PANELS_IN_A_ROW = 6, 4
"""More methods than can be told apart in one pair of axes get a panel each."""
Curve = tuple[np.ndarray, np.ndarray]
"""x ``[E]`` and, for every seed, y ``[seeds, E]``."""


def title_of(text: str, levels: Levels) -> str:
    return f"{text}\n{level_key(levels)}" if levels else text


def hatch_of(comparison: Comparison, label: str) -> str:
    """Return the pattern of a method's bands."""
    return HATCHES[list(comparison.study.methods).index(label) % len(HATCHES)]


def look_of(comparison: Comparison, label: str) -> tuple[str, object, str]:
    """Return colour, line style and marker of a method: the same in every figure of a study."""
    order = [*COLOURS[:6], COLOURS[7], COLOURS[6]]  # yellow is pale on white: last
    place = list(comparison.study.methods).index(label)
    style = LINE_STYLES[(place + place // len(order)) % len(LINE_STYLES)]
    return order[place % len(order)], style, MARKERS[(place + place // len(order)) % len(MARKERS)]


def marked(colour: str, marker: str, size: float = 6, edge: float = 0.6) -> dict[str, Any]:
    """Return the look of marks with a white edge, which stay apart where they overlap."""
    return {
        "color": colour,
        "marker": marker,
        "markersize": size,
        "markeredgecolor": "white",
        "markeredgewidth": edge,
    }


def tested_as(comparison: Comparison) -> Column:
    """Return how the primary metric on the test set is written."""
    task = comparison.study.task
    return replace(comparison.column(f"test/{task.primary}"), title=f"test {task.title}")


def rounds_curve(runs: Sequence[FinishedRun], tested: Column) -> Curve:
    """Return the primary metric on the test set, as it is written, over the rounds in which every
    seed was evaluated."""
    evaluated = [
        pd.Series(
            {
                row["round"]: tested.scale * row[tested.metric]
                for row in run.record.history
                if tested.metric in row
            }
        )
        for run in runs
    ]
    table = pd.concat(evaluated, axis=1, join="inner").sort_index()
    return table.index.to_numpy(), table.to_numpy().T


def megabytes_curve(runs: Sequence[FinishedRun], tested: Column) -> Curve:
    """Return the same over the megabytes that had been on the wire by then, mean over seeds."""
    return _over_cost(
        runs,
        tested,
        lambda run: np.cumsum([row.get("comm/total_bytes", 0) for row in run.record.history]) / 1e6,
    )


def seconds_curve(runs: Sequence[FinishedRun], tested: Column) -> Curve:
    """Return the same over the virtual seconds that had passed by then, mean over seeds; nothing
    where a run has no clock."""
    seconds, values = _over_cost(
        runs,
        tested,
        lambda run: np.array([row.get("clock/seconds", np.nan) for row in run.record.history]),
    )
    return (seconds, values) if np.isfinite(seconds).all() else (seconds[:0], values[:, :0])


def _over_cost(
    runs: Sequence[FinishedRun], tested: Column, spent: Callable[[FinishedRun], np.ndarray]
) -> Curve:
    """Return the curve over what each run had ``spent`` by the end of each round."""
    rounds, values = rounds_curve(runs, tested)
    if not rounds.size:
        return rounds, values
    return np.mean([spent(run)[rounds - 1] for run in runs], axis=0), values


def over(
    comparison: Comparison,
    levels: Levels,
    xlabel: str,
    curve: Callable[[Sequence[FinishedRun], Column], Curve],
) -> Figure | None:
    """Draw the primary metric of every method over rounds, megabytes or virtual seconds; None where
    nothing was evaluated, or each run once: over rounds, or with too many methods for one pair of
    axes."""
    task, tested = comparison.study.task, tested_as(comparison)
    runs = {label: list(comparison.runs(label, levels).values()) for label in comparison.labels}
    curves = {label: curve(of_one, tested) for label, of_one in runs.items() if of_one}
    curves = {label: (x, y) for label, (x, y) in curves.items() if x.size}
    once = all(x.size < 2 for x, _ in curves.values())
    if not curves or (once and (xlabel == "round" or len(curves) > MOST_CURVES)):
        return None
    title = title_of(
        f"Test {task.primary_in_words}, mean and standard deviation over seeds", levels
    )
    of_x = xlabel != "round" and is_wide([x[-1] for x, _ in curves.values()])
    of_y = not task.is_share(task.primary) and is_wide(
        np.concatenate([y.mean(axis=0) for _, y in curves.values()])
    )
    figure, each = _drawn(
        comparison, curves, title, axis_label(xlabel, of_x), axis_label(tested.title, of_y)
    )
    for axes in each:
        if xlabel == "round":
            count_rounds(axes)
        if of_x:
            axes.set_xscale("log")
        if of_y:
            axes.set_yscale("log")
    if task.is_share(task.primary):  # panels share their axes
        each[0].set_ylim(max(0.0, each[0].get_ylim()[0]), min(102.0, each[0].get_ylim()[1]))
    return figure


def is_wide(values: Sequence[float] | np.ndarray) -> bool:
    """Return whether values are drawn on a logarithmic axis: all are positive, and they differ
    much."""
    return bool(np.min(values) > 0 and np.max(values) > LOGARITHMIC_RATIO * np.min(values))


def axis_label(text: str, logarithmic: bool) -> str:
    return f"{text} (logarithmic)" if logarithmic else text


def _drawn(
    comparison: Comparison, curves: Mapping[str, Curve], title: str, xlabel: str, ylabel: str
) -> tuple[Figure, list[Axes]]:
    """Draw curves in one pair of axes, or in a panel for each method; return the axes too. The
    title says where methods have no curve."""
    if len(curves) < len(comparison.labels):
        of = f"{len(curves)} of {len(comparison.labels)} methods"
        title += f"\n{of}: the others have no such curve"
    if len(curves) > MOST_CURVES:
        return _panels(comparison, curves, title, xlabel, ylabel)
    figure, axes = new_axes(title, xlabel, ylabel, (6.8, 4.6))
    for label, (x, y) in curves.items():
        _band(axes, comparison, label, x, y)
    _legend(figure, comparison)
    return figure, [axes]


def _panels(
    comparison: Comparison, curves: Mapping[str, Curve], title: str, xlabel: str, ylabel: str
) -> tuple[Figure, list[Axes]]:
    """Draw each method in a panel of its own, the proposed ones in every panel, and all others in
    grey."""
    proposed = [label for label in comparison.proposed if label in curves] or [next(iter(curves))]
    shown = [label for label in curves if label not in proposed]
    if not shown:  # all are proposed
        proposed, shown = proposed[:1], proposed[1:]
    rows = -(-len(shown) // PANELS_IN_A_ROW)
    size = (9.6, 1.2 + 1.75 * rows)
    figure, grid = new_panels(size, rows, PANELS_IN_A_ROW, sharex=True, sharey=True)
    panels = list(grid.flat)
    for axes, label in zip(panels, shown, strict=False):
        axes.set_title(label, fontsize="small")
        for x, y in curves.values():
            axes.plot(
                x, y.mean(axis=0), ".-" if x.size < 2 else "-", color="#D0D0D0", linewidth=0.7
            )
        for name, colour, width in [*((name, RED, 1.8) for name in proposed), (label, BLUE, 1.8)]:
            x, y = curves[name]
            mean = y.mean(axis=0)
            text = f"{name} ({len(y)} seeds)" if name in proposed else "the method above the panel"
            line = "--" if name in proposed else "-"
            point = "o" if x.size < 2 else ""
            axes.plot(
                x, mean, marker=point, color=colour, linestyle=line, linewidth=width, label=text
            )
            if len(y) > 1:
                spread = y.std(axis=0, ddof=1)
                style, hatch = ("--", HATCHES[0]) if name in proposed else ("-", HATCHES[1])
                draw_band(axes, x, mean - spread, mean + spread, colour, style, hatch)
    panels[0].plot([], [], color="#D0D0D0", linewidth=1.4, label="each other method")
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for column in range(PANELS_IN_A_ROW):  # the lowest panel of each column has the ticks' labels
        lowest = [axes for axes in grid[:, column] if axes.get_visible()]
        if lowest:
            lowest[-1].tick_params(labelbottom=True)
            lowest[-1].set_xlabel(xlabel, fontsize="small")
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel, fontsize="small")
    figure.suptitle(title)
    legend_outside(figure)
    return figure, panels[: len(shown)]


def degradation(comparison: Comparison, others: Levels) -> Figure | None:
    """Draw how much worse the primary metric is with the stressor than without it, same seed, round
    by round."""
    entry = comparison.study.degradation or {}
    task = comparison.study.task
    tested = tested_as(comparison)
    stressed, clean = comparison.stressed_and_clean(others)
    name, sign = task.primary_in_words, 1 if task.higher_is_better else -1
    sides = " − ".join((entry["clean"], entry["stressed"])[::sign])
    worse = "lost" if sign > 0 else "added"
    title = f"Test {name} {worse} under {entry['axis']}: {sides}, same seed"
    ylabel = f"{name} {worse}{' (percentage points)' if task.is_share(task.primary) else ''}"
    curves: dict[str, Curve] = {}
    for label in comparison.labels:
        with_stress, without = comparison.runs(label, stressed), comparison.runs(label, clean)
        seeds = [seed for seed in without if seed in with_stress]
        if seeds:
            x, y = rounds_curve([without[seed] for seed in seeds], tested)
            other_x, other_y = rounds_curve([with_stress[seed] for seed in seeds], tested)
            both, here, there = np.intersect1d(x, other_x, return_indices=True)
            if both.size:
                curves[label] = both, sign * (y[:, here] - other_y[:, there])
    if not curves:
        return None
    figure, each = _drawn(comparison, curves, title_of(title, others), "round", ylabel)
    for axes in each:
        axes.axhline(0, color="black", linewidth=0.8)
        count_rounds(axes)
    return figure


def _legend(figure: Figure, comparison: Comparison) -> None:
    """Draw a legend with as many columns as the longest label leaves room for."""
    longest = max(len(label) for label in comparison.labels) + len(" (3 seeds)")
    legend_outside(figure, max(1, min(4, 92 // (longest + 6))))


def _band(axes: Axes, comparison: Comparison, label: str, x: np.ndarray, y: np.ndarray) -> None:
    """Draw mean and standard deviation of ``y`` ``[seeds, E]``."""
    colour, style, marker = look_of(comparison, label)
    mean = y.mean(axis=0)
    count = f"{len(y)} seed{'s' * (len(y) > 1)}"
    width = 2.2 if label in comparison.proposed else 1.4
    axes.plot(x, mean, color=colour, linestyle=style, linewidth=width)
    # curves that lie on top of each other: the markers of each, above all lines, stand where no
    # other has one
    place, methods = list(comparison.study.methods).index(label), len(comparison.study.methods)
    step = max(methods, len(x) // MARKERS_PER_CURVE)
    some = slice(place * step // methods % len(x), None, step)
    look = marked(colour, marker)
    axes.plot(x[some], mean[some], linestyle="none", zorder=3, **look)
    axes.plot([], [], linestyle=style, linewidth=width, label=f"{label} ({count})", **look)
    if len(y) > 1:
        spread = y.std(axis=0, ddof=1)
        draw_band(axes, x, mean - spread, mean + spread, colour, style, hatch_of(comparison, label))
