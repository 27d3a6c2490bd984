"""FFA-LoRA (Sun et al., ICLR 2024, arXiv 2403.12313): A stays as it was drawn, one for all clients.

B is averaged, so that mean(B) A = mean(BA):

    B <- sum_k p_k B_k
"""

from __future__ import annotations

from torch import nn

from fl_lightning.aggregation.adapters.base import AdapterAverage
from fl_lightning.models.adapters.low_rank import low_rank_layers


class FrozenA(AdapterAverage):
    """B alone is trained and travels, so the mean is exact. It is the network's setting ``ffa``,
    bit for bit."""

    name = "frozen_a"

    def prepare(self, network: nn.Module) -> None:
        for layer in low_rank_layers(network).values():
            layer.a.requires_grad_(False)
