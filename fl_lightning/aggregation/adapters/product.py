"""FlexLoRA (Bai et al., NeurIPS 2024, arXiv 2402.11505): the mean of the products, cut to each
client's rank.

    U S V^T = sum_k p_k B_k A_k
    B <- U_r S_r^(1/2)
    A <- S_r^(1/2) V_r^T
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.aggregation.adapters import algebra
from fl_lightning.aggregation.adapters.base import AdapterAverage
from fl_lightning.aggregation.adapters.cohort import CohortAdapters
from fl_lightning.aggregation.adapters.plain_weights import Averaging
from fl_lightning.aggregation.adapters.vectors import packed


class Product(AdapterAverage):
    """The nearest adapter to the mean of what the clients' adapters add; exact where that has no
    higher rank.

    The network's ``rank`` may be a list. A client of rank r_k gets the r_k leading directions,
    which are the nearest adapter of its rank.
    """

    name = "product"
    needs_both = True
    new_factors = True
    is_linear = False
    sums_products = True
    refines = True
    takes_ranks = True

    def bind(self, method: Averaging, clients: int) -> dict[str, Tensor]:
        entries = super().bind(method, clients)
        first = self.layout.read(method.network)
        self.first = [a for a, _ in self.pairs_in(self.layout, first)]
        return entries

    def made(self, mean: Tensor, found: CohortAdapters) -> Tensor:
        layers = zip(found.products(), self.first, strict=True)
        made = [algebra.balanced(product, len(first), first) for product, first in layers]
        return packed(self.layout, mean, self.pairs, made)
