"""FedSA-LoRA (Guo et al., ICLR 2025, arXiv 2410.01463): A is averaged, and each client keeps its B.

    A <- sum_k p_k A_k

Client k adds c B_k A.
"""

from __future__ import annotations

from fl_lightning.aggregation.adapters.base import AdapterAverage


class ShareA(AdapterAverage):
    """Personal models with one A. A client that was never counted has its B of the start."""

    name = "share_a"
    personal = "*lora_B.*"

    @property
    def reads_single(self) -> bool:
        return False  # what a client adds depends on a B that nobody else has
