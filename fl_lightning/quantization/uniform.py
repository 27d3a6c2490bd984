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
        magnitude: int32 ``[n]`` in [0, 2^bits - 1], or above it if :func:`quantize` was asked not
            to saturate.
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
        return (
            torch.where(self.negative, -self.magnitude, self.magnitude).to(torch.float32)
            * self.step
        )

    def codes(self) -> Tensor:
        """Return codes of ``bits + 1`` bits, int32 ``[n]``: magnitude, and sign as the highest
        bit."""
        return self.magnitude | (self.negative.to(torch.int32) << self.bits)


SMALLEST_SCALE = 1e-30
"""Scale below which a layer counts as zeros: the inverse of its step would not be finite in
float32."""
MAX_MAGNITUDE = 2**30
"""Magnitude at which a value saturates that was not to saturate: what int32 holds."""
BINS = 4096
"""Bins of the histogram by which scales are compared: 16 to a step of 8 bits."""
CANDIDATES = 16
"""Scales that are compared."""


def dequantize_codes(codes: Tensor, scale: float, bits: int) -> Tensor:
    """Return the values float32 ``[n]`` of codes of ``bits + 1`` bits and any shape, from a lookup
    table."""
    return (_steps(bits) * (scale / (2**bits - 1))).index_select(0, codes.flatten())


@cache
def _steps(bits: int) -> Tensor:
    """Return the signed number of steps of each code of ``bits + 1`` bits, float32 ``[2^(bits +
    1)]``."""
    steps = torch.arange(2**bits, dtype=torch.int32, device="cpu")
    return torch.cat([steps, -steps]).to(torch.float32)


def quantize(
    values: Tensor,
    bits: int,
    scale: float | None = None,
    noise: np.random.Generator | None = None,
    saturate: bool = True,
) -> Quantized:
    """Round ``values`` to the grid of ``bits`` magnitude bits.

    With a scale below ``SMALLEST_SCALE`` all magnitudes are zero. If ``values`` hold NaN or
    infinity, that becomes the scale, so that the receiver notices it, and all magnitudes are zero.

    Args:
        values: float values of any shape.
        bits: N, 1 to 8.
        scale: s; None: ``max |values|``.
        noise: generator for unbiased stochastic rounding; None: rounding to the nearest point.
        saturate: whether values above s become s; if not, their magnitudes have more than ``bits``
            bits and cannot be sent.
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
    magnitude = units.clamp_(max=top if saturate else MAX_MAGNITUDE).to(torch.int32)
    return Quantized(magnitude, (flat < 0) & (magnitude > 0), scale, bits)


def nearest_scale(values: Tensor, bits: int) -> float:
    """Return the scale s at which ``values`` lose least when they are rounded to ``bits`` magnitude
    bits and saturate at s: the smallest sum of squared errors among s = k / 16 max |values|.

    A layer of a few bits with a few large weights is nearer to a grid that cuts these off than to
    one that reaches them. The errors are those of a histogram of ``BINS`` magnitudes.

    Args:
        values: finite values of any shape.
        bits: N, 1 to 8.
    """
    magnitudes = values.detach().flatten().to("cpu", torch.float32).abs()
    largest = float(magnitudes.max())
    if not SMALLEST_SCALE < largest < math.inf:
        return largest
    counts = torch.histc(magnitudes, BINS, 0, largest)
    centres = (torch.arange(BINS) + 0.5) / BINS
    scales = torch.arange(1, CANDIDATES + 1).unsqueeze(1) / CANDIDATES
    steps = scales / (2**bits - 1)
    errors = ((centres / steps).round().clamp_(max=2**bits - 1) * steps - centres).square() @ counts
    return largest * float(scales[errors.argmin()])


def prune(layer: Quantized, threshold: float = 0.02) -> tuple[Quantized, int]:
    """Drop bit planes that hardly any weight sets; keep at least one.

    This is FedMPQ's local pruning. From the highest plane down, a plane that is set in less than
    ``threshold`` of the weights is dropped; weights that had it set saturate, and the step stays
    the same. The highest plane counts every weight at or above it, those that outgrew the grid too.
    Then, from the lowest plane up, a plane that is set in at most ``threshold`` of the weights is
    dropped, and the step doubles.

    Args:
        layer: the layer on its grid.
        threshold: share of the weights, in [0, 1].

    Returns:
        The layer, and how many planes were dropped at the top. Where none was, magnitudes above
        ``2^bits - 1`` stay as they are.
    """
    magnitude, bits, step = layer.magnitude, layer.bits, layer.step
    if not magnitude.numel():
        return layer, 0
    few = threshold * magnitude.numel()
    while bits > 1:
        if (set_ := int((magnitude >= 2 ** (bits - 1)).sum())) > 0 and set_ >= few:
            break
        bits -= 1
        magnitude = magnitude.clamp(max=2**bits - 1)
    top = layer.bits - bits
    while bits > 1 and int((magnitude & 1).sum()) <= few:
        bits -= 1
        magnitude, step = magnitude >> 1, step * 2
    negative = layer.negative & (magnitude > 0)
    return replace(
        layer, magnitude=magnitude, negative=negative, scale=step * (2**bits - 1), bits=bits
    ), top


def quantize_and_prune(
    values: Tensor,
    bits: int,
    scale: float,
    threshold: float,
    noise: np.random.Generator | None = None,
) -> tuple[Quantized, int]:
    """Round ``values`` to a grid that they may have outgrown, and drop planes.

    Planes are counted on the grid of ``scale``, so that a few large values do not empty the planes
    of the others. Where the highest plane stays and some value needs more bits than are left, the
    layer is rounded anew with ``max |values|`` as its scale: it is sent with the same number of
    bits and a longer step.

    Args:
        values: float values of any shape.
        bits: N, 1 to 8.
        scale: s of the grid.
        threshold: share of the weights at which a plane is dropped, in [0, 1].
        noise: generator for unbiased stochastic rounding; None: rounding to the nearest point.

    Returns:
        The layer, its magnitudes below 2^bits, and how many planes were dropped at the top.
    """
    layer, top = prune(quantize(values, bits, scale, noise, saturate=False), threshold)
    if layer.magnitude.numel() and int(layer.magnitude.max()) >= 2**layer.bits:
        layer = quantize(values, layer.bits, noise=noise)
    return layer, top
