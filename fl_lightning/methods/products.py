"""Squared distances and inner products over all weights of a network, whose gradients are known by
hand.

Autograd by itself makes some ten small operations of each tensor of each term, which for a network
of many small layers is a tenth of a local step. The gradient of ||w - c||^2 is 2 (w - c), and that
of <v, w> is v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _SquaredDistance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        count = len(tensors) // 2
        ctx.away = torch._foreach_sub(tensors[:count], tensors[count:])
        return _sum_of_squares(ctx.away)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*torch._foreach_mul(ctx.away, 2 * grads[0]), *[None] * len(ctx.away))


class _InnerProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        count = len(tensors) // 2
        ctx.vectors = tensors[count:]
        return torch.stack(
            [part.sum() for part in torch._foreach_mul(tensors[:count], ctx.vectors)]
        ).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*torch._foreach_mul(ctx.vectors, grads[0]), *[None] * len(ctx.vectors))


class _Quadratic(torch.autograd.Function):
    """Both of the above, whose gradients are added up before they reach the weights."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        count = len(tensors) // 3
        weights, ctx.vectors = tensors[:count], tensors[2 * count :]
        ctx.away = torch._foreach_sub(weights, tensors[count : 2 * count])
        products = torch._foreach_mul(weights, ctx.vectors)
        return _sum_of_squares(ctx.away), torch.stack([part.sum() for part in products]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = torch._foreach_mul(ctx.away, 2 * grads[0])
        torch._foreach_add_(found, torch._foreach_mul(ctx.vectors, grads[1]))
        return (*found, *[None] * (2 * len(found)))


def squared_distance(weights: Sequence[Tensor], centres: Sequence[Tensor]) -> Tensor:
    """Return the sum of ||w - c||^2, a scalar; ``centres`` take no gradient."""
    if are_parameters(weights):
        return _SquaredDistance.apply(*weights, *centres)  # type: ignore[no-untyped-call, no-any-return]
    return _sum_of_squares(
        [weight - centre for weight, centre in zip(weights, centres, strict=True)]
    )


def inner_product(weights: Sequence[Tensor], vectors: Sequence[Tensor]) -> Tensor:
    """Return the sum of <v, w>, a scalar; ``vectors`` take no gradient."""
    if are_parameters(weights):
        return _InnerProduct.apply(*weights, *vectors)  # type: ignore[no-untyped-call, no-any-return]
    return torch.stack(
        [(weight * vector).sum() for weight, vector in zip(weights, vectors, strict=True)]
    ).sum()


def distance_and_product(
    weights: Sequence[Tensor], centres: Sequence[Tensor], vectors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the sums of ||w - c||^2 and of <v, w>, scalars, in fewer passes than one by one."""
    if are_parameters(weights):
        return _Quadratic.apply(*weights, *centres, *vectors)  # type: ignore[no-untyped-call, no-any-return]
    return squared_distance(weights, centres), inner_product(weights, vectors)


def moved_along(
    weights: Sequence[Tensor], directions: Sequence[Tensor], length: Tensor
) -> Sequence[Tensor]:
    """Return w + length d of each pair, with the gradient of w; ``directions`` take none."""
    if are_parameters(weights):
        # a sum of two may have other strides, with which convolutions take another, slower way
        places = [weight.clone() for weight in weights]
        torch._foreach_add_(places, torch._foreach_mul([*directions], length))
        return places
    return [
        weight + length * direction for weight, direction in zip(weights, directions, strict=True)
    ]


def are_parameters(weights: Sequence[Tensor]) -> bool:
    """Return whether weights are those of one network, and no stack of clients under
    ``torch.func``."""
    return all(type(weight) is nn.Parameter for weight in weights)


def length_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all values, a scalar."""
    return _sum_of_squares(parts).sqrt()


def _sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.square().sum() for part in parts]).sum()
