"""One float for each weight, trained through the quantiser: no bit planes are stored.

Source of the idea: MSQ (arXiv 2507.22349), which takes BSQ's group lasso of the digits of a weight
instead of splitting the weight into trainable digits. The formulas are ours.

With c = s / (2^N - 1), q = R(W / c) and the digits p_b of |q| (the digit of the top bit holds all
that is above it, so it exceeds 1 where |W| outgrows s):

    W_q = c q                                   the gradient passes R as if it were the identity
    L_bit = 1 / (sum n_l) sum_l n_l N_l sum_b || p_b ||_2
    dL_bit / dW = pull / c * n_l N_l / (sum n_l) * sign(W) sum_b 2^b p_b / || p_b || / sum_b 4^b

The last line is the direction that L_bit gives the planes of a weight, measured in W: as far behind
the task's gradient as it is in :mod:`fl_lightning.quantization.planes` where ``pull`` is 1.

``[B]`` clients of a stack, ``[L]`` layers, ``[N]`` bits, ``[n]`` weights of all layers, ``[M]``
magnitudes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fl_lightning.quantization.layer import NORM_FLOOR, Grid, Layer


class Latent:
    """Clients train the weights themselves; rounding and regulariser act on the way through."""

    def variables(self, weights: Sequence[Tensor], grid: Grid) -> Tensor:
        """Return what is trained, float32 ``[n]``, for the weights ``[n_l]`` of each layer."""
        return torch.cat([weight.to(torch.float32) for weight in weights])

    def unrounded(self, variables: Tensor, grid: Grid) -> list[Tensor]:
        """Return the weights ``[n_l]`` of each layer before rounding."""
        return list(variables.split(grid.sizes))

    def quantized(self, variables: Tensor, grid: Grid) -> tuple[list[Tensor], Tensor]:
        """Return W_q ``[n_l]`` of each layer, and L_bit, both differentiable by ``variables``."""
        rounded, penalty, _, _ = _Rounded.apply(
            variables, grid.scales, grid.pull, tuple(grid.layers)
        )
        return list(rounded.split(grid.sizes)), penalty

    def project(self, variables: Tensor, grid: Grid) -> None:
        """Do nothing: every value is a weight."""


class _Tables(NamedTuple):
    """What depends on the layers' bits and sizes alone.

    Args:
        digits: digit b of each magnitude, ``[L, N, M]``; 0 for bits that the layer has not.
        powers: 2^b, ``[N]``.
        present: whether the layer has bit b, ``[L, N]``.
        top: 2^N - 1 of each layer, ``[L]``.
        weight: n_l N_l / (sum n_l) of each layer, ``[L]``.
        fours: sum_b 4^b of each layer, ``[L]``.
    """

    digits: Tensor
    powers: Tensor
    present: Tensor
    top: Tensor
    weight: Tensor
    fours: Tensor


@lru_cache(maxsize=16)  # allocations change over the rounds, and a table may have megabytes
def _tables(layers: tuple[Layer, ...], device: torch.device) -> _Tables:
    most, total = max(layer.bits for layer in layers), sum(layer.size for layer in layers)
    # weights up to four times s have digits of their own, larger ones count as those
    magnitudes = torch.arange(2 ** (most + 2), device=device)
    digits = torch.zeros(len(layers), most, len(magnitudes), device=device)
    for layer, (n, _) in enumerate(layers):
        for b in range(n - 1):
            digits[layer, b] = magnitudes >> b & 1
        digits[layer, n - 1] = magnitudes >> (n - 1)

    def of_each(values: Iterable[float]) -> Tensor:
        """Return one value for each layer, filled in on the device: nothing is copied to it."""
        return torch.stack([torch.full((), float(value), device=device) for value in values])

    bits = of_each(n for n, _ in layers)
    return _Tables(
        digits,
        2.0 ** torch.arange(most, device=device),
        torch.arange(most, device=device) < bits.unsqueeze(1),
        2.0**bits - 1,
        of_each(n * size / total for n, size in layers),
        (4.0**bits - 1) / 3,
    )


class _Rounded(torch.autograd.Function):
    """Forward and backward pass of :meth:`Latent.quantized`, layer by layer, so that a layer stays
    in the cache."""

    @staticmethod
    def forward(
        variables: Tensor, scales: Tensor, pull: Tensor, layers: tuple[Layer, ...]
    ) -> tuple:
        tables, sizes = _tables(layers, variables.device), [layer.size for layer in layers]
        magnitudes, clients = tables.digits.shape[2], variables.shape[:-1]
        steps = (scales / tables.top).expand(*clients, len(layers))
        rounded = torch.empty_like(variables)
        places = torch.empty(variables.shape, dtype=torch.int32, device=variables.device)
        each = zip(
            variables.split(sizes, -1),
            rounded.split(sizes, -1),
            places.split(sizes, -1),
            strict=True,
        )
        for layer, (weight, out, place) in enumerate(each):
            step = steps[..., layer, None]
            torch.div(weight, step, out=out).round_()
            place.copy_(out.abs().clamp_(max=magnitudes - 1))
            place.clamp_(min=0).add_(layer * magnitudes)  # NaN has become a negative number
            out.mul_(step)
        counts = _counts(places, len(layers) * magnitudes).view(
            *clients, len(layers), magnitudes, 1
        )
        squares = (tables.digits.square() @ counts).squeeze(-1)
        norms = (squares + NORM_FLOOR).sqrt()
        penalty = ((norms * tables.present).sum(-1) * tables.weight).sum(-1)
        return rounded, penalty, places, norms

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        variables, scales, pull, ctx.layers = inputs
        _, _, places, norms = output
        ctx.mark_non_differentiable(places, norms)
        ctx.save_for_backward(variables, scales, pull, places, norms)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_rounded: Tensor | None, of_penalty: Tensor | None, *_: None) -> tuple:
        if of_penalty is None:
            return of_rounded, None, None, None
        variables, scales, pull, places, norms = ctx.saved_tensors
        tables = _tables(ctx.layers, variables.device)
        strength = (
            of_penalty.unsqueeze(-1) * tables.weight * pull * tables.top / scales / tables.fours
        )
        rise = ((tables.powers / norms).unsqueeze(-2) @ tables.digits).squeeze(-2)
        rise = (rise * strength.unsqueeze(-1)).flatten(-2)
        if rise.dim() == 1:
            gradient = rise.index_select(0, places)
        else:
            gradient = rise.gather(1, places.long())
        torch.copysign(gradient, variables, out=gradient)
        return gradient if of_rounded is None else gradient.add_(of_rounded), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        """Compute all stacked clients in one pass."""
        rows = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(inputs[:3], in_dims, strict=False)
        ]
        return _Rounded.apply(*rows, inputs[3]), (0, 0, 0, 0)


def _counts(places: Tensor, length: int) -> Tensor:
    """Return how many of ``places`` ``[..., n]`` are 0, 1, ..., length - 1: float32 ``[...,
    length]``."""
    rows = places.reshape(-1, places.shape[-1])
    if places.device.type == "cpu":
        counts = torch.stack([row.bincount(minlength=length) for row in rows])
    else:
        counts = counts_without_waiting(rows, length)
    return counts.view(*places.shape[:-1], length).to(torch.float32)


def counts_without_waiting(rows: Tensor, length: int) -> Tensor:
    """Return the same of each row, int64 ``[B, length]``; ``bincount`` would wait for the device to
    know the largest."""
    counts = torch.zeros(len(rows), length, dtype=torch.int64, device=rows.device)
    return counts.scatter_add_(1, rows.long(), torch.ones_like(rows, dtype=torch.int64))
