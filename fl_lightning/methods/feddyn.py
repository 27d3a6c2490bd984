"""FedDyn (Acar et al., ICLR 2021, Algorithm 1): every client's loss gets a linear and a quadratic
term, so that its optimum is that of all.

    L = L_task + a_i (<H_i, y - x> + 1/2 ||y - x||^2)        K_i local steps from x
    H_i <- H_i + y_i - x
    H <- H + 1 / N sum_S (y_i - x)
    x <- 1 / |S| sum_S y_i + H

In the paper's letters h_i = -a_i H_i and h = -alpha H. H is the mean of all H_i after every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.methods.corrected import CorrectedMethod
from fl_lightning.methods.products import squared_distance
from fl_lightning.methods.terms import a_weight
from fl_lightning.wire import Payload


class FedDyn(CorrectedMethod):
    """Clients whose losses are bent towards the optimum of all. Clients count once each.

    Args:
        alpha: weight of both terms, 0 or more; 0.1 and 0.01 in the paper. 0 is FedAvg, bit for bit
            where ``weigh_by`` is the same.
        alpha_by: ``clients``: a_i is alpha; ``examples``: a_i is alpha sum_k n_k / (N n_i), as the
            authors have it where clients differ in size.
    """

    kind = "drift correction"
    stackable = True
    own_terms = frozenset({"dynamic"})

    def __init__(
        self,
        alpha: Annotated[float, a_weight(0.1)] = 0.1,
        alpha_by: Literal["clients", "examples"] = "clients",
        **settings: Any,
    ) -> None:
        self.alpha, self.alpha_by = alpha, alpha_by
        super().__init__(**settings)
        if alpha_by == "examples":
            why = "a node does not know how many examples all clients have; write --model.alpha_by clients"
            self.refuses = {**self.refuses, "own_data": why}

    @property
    def corrects(self) -> bool:
        return self.alpha > 0

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.mean_examples = float(data.sizes.sum()) / self.clients
        if self.corrects:
            self.server["H"] = torch.zeros(self.trained.size)
            self.make_room("start", "centre")
            for name in ("weight", "length"):
                self.register_buffer(name, torch.zeros(()), persistent=False)

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        if self.corrects:
            self.start = self.trained.read(self.network).to(self.device)
            self.centre = self.start - self.kept(client, "H_i").to(self.device)
            self.weight = torch.tensor(self.alpha * self.inverse_share(client), device=self.device)
            self.length = (self.start - self.centre).square().sum()

    def inverse_share(self, client: Client) -> float:
        """Return a_i / alpha: 1, or sum_k n_k / (N n_i)."""
        return self.mean_examples / len(client.train) if self.alpha_by == "examples" else 1.0

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        outputs = super().training_step(batch, batch_idx)
        if not self.corrects:
            return outputs
        # <H_i, y - x> + 1/2 ||y - x||^2 = 1/2 (||y - (x - H_i)||^2 - ||H_i||^2), in fewer passes
        squares, linear = self.quadratic_and_linear([*self.trained.unpack(self.centre).values()])
        term = self.weight / 2 * (squares - self.length)
        return {**outputs, "loss": outputs["loss"] + term + linear, "loss_dynamic": term}

    def quadratic_and_linear(self, centres: Sequence[Tensor]) -> tuple[Tensor, Tensor | float]:
        """Return ||y - c||^2, and what else a subclass adds to the loss that is linear in y."""
        return squared_distance([weight for _, weight in self.own_parameters()], centres), 0.0

    def end_client(self, client: Client) -> None:
        super().end_client(client)
        if self.corrects:
            moved = self.trained.read(self.network) - self.start.cpu()
            client.state["H_i"] = self.kept(client, "H_i") + moved

    def addends(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        own = {"clients": Addend(torch.ones(1))} if self.corrects else {}
        return {**super().addends(upload, client_id, weight), **own}

    def largest_value(self, name: str) -> float:
        return 1.0 if name == "clients" else super().largest_value(name)

    def next_state(self, sums: Sums) -> None:
        if not self.corrects:
            super().next_state(sums)
            return
        mean, start = sums.mean("weights"), self.server["weights"].float()
        moved = (mean.double() - start.double())[: self.trained.size]
        self.server["H"] = self.server["H"] + (sums.total("clients") / self.clients * moved).float()
        shift = torch.cat([self.server["H"], torch.zeros(len(mean) - self.trained.size)])
        self.server["weights"] = self.layout.to_wire(mean + shift)
