"""The look of all figures: colours for any colour vision (Okabe & Ito, 2008), line styles and
markers.

Figures are made without ``pyplot``, whose figures are global state. Matplotlib is imported only
when something is drawn, since the import takes 0.3 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK = COLOURS = [
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
]  # fmt: skip
GREY = "#666666"
LINE_STYLES = ["-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 3)), (0, (3, 1))]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
HATCHES = ["////", "\\\\\\\\", "....", "----", "||||", "xxxx", "++++", "oooo"]


def new_axes(
    title: str, xlabel: str, ylabel: str, size: tuple[float, float] = (6.4, 4.0)
) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes.

    Args:
        title: the title above the axes.
        xlabel, ylabel: the labels of the axes with their units, such as ``test accuracy (%)``.
        size: width and height in inches.
    """
    figure, ((axes,),) = new_panels(size, 1, 1)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def new_panels(
    size: tuple[float, float], rows: int, columns: int, **share: Any
) -> tuple[Figure, np.ndarray]:
    """Return a figure with a grid of axes, ``[rows, columns]``.

    Args:
        size: width and height in inches.
        share: what the panels have in common, and their sizes, as of matplotlib's ``subplots``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **share)
    open_frame(*panels.flat)
    return figure, panels


def open_frame(*several: Axes) -> None:
    """Draw the left and lower edges of the axes only, and a pale grid behind the data."""
    for axes in several:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E6E6E6", linewidth=0.6)
        axes.set_axisbelow(True)


def draw_band(
    axes: Axes,
    x: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    colour: str,
    style: Any = "-",
    hatch: str = "",
) -> None:
    """Draw a band such that several on top of each other stay apart: each has thin edges in its own
    line style, and a pattern of its own."""
    edges: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 0.6, "alpha": 0.8}
    axes.plot(x, low, **edges)
    axes.plot(x, high, **edges)
    axes.fill_between(x, low, high, color=colour, alpha=0.08, linewidth=0)
    pattern: dict[str, Any] = {"edgecolor": colour, "alpha": 0.3, "linewidth": 0}
    axes.fill_between(x, low, high, facecolor="none", hatch=hatch, **pattern)


def count_rounds(axes: Axes) -> None:
    """Put the ticks of the x axis at whole rounds, also where there is a single one."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xlim((low + high) / 2 - 0.6, (low + high) / 2 + 0.6)
    axes.xaxis.set_major_locator(
        MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )


def plain_text(figure: Figure) -> Figure:
    """Make two dollar signs in a text of the figure that, and no formula, and return it: names are
    users'. Numbers at an axis, which matplotlib writes as formulas, stay so."""
    from matplotlib.text import Text
    from matplotlib.ticker import LogFormatter, ScalarFormatter

    numbers = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        if isinstance(axis.get_major_formatter(), (LogFormatter, ScalarFormatter))
        for label in axis.get_ticklabels(which="both")
    }
    for text in figure.findobj(Text):
        if text not in numbers:
            text.set_parse_math(False)
    return figure


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names of layers without what all of them share, as far as whole parts between dots
    go, and without the ``.weight`` at their ends.

    >>> short_names(["model.layers.0.mlp.weight", "model.layers.1.attention.q"])
    ['0.mlp', '1.attention.q']
    """
    parts = [name.removesuffix(".weight").split(".") for name in names]
    shared = 0
    while parts and all(len(one) > shared + 1 and one[shared] == parts[0][shared] for one in parts):
        shared += 1
    return [".".join(one[shared:]) for one in parts]


def legend_outside(figure: Figure, columns: int = 4, size: str = "small") -> None:
    """Add one legend for all axes below them, where it covers no curve; none if nothing has a
    label.

    Args:
        figure: the figure.
        columns: columns of the legend at most.
        size: of its letters, as matplotlib names it.
    """
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        columns = min(columns, len(handles))
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=size,
        )
