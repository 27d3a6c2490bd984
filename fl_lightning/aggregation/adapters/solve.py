"""Factors whose product is near to the mean of the products, by alternating least squares.

    min over A, B of || B A - sum_k p_k B_k A_k ||,     from mean(A) and mean(B) on

FLoRA-NA (Nguyen et al. 2025, arXiv 2509.26399) and LoRA-FAIR (Bian et al., ICCV 2025, arXiv
2411.14961) look for such factors, each in its own way.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from fl_lightning.aggregation.adapters import algebra
from fl_lightning.aggregation.adapters.algebra import Pair
from fl_lightning.aggregation.adapters.base import AdapterAverage
from fl_lightning.aggregation.adapters.cohort import CohortAdapters
from fl_lightning.aggregation.adapters.vectors import packed
from fl_lightning.config.constraints import within


class Solve(AdapterAverage):
    """Factors of the clients' rank that nearly give the mean of the products, with messages as
    ``factors`` has them. Where the means of the factors give it exactly, as with equal A, they
    stay: ``factors``, bit for bit.

    Args:
        steps: times that B and then A are solved for, at least 1.
    """

    name = "solve"
    is_linear = False
    sums_products = True
    refines = True

    def __init__(
        self, steps: Annotated[int, within("[1, inf)", "1 step or more is made", 10)] = 10
    ) -> None:
        self.steps = steps

    def made(self, mean: Tensor, found: CohortAdapters) -> Tensor:
        starts, products = self.pairs_in(self.layout, mean), found.products()
        made = [
            start
            if {*names[:2]} & {*self.frozen}  # the mean of the other factor is exact, and one stays
            else self._nearer(product, start)
            for names, start, product in zip(self.pairs, starts, products, strict=True)
        ]
        return packed(self.layout, mean, self.pairs, made)

    def _nearer(self, true: Pair, start: Pair) -> Pair:
        error = algebra.norm(algebra.joined(true, algebra.minus(start)))
        if error <= algebra.EXACT_SHARE * algebra.norm(true):
            return start
        return algebra.solved(true, start, self.steps)
