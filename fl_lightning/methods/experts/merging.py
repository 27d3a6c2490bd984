"""Experts as what they add to the weights: dW = (alpha / r) B A, layer by layer.

Factors of one expert can look like anything: B Q and Q^-1 A give the same dW for any invertible Q.
So experts are compared and merged by dW, from products of r x r matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.aggregation.adapters.algebra import stacked
from fl_lightning.models.adapters.low_rank import FactorNames
from fl_lightning.wire import Layout


class AdapterSpace:
    """The vectors ``[P]`` of a layout of LoRA factors.

    Args:
        layout: of one adapter over all layers.
        factors: the names of its factors.
        frozen: factors that are the same for all experts and no part of the layout, by name; of
            FFA-LoRA every A.
    """

    def __init__(
        self, layout: Layout, factors: Sequence[FactorNames], frozen: Mapping[str, Tensor]
    ) -> None:
        self.layout, self.factors = layout, factors
        self.frozen = {name: tensor.double() for name, tensor in frozen.items()}

    def _pairs(self, expert: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return A ``[r, in]`` and B ``[out, r]``, scaled, of each layer, float64."""
        named = {**self.layout.unpack(expert.double()), **self.frozen}
        return [(named[each.a], each.scaling * named[each.b]) for each in self.factors]

    def product(self, first: Tensor, second: Tensor) -> float:
        """Return the inner product of two experts' dW, summed over layers: tr(B_1^T B_2 A_2
        A_1^T)."""
        return sum(
            float(((b1.T @ b2) * (a1 @ a2.T)).sum())
            for (a1, b1), (a2, b2) in zip(self._pairs(first), self._pairs(second), strict=True)
        )

    def cosine(self, first: Tensor, second: Tensor) -> float:
        """Return the cosine of two experts' dW; 0 where one of them adds nothing."""
        squares = self.product(first, first) * self.product(second, second)
        return self.product(first, second) / squares**0.5 if squares > 0 else 0.0

    def factor_error(self, adapters: Tensor, weights: Tensor) -> tuple[float, float]:
        """Return ||sum_k w_k dW_k - B A||^2 with the means B and A of the factors, and ||sum_k w_k
        dW_k||^2: what averaging factors apart loses, and of how much.

        Args:
            adapters: ``[n, P]``.
            weights: w ``[n]``, adding up to 1.
        """
        of_clients = [self._pairs(adapter) for adapter in adapters]
        of_mean = self._pairs((weights.unsqueeze(1) * adapters.double()).sum(0))
        error = whole = 0.0
        for number, (mean_a, mean_b) in enumerate(of_mean):
            pairs = [of_client[number] for of_client in of_clients]
            a, b = stacked(pairs, weights.tolist())
            whole += float(((b.T @ b) * (a @ a.T)).sum())
            b, a = torch.cat([b, -mean_b], 1), torch.cat([a, mean_a], 0)
            error += float(((b.T @ b) * (a @ a.T)).sum())
        return max(error, 0.0), whole

    def merged(self, experts: Tensor, weights: Tensor) -> tuple[Tensor, float]:
        """Return the expert of rank r nearest to sum_k w_k dW_k, ``[P]``, and the share of its
        energy that is lost.

        Where A is frozen the sum has rank r: it is the mean of B. Else the factors are stacked, and
        QR and SVD bring them back to rank r (Eckart and Young, 1936).

        Args:
            experts: float32 ``[n, P]``.
            weights: w ``[n]``, adding up to 1.
        """
        if all(each.a in self.frozen for each in self.factors):
            return (weights.unsqueeze(1) * experts.double()).sum(0).to(experts), 0.0
        found: dict[str, Tensor] = {}
        kept = whole = 0.0
        of_experts = [self._pairs(expert) for expert in experts]
        for number, each in enumerate(self.factors):
            pairs = [of_expert[number] for of_expert in of_experts]
            rank = len(pairs[0][0])
            a, b = stacked(pairs, weights.tolist())
            left, r_left = torch.linalg.qr(b)
            right, r_right = torch.linalg.qr(a.T)
            u, s, v = torch.linalg.svd(r_left @ r_right.T)
            kept += float(s[:rank].square().sum())
            whole += float(s.square().sum())
            root, missing = s[:rank].sqrt(), max(0, rank - len(s))  # r may be above a side of W
            b = left @ u[:, : len(root)] * root / each.scaling
            a = root.unsqueeze(1) * (v[: len(root)] @ right.T)
            found[each.b], found[each.a] = pad(b, (0, missing)), pad(a, (0, 0, 0, missing))
        return self.layout.pack(found), 1 - kept / whole if whole > 0 else 0.0
