"""SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1): control variates against client drift.

    y_i <- y_i - eta (g - c_i + c)                      K_i local steps from x
    c_i+ = c_i - c + (x - y_i) / (K_i eta)              option 2
    c_i+ = gradient of all of the client's data at x    option 1
    x <- x + eta_g / |S| sum_S (y_i - x)
    c <- c + 1 / N sum_S (c_i+ - c_i)

All c_i and c are 0 at first, and c is the mean of all c_i after every round.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fl_lightning.aggregation.server_optimizers import with_server_lr
from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.methods.corrected import ChangingMethod
from fl_lightning.wire import Payload


class SCAFFOLD(ChangingMethod):
    """Local steps along g - c_i + c, so that clients go where all of them would. Clients count once
    each.

    Args:
        option: 2, c_i of the local steps, or 1, c_i of one more pass over the client's data before
            them.
        server_lr: eta_g, the length of the server's step.
        control: whether there are control variates; False is FedAvg, bit for bit where ``weigh_by``
            is the same.
    """

    kind = "drift correction"
    stackable = True
    calls_server_optimizer = True
    mean_name = "c"
    plain_sgd_why = (
        "c_i is a mean gradient, (x - y) / (K lr), where a step is minus lr times a gradient"
    )

    def __init__(
        self,
        option: Annotated[int, within("[1, 2]", "the paper has options 1 and 2", 2)] = 2,
        server_lr: Annotated[float, within("(0, inf)", "a rate is above 0 and finite", 1.0)] = 1.0,
        control: bool = True,
        **settings: Any,
    ) -> None:
        self.option, self.control = option, control
        settings = with_server_lr(settings, server_lr)  # the parser reads the name below
        super().__init__(**settings)

    @property
    def corrects(self) -> bool:
        return self.control

    @property
    def control_variates(self) -> bool:
        return self.control

    def build(self, data: FederatedData) -> None:
        super().build(data)
        if self.control:
            self.make_room("start", "c", "correction", "gradient")

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        if self.control:
            self.start, self.c = self.trained.read(self.network), message.tensor("c")
            self.correction = (self.c - self.kept(client, "c_i")).to(self.device)

    def local_batches(
        self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int
    ) -> Iterator[Any]:
        if self.control and self.option == 1:
            self.gradient = self._full_gradient(data, client, labels)
        yield from super().local_batches(data, client, epochs=epochs, labels=labels, steps=steps)

    @torch.enable_grad()
    def _full_gradient(self, data: FederatedData, client: Client, labels: Tensor) -> Tensor:
        """Return the gradient of the local loss over all of the client's examples, at what was
        received.

        Statistics of BatchNorm are as before afterwards.
        """
        weights = [tensor for _, tensor in self.own_parameters()]
        before = [(buffer, buffer.clone()) for buffer in self.network.buffers()]
        total, steps = torch.zeros(self.trained.size, device=self.device), data.num_steps(client, 1)
        seen = 0.0
        for number, batch in enumerate(
            super().local_batches(data, client, epochs=1, labels=labels, steps=steps)
        ):
            loss = super().training_step(batch, number)["loss"]
            found = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            size = self._weight_of(batch)
            total, seen = (
                total + size * torch.cat([part.reshape(-1) for part in found]),
                seen + size,
            )
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
        return (total / seen).cpu()

    def _weight_of(self, batch: Any) -> float:
        """Return how much a batch's loss counts: its examples, or their labelled tokens."""
        if self.module is not None:
            return len(tree_leaves(batch)[0])
        return float(self.task.weight(batch[1]).sum())

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        outputs = super().training_step(batch, batch_idx)
        if not self.control:
            return outputs
        return {**outputs, "loss": outputs["loss"] + self.along(self.correction)}

    def change(self, client: Client) -> Tensor:
        c_i, moved = self.kept(client, "c_i"), self.local_steps * self.local_lr
        if self.option == 1:
            change = self.gradient - c_i
        else:  # a rate of 0 moves nothing and says nothing of the gradient
            change = (
                (self.start - self.trained.read(self.network)) / moved - self.c
                if moved
                else 0 * c_i
            )
        client.state["c_i"] = c_i + change
        return change
