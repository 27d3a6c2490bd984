"""Ditto (Li et al., ICML 2021, Algorithm 1): every client keeps a model of its own, which is drawn
to the global one.

    client k:  y <- y - eta g(y)                            K_k steps from x, as in FedAvg
               v <- v - eta_v (g(v) + lam (v - x))          in the same steps, x as received
    server:    x <- sum_k p_k y_k

g is the gradient of L_task. v stays on the client, with statistics of BatchNorm of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.methods.beside import BesideMethod, same_numbers
from fl_lightning.methods.products import squared_distance
from fl_lightning.methods.terms import a_weight
from fl_lightning.models.tensors import tensors_of
from fl_lightning.wire import Payload


class PersonalBatch(NamedTuple):
    """A batch of which v alone makes a step."""

    batch: Any


class Ditto(BesideMethod):
    """FedAvg, beside which each client trains a model of its own. ``terms`` are those of the global
    model.

    Args:
        lam: how strongly v is drawn to x, 0 or more; 0.1 to 2 in the paper. 0: v is that of
            LocalOnly. Above 1 / lr the steps of v overshoot.
        personal_steps: steps of v in a round, which all clients make, before the others; null: v
            makes one beside each step of the global model.
        personal_lr: learning rate of v, which ``scheduler`` scales too; null: that of
            ``optimizer``.
    """

    stackable = True
    own_terms = frozenset({"personal", "pull"})
    module_optimizes = False

    def __init__(
        self,
        lam: Annotated[float, a_weight(0.1)] = 0.1,
        personal_steps: Annotated[
            int | None, within("[1, inf)", "v makes 1 step or more", 5)
        ] = None,
        personal_lr: Annotated[
            float | None, within("(0, inf)", "a learning rate is above 0", 0.05)
        ] = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.lam, self.personal_steps, self.personal_lr = lam, personal_steps, personal_lr

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.register_buffer("start", torch.zeros(self.trained.size), persistent=False)

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        self.start = self.trained.read(self.network).to(self.device)

    def local_batches(
        self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int
    ) -> Iterator[Any]:
        """Yield the batches of ``personal_steps``, then the client's own."""
        if self.personal_steps is not None:
            passes, most = data.epochs_for(client, self.personal_steps), self.personal_steps
            # first, so that all clients of a stack begin the same parameters at the same step
            with same_numbers():
                for batch in super().local_batches(
                    data, client, epochs=passes, labels=labels, steps=most
                ):
                    yield PersonalBatch(batch)
        yield from super().local_batches(data, client, epochs=epochs, labels=labels, steps=steps)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        if isinstance(batch, PersonalBatch):
            return self.personal_losses(batch.batch, batch_idx)
        if self.personal_steps is not None:
            return super().training_step(batch, batch_idx)
        with same_numbers():
            personal = self.personal_losses(batch, batch_idx)
        outputs = super().training_step(batch, batch_idx)
        return {**personal, **outputs, "loss": outputs["loss"] + personal["loss"]}

    def personal_losses(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the losses of v."""
        task, _ = self.task_and_logits(batch, batch_idx, tensors_of(self.beside))
        starts = [*self.trained.unpack(self.start).values()]
        pull = self.lam / 2 * squared_distance(self.own_parameters(self.beside), starts)
        return {"loss": task + pull, "loss_personal": task, "loss_pull": pull}

    def trainable(self) -> Iterable[nn.Parameter] | Iterable[dict[str, Any]]:
        if self.personal_lr is None:
            return super().trainable()
        personal, shared = self.own_parameters(self.beside), self.own_parameters(self.network)
        groups: list[dict[str, Any]] = [
            {"params": shared},
            {"params": personal, "lr": self.personal_lr},
        ]
        return groups

    def end_client(self, client: Client) -> None:
        super().end_client(client)
        self.keep(client, v=self.layout.read(self.beside))

    def deploy(self, client: Client | None = None) -> nn.Module:
        if client is None:
            return super().deploy()
        self.layout.write(self.network, self.own_model(client))
        return self.network
