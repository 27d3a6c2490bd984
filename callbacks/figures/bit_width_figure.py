"""A picture of the bits: each layer's over the rounds, and how many weights have how many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from callbacks.figures.drawing import applies, check_every, draw
from fl_lightning.figures import BLUE, RED, legend_outside, open_frame
from fl_lightning.hooks import Context, Meter, RoundRecord
from fl_lightning.quantization.allocation import MAX_BITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class BitWidthFigure(Meter):
    """Draws ``figures/bit_widths``: magnitude bits of every quantised layer, the sign not counted, in every
    round.

    Of FedMPQ and FedMPQKD: what came back, averaged over the clients that returned, which ``bits/average``
    sums up. Of AQFL: what is deployed, the clients' mean rounded down. Other methods have no bit-width per
    layer: the meter says so and is idle.

    Args:
        every: rounds between figures (``figures/bit_widths_round_0010``); 0: only at the end.
    """

    def __init__(self, every: int = 0) -> None:
        self.every = check_every(self, every)
        self._applies = True
        self._rounds: list[int] = []
        self._bits: list[list[int]] = []

    def on_check(self, context: Context) -> None:
        self._applies = applies(
            self,
            context,
            layer_bits(context.method) is not None,
            "it draws methods that give each layer a bit-width",
            "write --model FedMPQ, FedMPQKD or AQFL, or leave it out",
        )

    def on_round_start(self, round: int, context: Context) -> None:
        if self._applies and not self._rounds:
            self._note(round - 1, context)

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if not self._applies:
            return
        self._note(record.round, context)
        if self.every and record.round % self.every == 0:
            draw(context, "bit_widths", lambda: self._figure(context), record.round)

    def on_fit_end(self, summary: dict[str, float], context: Context) -> None:
        if self._applies:
            draw(context, "bit_widths", lambda: self._figure(context))

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": list(self._rounds), "bits": list(self._bits)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rounds, self._bits = state["rounds"], state["bits"]

    def _note(self, round: int, context: Context) -> None:
        bits = layer_bits(context.method)
        assert bits is not None
        self._rounds.append(round)
        self._bits.append(bits)

    def _figure(self, context: Context) -> Figure:
        codec = context.method.codec
        names = [name.removesuffix(".weight") for name in codec.names]
        return bit_width_figure(self._rounds, np.array(self._bits), names, np.array(codec.sizes))


def layer_bits(method: Any) -> list[int] | None:
    """Magnitude bits of each quantised layer; None where the method has no such thing."""
    codec = getattr(method, "codec", None)
    if codec is None:
        return None
    if "bits" in method.server:
        return method.server["bits"].tolist()
    return [sum(method.budgets) // len(method.budgets)] * len(codec.names)


def bit_width_figure(rounds: list[int], bits: np.ndarray, names: list[str], sizes: np.ndarray) -> Figure:
    """Left: rounds across, layers down, colour = bits. Right: share of the weights with that many, after the
    last and the first round.

    Args:
        rounds: consecutive, ``[R]``; 0 is the state before training.
        bits: of each round and layer ``[R, L]``.
        names: of the layers, input first.
        sizes: weights of each layer ``[L]``.
    """
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    L = len(names)
    figure = Figure(figsize=(11, max(3.4, 1.6 + 0.24 * L)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2.2, 1])
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
        image, ax=left, ticks=range(1, MAX_BITS + 1), label="magnitude bits", pad=0.015, aspect=max(20, 2 * L)
    )
    left.hlines(np.arange(L - 1) + 0.5, rounds[0] - 0.5, rounds[-1] + 0.5, color="white", linewidth=1)
    left.set_yticks(
        range(L), [f"{name}  ({size:,})" for name, size in zip(names, sizes, strict=True)], fontsize=8
    )
    left.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    left.set(xlabel="round", ylabel="layer (weights)", title="Bits of each layer")
    average = bits @ sizes / sizes.sum()
    open_frame(right)
    for row, offset, style in (
        (0, -0.2, {"color": "white", "edgecolor": RED, "hatch": "////"}),
        (-1, 0.2, {"color": BLUE}),
    ):
        share = [100 * sizes[bits[row] == n].sum() / sizes.sum() for n in range(1, MAX_BITS + 1)]
        label = (
            f"{'before training' if rounds[row] == 0 else f'round {rounds[row]}'}, average {average[row]:.2f}"
        )
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
    legend_outside(figure)
    return figure
