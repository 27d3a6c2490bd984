"""Sign-magnitude codes on a uniform grid of 2 * (2^N - 1) + 1 points, and their local pruning."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """The weights of a layer on the grid.

    ``values = scale / (2^bits - 1) * magnitude * (-1 if negative else 1)``.

    Args:
        magnitude: int32 ``[n]`` in [0, 2^bits - 1].
        negative: bool ``[n]``.
        scale: s, the largest magnitude on the grid; float32.
        bits: N, magnitude bits, 1 to 8.
    """

    magnitude: Tensor
    negative: Tensor
    scale: float
    bits: int

    @property
    def step(self) -> float:
        """Distance of neighbouring points of the grid."""
        return self.scale / (2**self.bits - 1)

    def dequantize(self) -> Tensor:
        """Return the values, float32 ``[n]``."""
        return torch.where(self.negative, -self.magnitude, self.magnitude).to(torch.float32) * self.step

    def codes(self) -> Tensor:
        """Return codes of ``bits + 1`` bits, int32 ``[n]``: magnitude, and sign as the highest bit."""
        return self.magnitude | (self.negative.to(torch.int32) << self.bits)

    @classmethod
    def from_codes(cls, codes: Tensor, scale: float, bits: int) -> Quantized:
        """Return the layer whose :meth:`codes` are these."""
        return cls(codes & (2**bits - 1), (codes >> bits).bool(), scale, bits)


SMALLEST_SCALE = 1e-30
"""Scale below which a layer counts as zeros: the inverse of its step would not be finite in float32."""


def dequantize_codes(codes: Tensor, scale: float, bits: int) -> Tensor:
    """Return the values float32 ``[n]`` of codes of ``bits + 1`` bits and any shape, from a lookup table."""
    return (_steps(bits) * (scale / (2**bits - 1))).index_select(0, codes.flatten())


@cache
def _steps(bits: int) -> Tensor:
    """Return the signed number of steps of each code of ``bits + 1`` bits, float32 ``[2^(bits + 1)]``."""
    steps = torch.arange(2**bits, dtype=torch.int32, device="cpu")
    return torch.cat([steps, -steps]).to(torch.float32)


def quantize(
    values: Tensor, bits: int, scale: float | None = None, noise: np.random.Generator | None = None
) -> Quantized:
    """Round ``values`` to the grid of ``bits`` magnitude bits.

    With a scale below ``SMALLEST_SCALE`` all magnitudes are zero. If ``values`` hold NaN or infinity, that
    becomes the scale, so that the receiver notices it, and all magnitudes are zero.

    Args:
        values: float values of any shape.
        bits: N, 1 to 8.
        scale: s; None: ``max |values|``. Larger values saturate.
        noise: generator for unbiased stochastic rounding; None: rounding to the nearest point.
    """
    flat = values.detach().reshape(-1).to("cpu", torch.float32)
    top = 2**bits - 1
    largest = float(flat.abs().max()) if flat.numel() else 0.0
    scale = np.float32(largest if scale is None else scale).item()
    if not math.isfinite(largest):
        scale = largest
    if abs(scale) < SMALLEST_SCALE or not math.isfinite(scale):
        return Quantized(
            torch.zeros(flat.numel(), dtype=torch.int32),
            torch.zeros(flat.numel(), dtype=torch.bool),
            scale,
            bits,
        )
    units = flat.abs() * (top / scale)
    if noise is None:
        units = units.round()
    else:
        units = (units + torch.from_numpy(noise.random(flat.numel(), dtype=np.float32))).floor()
    magnitude = units.clamp_(max=top).to(torch.int32)
    return Quantized(magnitude, (flat < 0) & (magnitude > 0), scale, bits)


def prune(layer: Quantized, threshold: float = 0.02) -> Quantized:
    """Drop bit planes that hardly any weight sets; keep at least one.

    This is FedMPQ's local pruning. From the highest plane down, a plane that is set in less than
    ``threshold`` of the weights is dropped; weights that had it set saturate, and the step stays the same.
    Then, from the lowest plane up, a plane that is set in at most ``threshold`` of the weights is dropped,
    and the step doubles.

    Args:
        layer: the layer on its grid.
        threshold: share of the weights, in [0, 1].
    """
    magnitude, bits, step = layer.magnitude, layer.bits, layer.step
    if not magnitude.numel():
        return layer
    few = threshold * magnitude.numel()
    while bits > 1:
        if (set_ := int((magnitude >= 2 ** (bits - 1)).sum())) > 0 and set_ >= few:
            break
        bits -= 1
        magnitude = magnitude.clamp(max=2**bits - 1)
    while bits > 1 and int((magnitude & 1).sum()) <= few:
        bits -= 1
        magnitude, step = magnitude >> 1, step * 2
    return replace(
        layer,
        magnitude=magnitude,
        negative=layer.negative & (magnitude > 0),
        scale=step * (2**bits - 1),
        bits=bits,
    )
