"""The figures of a report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import pairwise
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.figures import COLOURS, GREY, MARKERS, legend_outside, new_axes, open_frame
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.report.comparison import Comparison, Difference, Levels
from fl_lightning.study.report.curves import (
    degradation,
    look_of,
    marked,
    megabytes_curve,
    over,
    rounds_curve,
    seconds_curve,
    title_of,
)
from fl_lightning.study.report.difference_matrix import difference_matrix
from fl_lightning.study.report.energy_figure import PANELS, quality_over_joules
from fl_lightning.study.report.overall import MIN_LEVELS, overall_diagram
from fl_lightning.study.report.pareto import pareto
from fl_lightning.study.report.places import critical_difference
from fl_lightning.study.report.transfer_figure import negative_transfer
from fl_lightning.study.statistics import mean_std

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME_LENGTH = 34
"""Characters of a name in a line; longer names are wrapped."""
MOST_PAIRS = 45
"""Pairs of ten methods, which have a row each."""
OUTLIER_RATIO = 5.0
"""A row of differences that reaches so many times as far as the others is an outlier."""
CURVES = (
    ("rounds", "round", rounds_curve),
    ("megabytes", "megabytes up and down", megabytes_curve),
    ("seconds", "virtual seconds", seconds_curve),
)
"""What the primary metric is drawn over: the end of the file's name, the label of x, and the
curve."""
FIGURES = re.compile(
    r"\w+_over_(rounds|megabytes|seconds|joules)|final_by_method|paired_differences|negative_transfer"
    r"|critical_difference|pareto"
)
"""The beginnings of the figures' file names."""


def figures(comparison: Comparison) -> Iterator[tuple[str, Figure | None]]:
    """Yield all figures with their file names; None for a figure that has nothing to show."""
    primary = comparison.study.task.primary
    for levels in comparison.levels:
        for unit, xlabel, curve in CURVES:
            name = _file(f"{primary}_over_{unit}", levels)
            yield name, over(comparison, levels, xlabel, curve)
        yield _file("final_by_method", levels), by_method(comparison, levels)
        if comparison.pairs:
            yield _file("paired_differences", levels), forest(comparison, levels)
        yield _file("critical_difference", levels), critical_difference(comparison, levels)
        yield _file("pareto", levels), pareto(comparison, levels)
        if comparison.transfer.alone:
            yield _file("negative_transfer", levels), negative_transfer(comparison, levels)
    if len(comparison.levels) >= MIN_LEVELS:
        yield "critical_difference_over_all_settings", overall_diagram(comparison)
    for others in (
        comparison.without_stressor(comparison.levels) if comparison.study.degradation else []
    ):
        yield _file("degradation_over_rounds", others), degradation(comparison, others)
    if any(name in comparison.metrics for name in PANELS):
        yield "quality_over_joules", quality_over_joules(comparison)


