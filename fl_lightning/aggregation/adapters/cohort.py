"""What a server knows of the adapters that its clients ended a round with: single uploads, or under
masks the sum of their products.

mean(B) mean(A) is not mean(BA), but mean(BA) is a sum of what each client can make by itself: B_k
A_k, m n values of a layer where its factors have r (m + n). A rule that needs nothing else of
single clients has it from either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fl_lightning.aggregation.adapters import algebra
from fl_lightning.aggregation.adapters.algebra import EXACT_SHARE, Pair
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE

PRODUCTS = "adapter_products"
"""The name of the sum of B_k A_k of all layers."""


class CohortAdapters(Protocol):
    """The adapters of a cohort, as far as a rule needs them."""

    def products(self, *, compact: bool = False) -> list[Pair]:
        """Return a pair for each layer whose product is mean(BA), float64.

        Args:
            compact: whether directions that are zero in both factors of a client are left out.
        """

    def residuals(self, means: Sequence[Pair]) -> list[Pair]:
        """Return a pair for each layer whose product is mean(BA) - mean(B) mean(A), float64.

        Args:
            means: mean(A) and mean(B) of each layer.
        """


@dataclass(frozen=True)
class Uploaded:
    """What single clients ended a round with.

    Args:
        adapters: the pairs of each client, layer by layer.
        shares: p, adding up to 1.
    """

    adapters: Sequence[Sequence[Pair]]
    shares: Sequence[float]

    def products(self, *, compact: bool = False) -> list[Pair]:
        without = algebra.without_zeros if compact else (lambda pair: pair)
        return [
            algebra.stacked([*map(without, pairs)], self.shares)
            for pairs in zip(*self.adapters, strict=True)
        ]

    def residuals(self, means: Sequence[Pair]) -> list[Pair]:
        layers = zip(zip(*self.adapters, strict=True), means, strict=True)
        return [algebra.residual(pairs, self.shares, mean_b) for pairs, (_, mean_b) in layers]


@dataclass(frozen=True)
class SummedProducts:
    """What the sum of the clients' products tells.

    Args:
        matrices: mean(BA) of each layer, float64 ``[m, n]``.
        ranks: the largest rank r of a client's adapter of each layer.
        clients: K, those in the sum: the rank of mean(BA) is K r at most.
    """

    matrices: Sequence[Tensor]
    ranks: Sequence[int]
    clients: int

    def products(self, *, compact: bool = False) -> list[Pair]:
        layers = zip(self.matrices, self.ranks, strict=True)
        return [algebra.of_matrix(matrix, self.clients * rank) for matrix, rank in layers]

    def residuals(self, means: Sequence[Pair]) -> list[Pair]:
        """What is rounding of the sum counts as 0, as where all A are equal."""
        found = []
        for matrix, rank, (a, b) in zip(self.matrices, self.ranks, means, strict=True):
            left = matrix - b @ a
            is_zero = left.norm() <= EXACT_SHARE * matrix.norm()
            found.append(algebra.of_matrix(left, 0 if is_zero else (self.clients - 1) * rank))
        return found


def products_in(pairs: Sequence[Pair]) -> Tensor:
    """Return what a client adds to the sum of products, B A of each layer, float32 ``[sum of m
    n]``.

    Values are cut to what can be added up: an adapter that adds as much ruins a model in any case.
    """
    flat = torch.cat([(b @ a).reshape(-1) for a, b in pairs])
    return flat.clamp(1 - MAX_MAGNITUDE, MAX_MAGNITUDE - 1).float()


def matrices_in(vector: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the matrix of each layer in a vector of :func:`products_in`, float64 ``[m, n]``."""
    parts = vector.double().split([m * n for m, n in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
