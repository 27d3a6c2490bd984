"""The look of all figures: colours for any colour vision (Okabe & Ito, 2008), line styles and markers.

Figures are made without ``pyplot``, whose figures are global state. Matplotlib is imported only when
something is drawn, since the import takes 0.3 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK = COLOURS = [
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
]  # fmt: skip
GREY = "#666666"
LINE_STYLES = ["-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 3)), (0, (3, 1))]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]


def new_axes(
    title: str, xlabel: str, ylabel: str, size: tuple[float, float] = (6.4, 4.0)
) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes.

    Args:
        title: the title above the axes.
        xlabel, ylabel: the labels of the axes with their units, such as ``test accuracy (%)``.
        size: width and height in inches.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    open_frame(axes)
    return figure, axes


def open_frame(*several: Axes) -> None:
    """Draw the left and lower edges of the axes only, and a pale grid behind the data."""
    for axes in several:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E6E6E6", linewidth=0.6)
        axes.set_axisbelow(True)


def legend_outside(figure: Figure, columns: int = 4) -> None:
    """Add one legend for all axes below them, where it covers no curve; none if nothing has a label."""
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
            fontsize="small",
        )