def as_svg(figure: Figure) -> bytes:
    """Return the figure as SVG, the same bytes for the same figure."""
    from matplotlib import rc_context

    file = BytesIO()
    with rc_context({"svg.hashsalt": "report"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def _file(name: str, levels: Levels) -> str:
    key = re.sub(r"[^\w=.,+ -]", lambda odd: f"~{ord(odd[0]):x}", level_key(levels))
    return f"{name}-{key}" if levels else name


def _rows(title: str, xlabel: str, names: Sequence[str]) -> tuple[Figure, Axes]:
    """Return a figure with a line per name, the first on top; long names make it wider and
    higher."""
    wrapped = ["\n".join(wrap(name, NAME_LENGTH)) for name in names]
    lines = [line for name in wrapped for line in name.split("\n")]
    highest = max(name.count("\n") + 1 for name in wrapped)
    width = 6.8 + 0.075 * max(0, max(map(len, lines)) - 16)
    figure, axes = new_axes(
        title, xlabel, "", (width, 1.8 + max(0.42, 0.17 * highest) * len(names))
    )
    axes.set_yticks(range(len(names)), wrapped, fontsize="small" if highest > 1 else None)
    axes.set_ylim(len(names) - 0.4, -0.6)
    return figure, axes


def by_method(comparison: Comparison, levels: Levels) -> Figure | None:
    """Draw the primary metric of every run, and the mean of every method."""
    written = comparison.column(comparison.study.metric)
    table = comparison.table(comparison.study.metric, levels)[comparison.labels].dropna(
        axis=1, how="all"
    )
    labels = list(table.columns)
    if not labels:
        return None
    figure, axes = _rows(title_of("Every seed, and the mean", levels), written.title, labels)
    seeds = comparison.study.seeds
    few = len(seeds) <= len(MARKERS)
    markers = MARKERS if few else MARKERS[:1] * len(seeds)
    for row, label in enumerate(labels):
        values = table[label].dropna()
        mean = mean_std(values)[0] * written.scale
        colour = look_of(comparison, label)[0]
        axes.plot([mean, mean], [row - 0.32, row + 0.32], color=colour, linewidth=2.5)
        for seed, value in values.items():
            place = seeds.index(seed)
            height = row + 0.5 * ((place + 0.5) / len(seeds) - 0.5)
            look = marked(colour, markers[place], 5.5, 0.5)
            axes.plot(value * written.scale, height, linestyle="none", **look)
    axes.plot([], [], "|", color=GREY, markersize=12, markeredgewidth=2.5, label="mean")
    for seed, marker in zip(seeds, markers, strict=False):
        name = f"seed {seed}" if few else "one seed"
        axes.plot([], [], marker, color=GREY, markersize=5.5, label=name)
    legend_outside(figure)
    return figure


def forest(comparison: Comparison, levels: Levels) -> Figure | None:
    """Draw paired differences: every seed, the mean and both intervals; of more pairs than a page
    has room for the means alone, as a matrix.

    Where one is far from all others, the others are drawn a second time in a panel of their own.
    """
    written = comparison.column(comparison.study.metric)
    found = [one for one in comparison.differences(comparison.study.metric, levels) if one.seeds]
    if not found:
        return None
    if len(found) > MOST_PAIRS:
        return difference_matrix(comparison, levels, found)
    names = [f"{one.a} − {one.b}" for one in found]
    xlabel = f"difference in {written.title.replace('(%)', '(percentage points)')}"
    figure, whole = _rows(title_of("Differences, paired by seed", levels), xlabel, names)
    _differences(whole, found, written.scale)
    near = without_outliers([_reach(one) * written.scale for one in found])
    if near is not None:
        figure.set_figwidth(figure.get_figwidth() + 2.8)
        title, ticks = whole.get_title(), [label.get_text() for label in whole.get_yticklabels()]
        whole.remove()
        closer, whole = figure.subplots(1, 2, sharey=True)
        open_frame(closer, whole)
        figure.suptitle(title)
        closer.set_yticks(range(len(names)), ticks)
        closer.set_ylim(len(names) - 0.4, -0.6)
        for axes in (whole, closer):
            _differences(axes, found, written.scale, labelled=axes is closer)
            axes.set_xlabel(xlabel, fontsize="small")
        closer.set_xlim(-near, near)
        closer.set_title("near zero", fontsize="medium")
        whole.set_title("all", fontsize="medium")
        for row, one in enumerate(found):
            mean = one.test.mean * written.scale
            if abs(mean) > near:
                side = 1 if mean > 0 else -1
                number = f"{mean:.3g}".replace("-", "−")
                text, align = (f"{number} →", "right") if side > 0 else (f"← {number}", "left")
                look: dict[str, Any] = {"va": "center", "color": COLOURS[3], "fontsize": "small"}
                closer.text(side * near, row - 0.25, text, ha=align, **look)
    legend_outside(figure)
    return figure


def without_outliers(reaches: Sequence[float]) -> float | None:
    """Return how far an axis has to reach for all rows but those far outside; None where there are
    none.

    With few methods most pairs are far outside where a single method failed, since every other one
    is compared with it.

    >>> tuple(map(without_outliers, ([1.0, 2.0, 1.5, 40.0], [0.5, 40.0, 41.0], [1.0, 2.0, 4.0])))
    (2.2, 0.55, None)
    """
    ordered = sorted(reaches)
    for count, (inner, outer) in enumerate(pairwise(ordered), start=1):
        if 3 * count >= len(ordered) and 0 < OUTLIER_RATIO * inner < outer:
            return 1.1 * inner
    return None


def _reach(one: Difference) -> float:
    """Return the largest distance from zero of what is drawn of a pair."""
    test = one.test
    ends = [
        *test.differences,
        test.mean,
        test.low,
        test.high,
        test.bootstrap_low,
        test.bootstrap_high,
    ]
    return max(abs(end) for end in ends if isfinite(end))


def _differences(
    axes: Axes, found: Sequence[Difference], scale: float, *, labelled: bool = True
) -> None:
    """Draw a row for each pair."""
    axes.axvline(0, color="black", linewidth=0.8)
    for row, one in enumerate(found):
        test, first = one.test, row == 0 and labelled
        kind = "confidence sequence" if test.sequential else "t interval"
        if isfinite(test.low):
            bounds, label = [test.low * scale, test.high * scale], f"95 % {kind}" if first else None
            axes.plot(bounds, [row, row], color=COLOURS[0], linewidth=1.4, label=label)
        if isfinite(test.bootstrap_low):
            bounds = [test.bootstrap_low * scale, test.bootstrap_high * scale]
            label = "95 % bootstrap" if first else None
            axes.plot(
                bounds,
                [row, row],
                color=COLOURS[5],
                linewidth=5,
                solid_capstyle="butt",
                label=label,
            )
        x = np.array(test.differences) * scale
        heights = row + 0.2 + 0.16 * np.arange(len(x)) / len(x)  # equal ones are all seen
        axes.plot(x, heights, "o", color=GREY, markersize=3.5, label="one seed" if first else None)
        label = "mean" if first else None
        axes.plot(test.mean * scale, row, "D", color=COLOURS[3], markersize=6, label=label)
