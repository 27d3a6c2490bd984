"""Bit planes as trainable parameters.

Source: BSQ, Yang et al., ICLR 2021, equations 3 to 6.

A layer of n weights at N bits is two stacks of N non-negative planes, ``planes [2, N, n]``: p for positive, n
for negative weights.

    W_q = s / (2^N - 1) * R( sum_b 2^b (p_b - n_b) )        R rounds; its backward pass is the identity

``[N]`` bits, ``[n]`` weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PLANE_MAX = 2.0
"""Upper bound of a plane's entries; BSQ clamps to [0, 2] after each step."""


def to_planes(weights: Tensor, bits: int, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return planes ``[2, N, n]`` that equal ``weights`` exactly, and their scale ``s = max |W|`` (0-dim).

    The digits of ``|W| (2^N - 1) / s`` fill the planes. The remainder below one step stays in the lowest
    plane, which is continuous: rounding it away at the start of every round would lose every update smaller
    than half a step. A layer of zeros, such as a head that starts at zero, gets s = 1 / sqrt(n); with s = 0
    it could never leave zero.

    Args:
        weights: n values of any shape.
        bits: N, 1 to 8.
        out: memory for the planes, float32 ``[2, N, n]``; None: new memory.
    """
    flat = weights.detach().reshape(-1).to(torch.float32)
    planes = flat.new_empty(2, bits, flat.numel()) if out is None else out
    magnitudes = flat.abs()
    scale = magnitudes.max()
    scale = torch.where(scale > 0, scale, flat.numel() ** -0.5)
    units = magnitudes.mul_((2**bits - 1) / scale)
    digits = units.floor().clamp_(max=2**bits - 1)
    # as bytes, because memory traffic dominates the time
    sides = torch.stack([flat > 0, flat < 0]).to(torch.uint8)
    shifts = torch.arange(bits, dtype=torch.uint8, device=flat.device).unsqueeze(1)
    planes.copy_(((sides * digits.to(torch.uint8)).unsqueeze(1) >> shifts).bitwise_and_(1))
    planes[:, 0] += sides * units.sub_(digits)
    return planes, scale


def units(planes: Tensor) -> Tensor:
    """Return sum_b 2^b (p_b - n_b), not rounded, ``[n]``, of planes ``[2, N, n]``."""
    return _signed_powers(planes) @ planes.flatten(0, 1)


class Layer(NamedTuple):
    """The planes ``[2, bits, size]`` of one layer with ``size`` weights in a flat vector of planes."""

    bits: int
    size: int

    @property
    def length(self) -> int:
        """Number of plane entries of the layer."""
        return 2 * self.bits * self.size


def views(flat: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """Return the planes ``[2, N, n]`` of each layer as views into ``flat``, the planes of all layers."""
    pieces = flat.split([layer.length for layer in layers])
    return [piece.view(2, layer.bits, layer.size) for layer, piece in zip(layers, pieces, strict=True)]


def reconstruct(
    flat: Tensor, scales: Tensor, layers: Sequence[Layer], matched: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Return W_q ``[n_l]`` of each layer, with a straight-through gradient to the planes, and L_bit.

        L_bit = 1 / (sum n_l) sum_l n_l N_l sum_b || [p_b ; n_b] ||_2, smoothed at zero as sqrt(1e-8 + sum of
        squares)

    Args:
        flat: the planes of all layers, one after another.
        scales: s of each layer ``[L]``.
        layers: bits and size of each layer.
        matched: whether the gradient of a layer's planes is divided by :func:`gain`.
    """
    *weights, penalty, _ = _Reconstruct.apply(flat, scales, tuple(layers), matched)
    return weights, penalty


class _Reconstruct(torch.autograd.Function):
    """Forward and backward pass of :func:`reconstruct`, written by hand.

    There are up to 16 plane entries for each weight, and each pass over them costs more than the layer.
    """

    @staticmethod
    def forward(flat: Tensor, scales: Tensor, layers: tuple[Layer, ...], matched: bool) -> tuple[Tensor, ...]:
        weights, norms = [], []
        for (bits, _), planes, scale in zip(layers, views(flat, layers), scales, strict=True):
            weights.append(units(planes).round_().mul_(scale / (2**bits - 1)))
            norms.append(_norms(planes))
        terms = torch.stack(
            [bits * size * norm.sum() for (bits, size), norm in zip(layers, norms, strict=True)]
        )
        return *weights, terms.sum() / sum(size for _, size in layers), torch.cat(norms)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, tuple[Layer, ...], bool], output: Any) -> None:
        flat, scales, ctx.layers, ctx.matched = inputs
        ctx.save_for_backward(flat, scales, output[-1])
        ctx.mark_non_differentiable(output[-1])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        flat, scales, all_norms = ctx.saved_tensors
        *of_weights, of_penalty, _ = gradients
        out = torch.empty_like(flat)
        total = sum(size for _, size in ctx.layers)
        norms = all_norms.split([layer.bits for layer in ctx.layers])
        each = zip(
            ctx.layers,
            views(flat, ctx.layers),
            scales,
            views(out, ctx.layers),
            norms,
            of_weights,
            strict=True,
        )
        for (bits, size), planes, scale, gradient, norm, of_weight in each:
            factor = 1 / gain(bits, scale) if ctx.matched else torch.ones_like(scale)
            if of_penalty is None:
                gradient.zero_()
            else:
                share = of_penalty * factor * (bits * size / total) / norm
                torch.mul(planes, share.unsqueeze(1), out=gradient)
            if of_weight is not None:
                rise = _signed_powers(planes) * (factor * scale / (2**bits - 1))
                gradient.flatten(0, 1).addr_(rise, of_weight)
        return out, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, flat: Tensor, scales: Tensor, layers: tuple[Layer, ...], matched: bool
    ) -> Any:
        """Process the stacked clients one after another; stacked tensors are small."""
        flat, scales = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((flat, scales), in_dims, strict=False)
        )
        rows = [_Reconstruct.apply(*row, layers, matched) for row in zip(flat, scales, strict=True)]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * (len(layers) + 2)


def _signed_powers(planes: Tensor) -> Tensor:
    """Return 2^b for the planes of positive weights and -2^b for the others, ``[2 N]``.

    One pass over both stacks is twice as fast as one pass over each.
    """
    powers = 2.0 ** torch.arange(planes.shape[1], device=planes.device, dtype=planes.dtype)
    return torch.cat([powers, -powers])


def _norms(planes: Tensor) -> Tensor:
    """Return || [p_b ; n_b] ||_2 of each bit, smoothed at zero, ``[N]``."""
    both = torch.linalg.vector_norm(planes, dim=2)
    return (both.square().sum(dim=0) + 1e-8).sqrt()


def gain(bits: int, scale: Tensor) -> Tensor:
    """Return how far a gradient step on the planes moves W, relative to the same step on W itself.

    This is 2 c^2 sum_b 4^b with c = s / (2^N - 1).
    """
    step = scale / (2**bits - 1)
    return 2 * step.square() * ((4**bits - 1) // 3)
