"""HetLoRA (Cho et al., EMNLP 2024, arXiv 2401.06432): factors filled up with zeros to the largest
rank, and averaged with weights that grow with what a client's adapter adds.

    A <- sum_k q_k [A_k; 0],     B <- sum_k q_k [B_k, 0],     q_k ~ p_k ||B_k A_k||

A client of rank r_k gets the first r_k rows and columns. Their pruning of ranks is not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fl_lightning.aggregation.adapters import algebra
from fl_lightning.aggregation.adapters.base import AdapterAverage
from fl_lightning.aggregation.adapters.plain_weights import Averaging
from fl_lightning.aggregation.adapters.vectors import packed
from fl_lightning.aggregation.averages import capped, weighted_mean


class Padded(AdapterAverage):
    """The mean of filled-up factors, weighted by norm within the bound of ``max_share``. With equal
    ranks and norms it is ``factors``, bit for bit. The network's ``rank`` may be a list."""

    name = "padded"
    is_linear = False
    refines = True
    takes_ranks = True

    def bind(self, method: Averaging, clients: int) -> dict[str, Tensor]:
        self.max_share = method.max_share
        return super().bind(method, clients)

    def refined(self, mean: Tensor, vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
        pairs = [self.pairs_in(self.layout, vector) for vector in vectors]
        own = capped(algebra.norm_shares(pairs, shares), self.max_share)
        if own == list(shares):
            return mean
        return packed(
            self.layout, mean, self.pairs, self.pairs_in(self.layout, weighted_mean(vectors, own))
        )
