"""FedSAM (Qu et al., ICML 2022): clients step along the gradient of a place uphill (SAM, Foret et
al., ICLR 2021), which ends where the loss is flat.

    q = gradient of L_task at y
    d = rho q / (||q|| + 1e-7)
    y <- y - eta (gradient of L_task at y + d)

The norm is over all trained parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.func import grad

from fl_lightning.config.constraints import within
from fl_lightning.methods.base import Method
from fl_lightning.methods.products import are_parameters, length_of, moved_along
from fl_lightning.models.tensors import moving_buffers


class FedSAM(Method):
    """FedAvg with sharpness-aware local steps, which take two passes each. ``rho`` 0 is FedAvg, bit
    for bit.

    Terms of weights are those at y, all other terms of the loss those of the second pass, and the
    first one is along the task's loss alone. Statistics of BatchNorm are those of the first pass.

    Args:
        rho: how far uphill, 0 or more; 0.05 or 0.1 in the paper.
    """

    kind = "flat minima"
    stackable = True
    same_start = True
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
        weights, (found, moved) = self._moving_weights(), self._first_pass(batch, batch_idx)
        uphill = moved_along([*weights.values()], found, self.rho / (length_of(found) + 1e-7))
        # the second pass normalises with its batch, and moves copies of the statistics
        there = {**moved, **dict(zip(weights, uphill, strict=True))}
        task, logits = self.task_and_logits(batch, batch_idx, there)
        return self.with_terms({"loss": task, "loss_task": task}, batch, logits)

    def _first_pass(self, batch: Any, batch_idx: int) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        """Return q, in the order of the weights, and copies of the statistics, which have moved."""
        weights = self._moving_weights()
        if are_parameters([*weights.values()]):
            found = torch.autograd.grad(
                self.task_and_logits(batch, batch_idx)[0],
                [*weights.values()],
                allow_unused=True,
                materialize_grads=True,
            )
            return found, moving_buffers(self.network)

        def loss_of(weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            copies = moving_buffers(self.network)
            return self.task_and_logits(batch, batch_idx, {**copies, **weights})[0], copies

        # a stack of clients can take a gradient within a step by torch.func.grad alone
        start = {name: weight.detach() for name, weight in weights.items()}
        by_name, moved = grad(loss_of, has_aux=True)(start)
        for name, value in moved.items():
            self.network.get_buffer(name).copy_(value)
        return [*by_name.values()], moved

    def _moving_weights(self) -> dict[str, Tensor]:
        """Return the trained weights by name, without those that rest in this round, which have no
        gradient."""
        weights, moving = self.trained_weights(), self.adapters.moving(self)
        if moving is None:
            return weights
        parts = self.layout.unpack(moving)
        return {name: w for name, w in weights.items() if name not in parts or parts[name].any()}
