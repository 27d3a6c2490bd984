"""Bit planes as trainable parameters.

Source: BSQ, Yang et al., ICLR 2021, equations 3 to 6.

A layer of n weights at N bits is two stacks of N non-negative planes, ``planes [2, N, n]``: p for
positive, n for negative weights.

    W_q = s / (2^N - 1) * R( sum_b 2^b (p_b - n_b) )
    L_bit = 1 / (sum n_l) sum_l n_l N_l sum_b || [p_b ; n_b] ||_2

R rounds; its backward pass is the identity. The norm is smoothed at zero as
sqrt(1e-8 + sum of squares).

A step of SGD on the planes moves W by 2 c^2 sum_b 4^b of the same step on W, c = s / (2^N - 1), or
by half of that where one side is clamped: most weights. ``matched`` divides the gradient by c^2
sum_b 4^b. An optimiser that normalises its gradients (Adam) takes no notice: it moves every plane
by lr, and so W by up to 2 s lr.

``[N]`` bits, ``[n]`` weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import hardtanh_

from fl_lightning.quantization.layer import NORM_FLOOR, Grid, Layer

PLANE_MAX = 2.0
"""Upper bound of a plane's entries; BSQ clamps to [0, 2] after each step."""
TOP_MAX = 8.0
"""Upper bound of the top plane's entries: weights that outgrow s are held there."""


class Planes:
    """Clients train two planes for each bit.

    Args:
        matched: whether the gradient of a layer's planes is divided by :func:`gain`.
    """

    def __init__(self, matched: bool = True) -> None:
        self.matched = matched

    def variables(self, weights: Sequence[Tensor], grid: Grid) -> Tensor:
        """Return the planes of all layers, one after another."""
        flat = weights[0].new_empty(sum(map(length, grid.layers)), dtype=torch.float32)
        each = zip(weights, grid.layers, grid.scales, views(flat, grid.layers), strict=True)
        for weight, layer, scale, own in each:
            to_planes(weight, layer.bits, scale, out=own)
        return flat

    def unrounded(self, variables: Tensor, grid: Grid) -> list[Tensor]:
        """Return what the planes hold, ``[n_l]`` of each layer."""
        each = zip(grid.layers, views(variables, grid.layers), grid.scales, strict=True)
        return [units(planes) * (scale / (2**layer.bits - 1)) for layer, planes, scale in each]

    def quantized(self, variables: Tensor, grid: Grid) -> tuple[list[Tensor], Tensor]:
        """Return W_q ``[n_l]`` of each layer, and L_bit, both differentiable by the planes."""
        layers = tuple(grid.layers)
        *weights, penalty, _ = _Reconstruct.apply(
            variables, grid.scales, grid.pull, layers, self.matched
        )
        return weights, penalty

    def project(self, variables: Tensor, grid: Grid) -> None:
        """Clamp every plane to what it may hold."""
        for planes in views(variables, grid.layers):
            hardtanh_(planes[..., :-1, :], 0, PLANE_MAX)  # clamp_ has no batching rule
            hardtanh_(planes[..., -1, :], 0, TOP_MAX)


