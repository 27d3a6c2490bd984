"""A picture of the bits: each layer's over the rounds, and how many weights have how many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.figures import BLUE, RED, count_rounds, legend_outside, open_frame, short_names
from fl_lightning.hooks import Context, RoundRecord
from fl_lightning.quantization.allocation import MAX_BITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class BitWidthFigure(FigureMeter):
    """Draws ``figures/bit_widths``: magnitude bits of every quantised layer of the deployed model,
    the sign not counted, in every round (``bits/layer/*``), and how many planes clients pruned
    (``bits/pruned``).

    Methods that give no layer a bit-width have nothing to draw: the meter says so and is idle.
    """

    name = "bit_widths"
    rule = "it draws methods that give each layer a bit-width"
    instead = "write --model FedMPQ, FedMPQKD or AQFL, or leave it out"
    empty: ClassVar = {"rounds": [], "bits": [], "pruned": []}

    def applies_to(self, context: Context) -> bool:
        return layer_bits(context.method) is not None

    def on_round_start(self, round: int, context: Context) -> None:
        if not self.seen["rounds"]:
            self._note(round - 1, 0.0, context)

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        self._note(record.round, record.metrics.get("bits/pruned", 0.0), context)
        super().on_round_end(record, context)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        unknown = len(self.seen["rounds"]) - len(self.seen["pruned"])  # release 0.1 kept none
        self.seen["pruned"] += [0.0] * unknown

    def figure(self, context: Context) -> Figure:
        codec = context.method.codec
        names = [name.removesuffix(".weight") for name in codec.names]
        bits, pruned = (np.array(self.seen[key]) for key in ("bits", "pruned"))
        return bit_width_figure(self.seen["rounds"], bits, pruned, names, np.array(codec.sizes))

    def _note(self, round: int, pruned: float, context: Context) -> None:
        if self.applies:
            self.seen["rounds"].append(round)
            self.seen["bits"].append(layer_bits(context.method))
            self.seen["pruned"].append(pruned)


def layer_bits(method: Any) -> list[int] | None:
    """Magnitude bits of each quantised layer as deployed; None where the method has no such
    thing."""
    return method.allocate(method.mean_budget()) if "bit_widths" in method.shows else None


def bit_width_figure(
    rounds: list[int], bits: np.ndarray, pruned: np.ndarray, names: list[str], sizes: np.ndarray
) -> Figure:
    """Left: rounds across, layers down, colour = bits; below it the planes that clients pruned.
    Right: share of the weights with that many bits, after the last and the first round.

    Args:
        rounds: consecutive, ``[R]``; 0 is the state before training.
        bits: of each round and layer ``[R, L]``.
        pruned: planes that clients pruned in each round ``[R]``.
        names: of the layers, input first.
        sizes: weights of each layer ``[L]``.
    """
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    L = len(names)
    figure = Figure(figsize=(10, max(3.4, 1.6 + 0.26 * L) + 1), layout="constrained")
    axes = figure.subplot_mosaic(
        [["bits", "share"], ["pruned", "share"]],
        width_ratios=[2.2, 1],
        height_ratios=[max(2.2, 0.26 * L), 1],
    )
    left, below, right = axes["bits"], axes["pruned"], axes["share"]
    colours = ListedColormap(colormaps["viridis"](np.linspace(0.05, 1, MAX_BITS)))
    image = left.imshow(
        bits.T,
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        norm=BoundaryNorm(np.arange(0.5, MAX_BITS + 1), MAX_BITS),
        extent=(rounds[0] - 0.5, rounds[-1] + 0.5, L - 0.5, -0.5),
    )
    figure.colorbar(
        image,
        ax=left,
        ticks=range(1, MAX_BITS + 1),
        label="magnitude bits",
        pad=0.015,
        aspect=max(20, 2 * L),
    )
    left.hlines(
        np.arange(L - 1) + 0.5, rounds[0] - 0.5, rounds[-1] + 0.5, color="white", linewidth=1
    )
    shown = zip(short_names(names), sizes, strict=True)
    left.set_yticks(range(L), [f"{name}  ({size:,})" for name, size in shown])
    count_rounds(left)
    left.set(ylabel="layer (weights)", title="Bits of each layer")
    open_frame(below)
    below.bar(rounds, pruned, 1.0, color=RED)
    below.set(xlabel="round", ylabel="planes pruned\nby clients", xlim=left.get_xlim())
    below.set_ylim(0, max(1.0, 1.1 * pruned.max()))
    count_rounds(below)
    below.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    average = bits @ sizes / sizes.sum()
    open_frame(right)
    styles: list[tuple[int, float, dict[str, Any]]] = [
        (0, -0.2, {"color": "white", "edgecolor": RED, "hatch": "////"}),
        (-1, 0.2, {"color": BLUE}),
    ]
    for row, offset, style in styles:
        share = [100 * sizes[bits[row] == n].sum() / sizes.sum() for n in range(1, MAX_BITS + 1)]
        when = "before training" if rounds[row] == 0 else f"round {rounds[row]}"
        label = f"{when}, average {average[row]:.2f}"
        right.bar(np.arange(1, MAX_BITS + 1) + offset, share, 0.4, label=label, **style)
    right.set(
        xlabel="magnitude bits",
        ylabel="share of quantised weights (%)",
        title="Weights by bit-width",
        ylim=(0, 105),
    )
    right.set_box_aspect(1)
    right.set_anchor("N")
    right.set_xticks(range(1, MAX_BITS + 1))
    legend_outside(figure, size="medium")
    return figure
