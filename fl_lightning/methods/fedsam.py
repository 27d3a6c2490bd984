"""FedSAM (Qu et al., ICML 2022): clients step along the gradient of a place uphill (SAM, Foret et al., ICLR
2021), which ends where the loss is flat.

    q = gradient of L_task at y,  d = rho q / (||q|| + 1e-7),  y <- y - eta (gradient of L_task at y + d)

The norm is over all trained parameters.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from fl_lightning.config.constraints import within
from fl_lightning.methods.base import Method


class FedSAM(Method):
    """FedAvg with sharpness-aware local steps, which take two passes each. ``rho`` 0 is FedAvg, bit for bit.

    Terms of the loss are those at y; statistics of BatchNorm are those of the first pass.

    Args:
        rho: how far uphill, 0 or more; 0.05 or 0.1 in the paper.
        settings: those of every method.
    """

    kind = "flat minima"
    refuses = {"module": "its second pass would call your training_step, and log, once more"}

    def __init__(
        self,
        rho: Annotated[float, within("[0, inf)", "a distance is 0 or more", 0.05)] = 0.05,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.rho = rho

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        if self.rho == 0:
            return super().training_step(batch, batch_idx)
        weights = self.trained_weights()
        first, _ = self.task_and_logits(batch, batch_idx)
        found = torch.autograd.grad(first, list(weights.values()))
        norm = torch.stack([part.square().sum() for part in found]).sum().sqrt()
        uphill = {
            name: weight + self.rho / (norm + 1e-7) * part
            for (name, weight), part in zip(weights.items(), found, strict=True)
        }
        # the second pass normalises with its batch, and moves copies of the statistics
        copies = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        task, logits = self.task_and_logits(batch, batch_idx, {**copies, **uphill})
        return self.with_terms({"loss": task, "loss_task": task}, batch, logits)
