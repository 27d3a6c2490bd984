"""Bit planes as trainable parameters (BSQ, Yang et al., ICLR 2021, equations 3 to 6).

A layer of n weights at N bits is two stacks of N non-negative planes, ``planes [2, N, n]``: p for positive, n for negative weights.

    W_q = s / (2^N - 1) * R( sum_b 2^b (p_b - n_b) )        R rounds; its backward is the identity

``[N]`` bits, ``[n]`` weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PLANE_MAX = 2.0
"""Upper bound of a plane's entries; BSQ clamps to [0, 2] after each step."""


def to_planes(weights: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Planes that hold ``weights`` exactly, and their scale ``s = max |W|`` (0-dim).

    A layer of zeros (a head that starts so) gets s = 1 / sqrt(n), or it could never leave zero.

    The digits of ``|W| (2^N - 1) / s`` fill the planes; what is left below one step stays in the lowest plane, which is continuous.
    (Rounding it away at the start of every round would lose any update smaller than half a step.)
    """
    flat = weights.detach().reshape(-1).to(torch.float32)
    scale = flat.abs().max()
    scale = torch.where(scale > 0, scale, flat.numel() ** -0.5)
    units = flat.abs() * ((2**bits - 1) / scale)
    digits = units.floor().clamp_(max=2**bits - 1)
    shifts = torch.arange(bits, device=flat.device).unsqueeze(1)
    planes = ((digits.to(torch.int32) >> shifts) & 1).to(torch.float32)
    planes[0] += units - digits
    return torch.stack([planes * (flat > 0), planes * (flat < 0)]), scale


def units(planes: Tensor) -> Tensor:
    """sum_b 2^b (p_b - n_b), not rounded: ``[2, N, n] -> [n]``."""
    powers = 2.0 ** torch.arange(planes.shape[1], device=planes.device, dtype=planes.dtype)
    return powers @ (planes[0] - planes[1])


def from_planes(planes: Tensor, scale: Tensor) -> Tensor:
    """W_q ``[n]`` with a straight-through gradient to the planes."""
    value = units(planes)
    rounded = value + (value.round() - value).detach()
    return rounded * (scale / (2 ** planes.shape[1] - 1))


def group_norms(planes: Tensor) -> Tensor:
    """sum_b || [p_b ; n_b] ||_2, smoothed at zero: ``[2, N, n] -> []``."""
    return (planes.square().sum(dim=(0, 2)) + 1e-8).sqrt().sum()


def gain(bits: int, scale: Tensor) -> Tensor:
    """How far a gradient step on the planes moves W, relative to the same step on W itself: 2 c^2 sum_b 4^b, c = s / (2^N - 1)."""
    step = scale / (2**bits - 1)
    return 2 * step.square() * ((4**bits - 1) // 3)


class _ScaleGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, factor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def scale_gradient(tensor: Tensor, factor: Tensor) -> Tensor:
    """The tensor itself, whose gradient is multiplied by ``factor``."""
    return _ScaleGradient.apply(tensor, factor)
