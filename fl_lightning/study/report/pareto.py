"""What a method gives for what it costs: the primary metric against megabytes and virtual seconds.

A method is on the front of a cost where no other is at least as good for at most the same cost, and
better in one of the two, by means over the seeds that all methods have. Seconds are those of a
run's clock, which follow from its seed; what a computer's clock measured is in no front.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.figures import GREY, legend_outside, new_panels
from fl_lightning.study.metric_names import column
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.report.comparison import Comparison, Levels
from fl_lightning.study.report.curves import axis_label, is_wide, look_of, title_of
from fl_lightning.study.report.places import MIN_METHODS
from fl_lightning.study.report.tables import ReportTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COSTS = ("total/total_bytes", "clock/seconds")
"""What a whole run costs: bytes on the wire, and virtual seconds."""
Points = Mapping[str, tuple[float, float]]
"""Cost and quality of each method, means over seeds."""


def points_of(comparison: Comparison, levels: Levels, cost: str) -> Points:
    """Return cost and quality of each method that has both, over the seeds that all of them have;
    empty where all cost the same, or fewer than three have them."""
    quality = comparison.means(comparison.study.metric, levels)
    costs = comparison.means(cost, levels)
    labels = [label for label in quality if label in costs]
    tables = [
        comparison.table(metric, levels)[labels] for metric in (cost, comparison.study.metric)
    ]
    whole = np.logical_and(*(np.isfinite(table.to_numpy(float)).all(axis=1) for table in tables))
    if not whole.any() or len(labels) < MIN_METHODS:
        return {}
    spent, reached = (table[whole].mean() for table in tables)
    found = {label: (float(spent[label]), float(reached[label])) for label in labels}
    return found if len({round(one, 9) for one, _ in found.values()}) > 1 else {}


def front(points: Points, higher_is_better: bool = True) -> list[str]:
    """Return the methods on the front, the cheapest first.

    >>> front({"A": (1.0, 0.8), "B": (2.0, 0.9), "C": (2.0, 0.7), "D": (3.0, 0.9)})
    ['A', 'B']
    >>> front({"A": (1.0, 0.8), "B": (1.0, 0.8)})
    ['A', 'B']
    """
    sign = 1 if higher_is_better else -1
    found: list[str] = []
    best = -np.inf
    for label, (_, quality) in sorted(
        points.items(), key=lambda one: (one[1][0], -sign * one[1][1])
    ):
        if sign * quality > best or (found and points[label] == points[found[-1]]):
            found.append(label)
            best = sign * quality
    return found


def pareto_table(comparison: Comparison) -> ReportTable | None:
    """Return who is on the fronts of each setting; None where no cost differs between three
    methods."""
    rows = []
    for levels in comparison.levels:
        for cost in COSTS:
            points = points_of(comparison, levels, cost)
            if points:
                names = front(points, comparison.higher_is_better(comparison.study.metric))
                rows.append([level_key(levels) or "all", column(cost).title, ", ".join(names)])
    if not rows:
        return None
    title = comparison.column(comparison.study.metric).title
    caption = (
        f"methods that no other beats in {title} for the same cost or less, by means over the seeds "
        "that all have, the cheapest first"
    )
    return ReportTable.of("Pareto fronts", ["levels", "cost", "on the front"], rows, 3, caption)


def pareto(comparison: Comparison, levels: Levels) -> Figure | None:
    """Draw the primary metric of each method against what it costs, and the fronts; None where no
    cost differs between three methods."""
    each = {cost: points_of(comparison, levels, cost) for cost in COSTS}
    each = {cost: points for cost, points in each.items() if points}
    if not each:
        return None
    written = comparison.column(comparison.study.metric)
    figure, ((*panels,),) = new_panels((1.2 + 5.0 * len(each), 4.6), 1, len(each), sharey=True)
    for axes, (cost, points) in zip(panels, each.items(), strict=True):
        shown = column(cost)
        wide = is_wide([spent for spent, _ in points.values()])
        axes.set_xlabel(axis_label(shown.title, wide))
        if wide:
            axes.set_xscale("log")
        on_front = front(points, comparison.higher_is_better(comparison.study.metric))
        line = [
            (points[label][0] * shown.scale, points[label][1] * written.scale) for label in on_front
        ]
        axes.step(
            *zip(*line, strict=True), where="post", color=GREY, linewidth=1.2, label="Pareto front"
        )
        for place, (label, (spent, quality)) in enumerate(points.items()):
            colour, _, marker = look_of(comparison, label)
            size = 6 + 2 * (place % 4)  # hollow marks of several sizes: equal points are all seen
            axes.plot(
                spent * shown.scale,
                quality * written.scale,
                marker,
                color=colour,
                markersize=size,
                markerfacecolor=colour if label in on_front else "none",
                markeredgecolor="black" if label in on_front else colour,
                markeredgewidth=1.4,
                linestyle="none",
                label=label,
            )
    panels[0].set_ylabel(written.title)
    figure.suptitle(title_of("Quality against what it costs, means over seeds", levels))
    legend_outside(figure, 4)
    return figure
