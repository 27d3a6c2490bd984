"""The grids of the quantised layers, which both representations of their weights train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

NORM_FLOOR = 1e-8
"""Under the root of each || p_b ||, so that an empty plane has a gradient (BSQ's code)."""


class Layer(NamedTuple):
    """Bit-width and number of weights of a quantised layer."""

    bits: int
    size: int


class Grid(NamedTuple):
    """The grids of all quantised layers of one client in one round.

    Args:
        layers: bits and size of each layer.
        scales: s of each layer, float32 ``[L]``; the step of its grid is s / (2^N - 1).
        pull: what the gradient of L_bit is multiplied by in each layer, float32 ``[L]``.
    """

    layers: Sequence[Layer]
    scales: Tensor
    pull: Tensor

    @property
    def sizes(self) -> list[int]:
        """Weights of each layer."""
        return [layer.size for layer in self.layers]


class Representation(Protocol):
    """What a client's optimiser steps on in place of the weights ``[n_l]`` of each quantised
    layer."""

    def variables(self, weights: Sequence[Tensor], grid: Grid) -> Tensor:
        """Return what is trained, one float32 vector, for the weights of each layer."""
        ...

    def unrounded(self, variables: Tensor, grid: Grid) -> list[Tensor]:
        """Return the weights of each layer before rounding."""
        ...

    def quantized(self, variables: Tensor, grid: Grid) -> tuple[list[Tensor], Tensor]:
        """Return W_q of each layer, and L_bit, both differentiable by ``variables``."""
        ...

    def project(self, variables: Tensor, grid: Grid) -> None:
        """Bring the variables back, in place, to where they are defined; it follows every step."""
        ...
