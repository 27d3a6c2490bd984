"""The figure of quality against joules: what a budget of energy costs, a point for each method and
level."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.figures import GREY, legend_outside, new_panels
from fl_lightning.metrics.names import words_of
from fl_lightning.study.metric_names import Column
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.report.curves import axis_label, is_wide, look_of, marked
from fl_lightning.study.statistics import mean_std
from fl_lightning.tasks.language_modelling import OF_ANSWERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPENT, GRANTED = "energy/spent", "energy/granted"
"""What the ledger charges for a sequence, and its budget: joules by the 0.99 quantile."""
OF_BUDGET, OF_NETWORK = "energy/joules", "energy/joules_model"
"""Mean joules of what the budget is of, and of the whole network."""
PANELS = (SPENT, OF_BUDGET, OF_NETWORK)
"""Metrics of joules per sequence: the columns of panels."""
GENERATED = "energy/joules_generated"
"""Mean joules of reading a prompt and writing an answer, whose budget is of the longest answer
allowed."""
UNITS = {1.0: "J", 1e-3: "mJ", 1e-6: "µJ", 1e-9: "nJ"}


@dataclass(frozen=True)
class Point:
    """One method at one level: mean and standard deviation over seeds, the latter 0 for a single
    seed.

    Args:
        x, y: joules of a sequence, and the quality as it is written.
        x_spread, y_spread: their standard deviations.
    """

    x: float
    y: float
    x_spread: float
    y_spread: float


def quality_over_joules(comparison: Comparison) -> Figure | None:
    """Draw quality against joules of a sequence, all levels of the study in one figure; None where
    no run has energy metrics beside a quality.

    There is a row of panels for perplexity, ROUGE-L and the task's primary metric, as far as they
    were measured, and a column for each scope: joules by the 0.99 quantile with the budgets as
    lines, then means, which claims are about, and last those of the whole network, most of which no
    option may change. Qualities of answers that are written are drawn over the means of writing
    them alone.
    """
    qualities, titles = _qualities(comparison), _titles(comparison)
    columns = [name for name in titles if name in comparison.metrics]
    found = {
        (quality.metric, name): points
        for quality in qualities
        for name in columns
        if (joules := _joules_beside(quality, name, comparison))
        and any((points := curves(comparison, joules, quality)).values())
    }
    if not found:
        return None
    size = (1.0 + 3.4 * len(columns), 1.3 + 2.9 * len(qualities))
    figure, panels = new_panels(size, len(qualities), len(columns), sharey="row")
    for row, quality in enumerate(qualities):
        for place, name in enumerate(columns):
            axes = panels[row, place]
            joules = _joules_beside(quality, name, comparison)
            if joules is None:
                axes.set_axis_off()
                continue
            points = found.get((quality.metric, name), {})
            scale, unit = _unit(comparison, joules)
            _curves(axes, comparison, points, scale)
            if name == SPENT:
                _budgets(axes, comparison, scale, named=row == 0)
            if row == 0:
                axes.set_title(titles[name], fontsize="medium")
            elif joules == name:
                axes.sharex(panels[0, place])
            of = "sequence" if joules == name else "answer and its prompt"
            axes.set_xlabel(f"{unit} per {of}", fontsize="small")
        drawn = [
            point.y
            for name in columns
            for curve in found.get((quality.metric, name), {}).values()
            for point in curve
        ]
        wide = quality.scale != 100 and bool(drawn) and is_wide(drawn)
        if wide:
            panels[row, 0].set_yscale("log")  # of the whole row, whose panels share it
        shown = next((axes for axes in panels[row] if axes.axison), panels[row, 0])
        shown.set_ylabel(axis_label(quality.title, wide), fontsize="small")
        shown.tick_params(labelleft=True)
    figure.suptitle("Quality against energy: mean and standard deviation over seeds")
    legend_outside(figure)
    return figure


def _joules_beside(quality: Column, column: str, comparison: Comparison) -> str | None:
    """Return the joules that a quality is drawn over in a column; None where there are none of its
    kind."""
    of_answers = quality.metric.removeprefix("test/") in OF_ANSWERS
    if not of_answers or GENERATED not in comparison.metrics:
        return column
    return GENERATED if column == OF_BUDGET else None


def _qualities(comparison: Comparison) -> list[Column]:
    names = dict.fromkeys(
        ("test/perplexity", "test/rouge_l", f"test/{comparison.study.task.primary}")
    )
    found = [comparison.column(name) for name in names if name in comparison.metrics]
    words = {one.metric: f"test {words_of(one.metric.removeprefix('test/'))}" for one in found}
    return [
        replace(one, title=words[one.metric] + (" (%)" if one.scale == 100 else ""))
        for one in found
    ]


def _titles(comparison: Comparison) -> dict[str, str]:
    """Return the titles of the columns; where budgets are of the whole network, its joules come
    once."""
    joules, model = (
        comparison.frame[comparison.frame.metric == name] for name in (OF_BUDGET, OF_NETWORK)
    )
    same = not model.empty and np.array_equal(joules.value.to_numpy(), model.value.to_numpy())
    scope = "the whole network" if same else "the switched layers"
    titles = {SPENT: f"{scope},\n0.99 quantiles", OF_BUDGET: f"{scope},\nmeans"}
    return titles if same else {**titles, OF_NETWORK: "the whole network,\nmeans"}


def curves(comparison: Comparison, joules: str, quality: Column) -> dict[str, list[Point]]:
    """Return the points of each method in the order of joules, over the seeds that have both
    metrics.

    Args:
        comparison: of the runs.
        joules: a metric of joules.
        quality: what is read beside them.
    """
    found: dict[str, list[Point]] = {label: [] for label in comparison.labels}
    for levels in comparison.levels:
        x, y = comparison.table(joules, levels), comparison.table(quality.metric, levels)
        for label, points in found.items():
            both = x[label].notna() & y[label].notna()
            if both.any():
                (a, a_spread), (b, b_spread) = (
                    mean_std(one[label][both].tolist()) for one in (x, y)
                )
                spreads = np.nan_to_num([a_spread, b_spread * quality.scale])
                points.append(Point(a, b * quality.scale, *spreads.tolist()))
    return {label: sorted(points, key=lambda one: one.x) for label, points in found.items()}


def budgets(comparison: Comparison) -> dict[str, float]:
    """Return E_max of a sequence at each level, mean over seeds and proposed methods; of all
    methods where none is proposed. A method on another table of costs has other joules at *high*,
    and another E_max."""
    labels = comparison.proposed or comparison.labels
    found = {
        level_key(levels): comparison.table(GRANTED, levels)[labels].to_numpy()
        for levels in comparison.levels
    }
    return {
        name: float(np.nanmean(each)) for name, each in found.items() if np.isfinite(each).any()
    }


def _unit(comparison: Comparison, name: str) -> tuple[float, str]:
    """Return the size of the unit in which the largest of these joules has one digit or more before
    the point, and its name."""
    values = comparison.frame.value[comparison.frame.metric == name]
    largest = float(values[np.isfinite(values)].max())
    return next(((size, unit) for size, unit in UNITS.items() if largest >= size), (1.0, "J"))


def _curves(
    axes: Axes, comparison: Comparison, found: dict[str, list[Point]], scale: float
) -> None:
    for label, points in found.items():
        if not points:
            continue
        colour, style, marker = look_of(comparison, label)
        bars: dict[str, Any] = {"elinewidth": 1.0, "capsize": 2}
        look = marked(colour, marker) | {"linestyle": style} | bars
        x, y, x_spread, y_spread = np.array([(p.x, p.y, p.x_spread, p.y_spread) for p in points]).T
        width = 2.0 if label in comparison.proposed else 1.3
        of_x = x_spread / scale if x_spread.any() else None
        of_y = y_spread if y_spread.any() else None
        axes.errorbar(x / scale, y, xerr=of_x, yerr=of_y, linewidth=width, label=label, **look)


def _budgets(axes: Axes, comparison: Comparison, scale: float, named: bool) -> None:
    """Draw a line for each budget, with its level at the end where perplexities leave room."""
    whose = ", ".join(comparison.proposed) or "all methods"
    for place, (name, joules) in enumerate(budgets(comparison).items()):
        look: dict[str, Any] = {"color": GREY, "linestyle": "--", "linewidth": 1.0, "zorder": 0.5}
        axes.axvline(joules / scale, label=f"budget of {whose}" if place == 0 else None, **look)
        if named and name:
            axes.annotate(
                name,
                (joules / scale, 1.0),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                xytext=(-2, -3),
                rotation=90,
                ha="right",
                va="top",
                fontsize="x-small",
                color=GREY,
            )
