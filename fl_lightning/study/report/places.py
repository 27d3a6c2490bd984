"""The places of the methods at one level: tables, and a critical-difference diagram."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING

from fl_lightning.figures import BLACK, GREY, RED, legend_outside, new_axes
from fl_lightning.study.ranks import Place, groups
from fl_lightning.study.ranks import places as places_of
from fl_lightning.study.report.comparison import Comparison, Levels
from fl_lightning.study.report.curves import title_of
from fl_lightning.study.report.tables import ReportTable, at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_METHODS = 3
"""With fewer, the table of differences says it all."""
MOST_TICKS = 20
"""Ranks that are written below a diagram; of more methods every second one, or fewer."""


def places(comparison: Comparison, levels: Levels) -> list[Place]:
    """Return the places at one level, the best first, of the methods that have a number."""
    metric = comparison.study.metric
    labels = list(comparison.means(metric, levels))
    table = comparison.table(metric, levels)[labels]
    better, sequential = comparison.higher_is_better(metric), comparison.is_sequential
    return places_of(labels, table.to_numpy(float), better, sequential) if labels else []


def places_table(comparison: Comparison, levels: Levels) -> ReportTable | None:
    """Return the places of all methods at one level; None where there are fewer than three."""
    found = places(comparison, levels)
    if len(found) < MIN_METHODS:
        return None
    pairs, metric = len(found) * (len(found) - 1) // 2, comparison.study.metric
    seeds = comparison.table(metric, levels)[[one.label for one in found]]
    caption = (
        f"in {comparison.column(metric).title}; the 95 % intervals hold together, by paired "
        f"tests corrected for all {pairs} pairs (Holm); mean rank over "
    )
    few, every = len(seeds.dropna()), len(seeds)
    some = f"{few} of {every} seeds, those in which all methods have a number"
    caption += some if few < every else "seeds"
    return table_of(f"Places{at(levels)}", found, caption)


def table_of(
    title: str, found: Sequence[Place], caption: str, intervals: Sequence[str] = ()
) -> ReportTable:
    """Return a table of places; the intervals of the mean ranks, if given, are its last column."""
    header = ["method", "cannot be told apart from", "place", "95 % interval", "mean rank"]
    rows = []
    for one in found:
        ends = ends_of(one.first, one.last)
        rank = "-" if isnan(one.mean_rank) else f"{one.mean_rank:.2f}"
        rows.append([one.label, named(one.alike), str(one.place), ends, rank])
    if intervals:
        header.append("interval of the rank")
        rows = [[*row, interval] for row, interval in zip(rows, intervals, strict=True)]
    return ReportTable.of(title, header, rows, 2, caption)


def named(labels: Sequence[str]) -> str:
    return ", ".join(labels) or "none"


def ends_of(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def critical_difference(comparison: Comparison, levels: Levels) -> Figure | None:
    """Draw the mean rank of each method and its interval of places, and bars over those that cannot
    be told apart; None with fewer than three methods, or without a seed that all have."""
    written = comparison.column(comparison.study.metric)
    title = title_of(f"Mean rank over seeds in {written.title}", levels)
    return diagram(comparison, places(comparison, levels), title)


def diagram(comparison: Comparison, found: Sequence[Place], title: str) -> Figure | None:
    """Draw places as a critical-difference diagram; None with fewer than three, or without mean
    ranks."""
    found = sorted(found, key=lambda one: (one.mean_rank, one.place))
    if len(found) < MIN_METHODS or any(one.mean_rank != one.mean_rank for one in found):
        return None
    bars = groups(found)
    size = (7.2, 1.6 + 0.3 * len(found) + 0.12 * len(bars))
    figure, axes = new_axes(title, "rank, 1 is the best", "", size)
    for row, one in enumerate(found):
        colour, whose = (RED, ", proposed") if one.label in comparison.proposed else (BLACK, "")
        first = "95 % interval of the place" if row == 0 else None
        axes.plot([one.first, one.last], [row, row], color=GREY, linewidth=1.2, label=first)
        axes.plot(one.mean_rank, row, "o", color=colour, clip_on=False, label=f"mean rank{whose}")
    for number, (start, end) in enumerate(bars):
        height = -0.8 - 0.35 * number
        ends, label = [found[start].mean_rank, found[end].mean_rank], "cannot be told apart"
        axes.plot(ends, [height] * 2, color=BLACK, linewidth=3, label=None if number else label)
    axes.set_yticks(range(len(found)), [one.label for one in found])
    axes.set_ylim(len(found) - 0.4, -1.0 - 0.35 * max(0, len(bars) - 1) - 0.2 * bool(bars))
    axes.set_xlim(0.8, len(found) + 0.2)
    axes.set_xticks(range(1, len(found) + 1, 1 + (len(found) - 1) // MOST_TICKS))
    legend_outside(figure)
    return figure
