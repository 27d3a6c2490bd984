"""FedProx (Li et al., MLSys 2020): FedAvg whose clients are held back to the weights they received.

L = L_task + mu / 2 * || w - w_t ||^2        over the trainable parameters
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError
from fl_lightning.methods.base import Method
from fl_lightning.wire import Layout, Payload


class FedProx(Method):
    """A proximal term against client drift. ``mu`` 0 is FedAvg, bit for bit.

    Args:
        mu: weight of the proximal term, 0 or more; 0.001 to 1 in the paper. Above 1 / lr the local steps
            overshoot.
        settings: those of every method.
    """

    stackable = True
    same_start = True

    def __init__(self, mu: float = 0.01, **settings: Any) -> None:
        super().__init__(**settings)
        if not 0 <= mu < float("inf"):
            raise InputError(f"--model.mu {mu}", "a loss term weighs 0 or more", "write --model.mu 0.01")
        self.mu = mu

    def build(self, data: FederatedData) -> None:
        super().build(data)
        names = {name for name, parameter in self.network.named_parameters() if parameter.requires_grad}
        self.anchored = Layout.of(self.network, include=names.__contains__)
        self.register_buffer("received", torch.zeros(self.anchored.size))

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        self.received = self.anchored.pack(self.layout.unpack(message.tensor("weights"))).to(self.device)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """``loss = loss_task + loss_prox``; ``loss_prox`` is mu / 2 * ||w - w_t||^2, as it enters."""
        outputs = super().training_step(batch, batch_idx)
        if self.mu == 0:
            return outputs
        received = self.anchored.unpack(self.received)
        parameters = dict(self.network.named_parameters())
        squares = [(parameters[name] - start).square().sum() for name, start in received.items()]
        prox = self.mu / 2 * torch.stack(squares).sum()
        return {**outputs, "loss": outputs["loss"] + prox, "loss_prox": prox}
