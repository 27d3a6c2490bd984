"""A method in one file: FedAvg with momentum on the server (Hsu et al., 2019, arXiv 1909.06335; the
project's own is FedAvgM).

    v <- beta v + (w - sum_k p_k w_k)
    w <- w - v

The clients are FedAvg's.

    cd examples
    python -m fl_lightning fit --config own_method.yaml
"""

from __future__ import annotations

from typing import Any

import torch

from fl_lightning import FederatedData, Method
from fl_lightning.aggregation.sums import Sums
from fl_lightning.errors import require


class OwnMomentum(Method):
    """Server momentum. ``beta`` 0 is FedAvg.

    Args:
        beta: share of the last step that the server makes again, in [0, 1).
        settings: those of every method.
    """

    stackable = same_start = True  # the client's half is FedAvg's

    def __init__(self, beta: float = 0.7, **settings: Any) -> None:
        super().__init__(**settings)
        require(
            0 <= beta < 1,
            f"--model.beta {beta}",
            "it is a share in [0, 1)",
            "write --model.beta 0.7",
        )
        self.beta = beta

    def build(self, data: FederatedData) -> None:
        super().build(data)
        # 1 for parameters, 0 for BatchNorm's statistics: a variance that goes on falling would be
        # negative
        parameters = sum(p.numel() for p in self.network.parameters() if p.requires_grad)
        self.moves = (torch.arange(self.layout.size) < parameters).float()
        # what is in ``server`` is in every checkpoint
        self.server["velocity"] = torch.zeros_like(self.moves)

    def next_state(self, sums: Sums) -> None:
        before, velocity = self.server["weights"], self.server["velocity"]
        after = sums.mean("weights") - self.beta * velocity
        self.server |= {"weights": after, "velocity": self.moves * (before - after)}
