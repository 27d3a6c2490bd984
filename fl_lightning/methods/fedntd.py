"""FedNTD: not-true distillation (Lee et al., NeurIPS 2022). Clients keep what the global model knows of the
classes they do not see.

    L = L_task + beta * tau^2 * KL(q_g || q),   q = softmax(z / tau) over the classes other than y

q_g is the same of the global model as received, frozen and in evaluation mode. Nothing more travels than in
FedAvg.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError
from fl_lightning.methods.base import Method
from fl_lightning.methods.lit_module import module_loss
from fl_lightning.methods.losses import kl_divergence
from fl_lightning.wire import Payload


class FedNTD(Method):
    """FedAvg with distillation of the not-true classes from the received weights. ``beta`` 0 is FedAvg, bit
    for bit.

    Args:
        beta: weight of the distillation term, 0 or more; 1 in the paper.
        tau: temperature of both distributions, above 0; 1 in the paper.
        settings: those of every method.
    """

    stackable = True
    same_start = True

    def __init__(self, beta: float = 1.0, tau: float = 1.0, **settings: Any) -> None:
        super().__init__(**settings)
        if not 0 <= beta < float("inf"):
            raise InputError(f"--model.beta {beta}", "a loss term weighs 0 or more", "write --model.beta 1")
        if not 0 < tau < float("inf"):
            raise InputError(f"--model.tau {tau}", "a temperature is above 0", "write --model.tau 1")
        self.beta, self.tau = beta, tau

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.teacher = deepcopy(self.network).requires_grad_(False)

    def train(self, mode: bool = True) -> FedNTD:
        super().train(mode)
        if hasattr(self, "teacher"):
            self.teacher.eval()
        return self

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        self.layout.write(self.teacher, message.tensor("weights"))

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """``loss = loss_task + loss_ntd``; ``loss_ntd`` is beta * tau^2 * KL, as it enters. A module's logits
        are those of its forward."""
        if self.beta == 0:
            return super().training_step(batch, batch_idx)
        inputs, target = batch
        local = self.network(inputs)
        with torch.no_grad():
            received = self.teacher(inputs)
        task = (
            self.task_loss(local, target)
            if self.module is None
            else module_loss(self.module, batch, batch_idx)
        )
        ntd = self.beta * not_true_distillation(local, received, target, self.tau)
        return {"loss": task + ntd, "loss_task": task, "loss_ntd": ntd}


def not_true_distillation(local: Tensor, received: Tensor, target: Tensor, tau: float) -> Tensor:
    """tau^2 * KL(q_g || q) over the classes other than the target, mean over the batch.

    Args:
        local, received: logits ``[B, C]`` of the client's and of the global model, C at least 2.
        target: int64 ``[B]``.
    """
    log_local = F.log_softmax(not_true(local, target) / tau, dim=1)
    log_received = F.log_softmax(not_true(received, target) / tau, dim=1)
    return tau**2 * kl_divergence(log_received.exp(), log_local, log_received)


def not_true(logits: Tensor, target: Tensor) -> Tensor:
    """``[B, C - 1]``: the logits without the target's.

    >>> not_true(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([0, 2])).tolist()
    [[2.0, 3.0], [4.0, 5.0]]
    """
    index = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, index + (index >= target.unsqueeze(1)))
