"""FedALA (Zhang et al., AAAI 2023): every client starts its round from a mixture of its own weights
and the global ones, whose shares it learns, one for each weight.

    y = v + (x - v) W                           on the adapted layers, else y = x
    W <- clip(W - ala_lr g(y) (x - v), 0, 1)    a step for each batch of ala_epochs passes, y anew
    y <- y - eta g(y)                           K_k steps; averaged by p_k
    v <- y,  W stays

g is the gradient of L_task. W is 1 at first, and statistics of BatchNorm start as received. The
personal model is v.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.methods.beside import PersonalMethod, same_numbers
from fl_lightning.methods.personal import part_of
from fl_lightning.models.tensors import moving_buffers
from fl_lightning.wire import Layout, Payload


class FedALA(PersonalMethod):
    """FedAvg whose clients go on from what they choose of the global model.

    Args:
        ala_names: how names of the adapted parameters begin, as ``[head.]``; null: those of the
            last linear layer.
        ala_epochs: passes over the client's examples in which W is learnt, each round; 0: the
            global model is FedAvg's, bit for bit.
        ala_lr: learning rate of W, above 0; 1 in the paper.
    """

    stackable = True

    def __init__(
        self,
        ala_names: list[str] | None = None,
        ala_epochs: Annotated[int, within("[0, inf)", "passes are 0 or more", 1)] = 1,
        ala_lr: Annotated[float, within("(0, inf)", "a learning rate is above 0", 1)] = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.ala_names = [ala_names] if isinstance(ala_names, str) else ala_names
        self.ala_epochs, self.ala_lr = ala_epochs, ala_lr

    def build(self, data: FederatedData) -> None:
        super().build(data)
        if self.ala_names is None:
            names = part_of(self.network, "head").intersection(self.trained_names)
        else:
            names = frozenset(
                name for name in self.trained_names if name.startswith(tuple(self.ala_names))
            )
        require(
            bool(names),
            f"--model.ala_names {self.ala_names}, with which no trained parameter begins",
            "W needs parameters to mix",
            f"write --model.ala_names '[{self.trained_names[-1].rpartition('.')[0]}]'",
        )
        require(
            self.average.guide != "root_update" or self.ala_epochs == 0,
            f"--model.average {type(self.average).__name__} with --model FedALA",
            "the server's own client keeps no model, and would mix the first one into each round",
            "write --model.average MultiKrum, or --model FedAvg",
        )
        self.adapted = Layout.of(self.network, include=names.__contains__)
        self.first |= {"v": self.server["weights"].float(), "W": torch.ones(self.adapted.size)}
        for name in ("W", "global_part", "own_part"):
            self.register_buffer(name, torch.zeros(self.adapted.size), persistent=False)

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        own = self.adapted.pack(self.layout.unpack(self.own_model(client)))
        self.W, self.own_part = self.kept(client, "W").to(self.device), own.to(self.device)
        self.global_part = self.adapted.read(self.network).to(self.device)
        self.adapted.write(self.network, self.mixed(self.W))

    def mixed(self, W: Tensor) -> Tensor:
        """Return v + (x - v) W, which is x where W is 1, to the last bit."""
        return torch.lerp(self.own_part, self.global_part, W)

    def local_batches(
        self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int
    ) -> Iterator[Any]:
        """Learn W, then yield the client's batches."""
        passes = self.ala_epochs
        most = data.num_steps(client, passes) if passes else 0
        with same_numbers():
            for batch in super().local_batches(
                data, client, epochs=passes, labels=labels, steps=most
            ):
                self.W = self.learnt(batch)
        self.adapted.write(self.network, self.mixed(self.W))
        yield from super().local_batches(data, client, epochs=epochs, labels=labels, steps=steps)

    def learnt(self, batch: Any) -> Tensor:
        """Return W after a step on a batch, which moves no statistics of the network."""
        W = self.W.detach().requires_grad_()
        statistics = moving_buffers(self.network)
        loss, _ = self.task_and_logits(batch, 0, statistics | self.adapted.unpack(self.mixed(W)))
        (gradient,) = torch.autograd.grad(loss, W)
        return (W.detach() - self.ala_lr * gradient).clamp(0, 1)

    def end_client(self, client: Client) -> None:
        super().end_client(client)
        self.keep(client, v=self.layout.read(self.network), W=self.W.cpu().clone())

    def deploy(self, client: Client | None = None) -> nn.Module:
        network = super().deploy()
        if client is not None:
            self.layout.write(network, self.own_model(client))
        return network
