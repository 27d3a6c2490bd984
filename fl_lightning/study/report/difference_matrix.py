"""Paired differences of many methods as a matrix, where a row for each pair would be a page of its
own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fl_lightning.figures import BLUE, GREY, ORANGE, legend_outside
from fl_lightning.study.report.comparison import Comparison, Difference, Levels
from fl_lightning.study.report.curves import title_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELL, SMALL_CELL = 0.52, 0.25
"""Inches of a cell's side, with a number and without one."""
MOST_NUMBERS = 20
"""Methods up to which each cell has its number."""
PALE = 0.22
"""How strong the colour of a difference is that is not significant."""


def difference_matrix(
    comparison: Comparison, levels: Levels, found: Sequence[Difference]
) -> Figure:
    """Draw a cell for each pair, row − column, in the colour of the better one; the best methods
    stand first.

    Args:
        found: the differences, each pair once.
    """
    from matplotlib.figure import Figure

    metric = comparison.study.metric
    written, up = comparison.column(metric), comparison.higher_is_better(metric)
    paired = {label for one in found for label in (one.a, one.b)}
    labels = [label for label in comparison.order(metric, levels) if label in paired]
    place = {label: position for position, label in enumerate(labels)}
    numbered = len(labels) <= MOST_NUMBERS
    cell = CELL if numbered else SMALL_CELL
    width = cell * len(labels) + 0.09 * max(map(len, labels))
    figure = Figure(figsize=(width + 1.2, width + 1.6), layout="constrained")
    axes = figure.subplots()
    for one in [*found, *(one.flipped() for one in found)]:
        row, column = place[one.a], place[one.b]
        better = (one.test.mean > 0) == up
        look: dict[str, Any] = {
            "color": GREY if one.test.mean == 0 else BLUE if better else ORANGE,
            "alpha": 1.0 if one.winner else PALE,
        }
        axes.fill_between([column - 0.5, column + 0.5], row - 0.5, row + 0.5, linewidth=0, **look)
        if numbered:
            text = f"{one.test.mean * written.scale + 0.0:+.2g}".replace("-", "−")
            strong = "white" if one.winner and better else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=strong)
    axes.set_xticks(range(len(labels)), labels, rotation=90)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0)
    axes.set(xlim=(-0.5, len(labels) - 0.5), ylim=(len(labels) - 0.5, -0.5), aspect="equal")
    axes.spines[:].set_color(GREY)
    axes.set_title(title_of("Mean paired difference, row − column", levels))
    axes.set_xlabel(written.title.replace("(%)", "(percentage points)"))
    for side, colour in (("row", BLUE), ("column", ORANGE)):
        axes.fill_between([], [], color=colour, label=f"the {side} is significantly better")
        axes.fill_between(
            [], [], color=colour, alpha=PALE, label=f"the {side} is better, not significantly"
        )
    legend_outside(figure, 2)
    return figure