def to_planes(weights: Tensor, bits: int, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """Return planes ``[2, N, n]`` that hold ``weights``.

    The digits of ``|W| (2^N - 1) / s`` fill the planes; the top one holds all that is above it, at
    most ``TOP_MAX``. The remainder below one step stays in the lowest plane, which is continuous:
    rounding it away at the start of every round would lose every update smaller than half a step.

    Args:
        weights: n values of any shape.
        bits: N, 1 to 8.
        scale: s, above 0.
        out: memory for the planes, float32 ``[2, N, n]``; None: new memory.
    """
    flat = weights.detach().reshape(-1).to(torch.float32)
    planes = flat.new_empty(2, bits, flat.numel()) if out is None else out
    units = flat.abs().mul_((2**bits - 1) / scale).clamp_(max=TOP_MAX * 2 ** (bits - 1))
    digits = units.floor()
    # as small integers, because memory traffic dominates the time
    sides = torch.stack([flat > 0, flat < 0]).to(torch.int16)
    shifts = torch.arange(bits, dtype=torch.int16, device=flat.device).unsqueeze(1)
    shifted = (sides * digits.to(torch.int16)).unsqueeze(1) >> shifts
    shifted[:, :-1].bitwise_and_(1)
    planes.copy_(shifted)
    planes[:, 0] += sides * units.sub_(digits)
    return planes


def units(planes: Tensor) -> Tensor:
    """Return sum_b 2^b (p_b - n_b), not rounded, ``[n]``, of planes ``[2, N, n]``."""
    return _signed_powers(planes) @ planes.flatten(0, 1)


def length(layer: Layer) -> int:
    """Return the number of plane entries of a layer."""
    return 2 * layer.bits * layer.size


def views(flat: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """Return the planes ``[2, N, n]`` of each layer as views into ``flat``, the planes of all
    layers."""
    pieces = flat.split([length(layer) for layer in layers])
    return [
        piece.view(2, layer.bits, layer.size) for layer, piece in zip(layers, pieces, strict=True)
    ]


class _Reconstruct(torch.autograd.Function):
    """Forward and backward pass of :meth:`Planes.quantized`, written by hand.

    There are up to 16 plane entries for each weight, and each pass over them costs more than the
    layer.
    """

    @staticmethod
    def forward(
        flat: Tensor, scales: Tensor, pull: Tensor, layers: tuple[Layer, ...], matched: bool
    ) -> tuple[Tensor, ...]:
        weights, norms = [], []
        for (bits, _), planes, scale in zip(layers, views(flat, layers), scales, strict=True):
            weights.append(units(planes).round_().mul_(scale / (2**bits - 1)))
            norms.append(_norms(planes))
        terms = torch.stack(
            [bits * size * norm.sum() for (bits, size), norm in zip(layers, norms, strict=True)]
        )
        return *weights, terms.sum() / sum(size for _, size in layers), torch.cat(norms)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        flat, scales, pull, ctx.layers, ctx.matched = inputs
        ctx.save_for_backward(flat, scales, pull, output[-1])
        ctx.mark_non_differentiable(output[-1])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        flat, scales, pull, all_norms = ctx.saved_tensors
        *of_weights, of_penalty, _ = gradients
        out = torch.empty_like(flat)
        total = sum(size for _, size in ctx.layers)
        norms = all_norms.split([layer.bits for layer in ctx.layers])
        each = zip(
            ctx.layers,
            views(flat, ctx.layers),
            scales,
            pull,
            views(out, ctx.layers),
            norms,
            of_weights,
            strict=True,
        )
        for (bits, size), planes, scale, strength, gradient, norm, of_weight in each:
            factor = 1 / gain(bits, scale) if ctx.matched else torch.ones_like(scale)
            if of_penalty is None:
                gradient.zero_()
            else:
                share = of_penalty * factor * strength * (bits * size / total) / norm
                torch.mul(planes, share.unsqueeze(1), out=gradient)
            if of_weight is not None:
                rise = _signed_powers(planes) * (factor * scale / (2**bits - 1))
                gradient.flatten(0, 1).addr_(rise, of_weight)
        return out, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        """Process the stacked clients one after another; stacked tensors are small."""
        stacked = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(inputs[:3], in_dims, strict=False)
        ]
        rows = [_Reconstruct.apply(*row, *inputs[3:]) for row in zip(*stacked, strict=True)]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * len(rows[0])


def _signed_powers(planes: Tensor) -> Tensor:
    """Return 2^b for the planes of positive weights and -2^b for the others, ``[2 N]``.

    One pass over both stacks is twice as fast as one pass over each.
    """
    powers = 2.0 ** torch.arange(planes.shape[1], device=planes.device, dtype=planes.dtype)
    return torch.cat([powers, -powers])


def _norms(planes: Tensor) -> Tensor:
    """Return || [p_b ; n_b] ||_2 of each bit, smoothed at zero, ``[N]``."""
    both = torch.linalg.vector_norm(planes, dim=2)
    return (both.square().sum(dim=0) + NORM_FLOOR).sqrt()


def gain(bits: int, scale: Tensor) -> Tensor:
    """Return c^2 sum_b 4^b with c = s / (2^N - 1): how far a step of SGD on one side's planes moves
    W, relative to the same step on W itself."""
    step = scale / (2**bits - 1)
    return step.square() * ((4**bits - 1) // 3)
