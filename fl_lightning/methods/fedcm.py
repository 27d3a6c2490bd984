"""FedCM (Xu et al., 2021): local steps go partly along the direction in which all clients went in
the last round.

    y_i <- y_i - eta (A g + (1 - A) M)           K_i local steps from x
    x <- x + eta_g / |S| sum_S (y_i - x)
    M <- -1 / |S| sum_S (y_i - x) / (K_i eta)    eta and K_i of the same round

M is 0 at first. Statistics of BatchNorm are averaged, and M is over the trained parameters alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from fl_lightning.aggregation.server_optimizers import Rate, with_server_lr
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.methods.corrected import CorrectedMethod
from fl_lightning.methods.local_work import check_steps
from fl_lightning.methods.optimizing import round_lr
from fl_lightning.wire import Limit, Payload


class FedCM(CorrectedMethod):
    """Local steps with the momentum of all clients, which travels. Clients count once each.

    Args:
        A: share of a client's own gradient in its steps, in (0, 1]; 0.1 in the paper. 1 is FedAvg,
            bit for bit where ``weigh_by`` is the same.
        server_lr: eta_g, the length of the server's step.
    """

    kind = "drift correction"
    stackable = True
    same_start = True
    scales_with_federation = False
    calls_server_optimizer = True
    refuses = {"privacy": "a number of steps cannot be clipped together with weights"}
    plain_sgd_why = (
        "M is a mean step over lr, to which momentum and weight decay would be added once more"
    )

    def __init__(
        self,
        A: Annotated[float, within("(0, 1]", "a share lies in (0, 1]", 0.1)] = 0.1,
        server_lr: Rate = 1.0,
        **settings: Any,
    ) -> None:
        self.A = A
        settings = with_server_lr(settings, server_lr)  # the parser reads the name below
        super().__init__(**settings)

    @property
    def corrects(self) -> bool:
        return self.A < 1

    def build(self, data: FederatedData) -> None:
        super().build(data)
        if self.corrects:
            self.server["M"] = torch.zeros(self.trained.size)
            self.make_room("M")

    def broadcast(self, client: Client) -> Payload:
        message = super().broadcast(client)
        return Payload({**message, "M": self.server["M"]}) if self.corrects else message

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        if self.corrects:
            self.M = message.tensor("M").to(self.device)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        outputs = super().training_step(batch, batch_idx)
        if not self.corrects:
            return outputs
        return {**outputs, "loss": self.A * outputs["loss"] + (1 - self.A) * self.along(self.M)}

    def upload(self, client: Client) -> Payload:
        message = super().upload(client)
        return Payload({**message, "steps": torch.tensor(float(self.local_steps))})

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        return {**super().upload_limits(client), "steps": ()}

    def check(self, upload: Payload, client: Client) -> None:
        super().check(upload, client)
        check_steps(upload, self.steps_asked.get(client.id))

    def addends(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        found = super().addends(upload, client_id, weight)
        if not self.corrects:
            return found
        starts, steps = self.starts(), float(upload.tensor("steps"))
        start = starts["directions"]
        # a bound on an update's length is on what the client has moved, and not on a step's share
        moved = self.average.bounded(self.decode(upload), starts["weights"])
        reached = start + (moved[: self.trained.size] - start) / steps
        return {**found, "directions": Addend(reached, weight, self.largest_weight, start)}

    def starts(self) -> Mapping[str, Tensor]:
        starts = super().starts()
        if self.corrects:
            return {**starts, "directions": starts["weights"][: self.trained.size]}
        return starts

    def next_state(self, sums: Sums) -> None:
        starts, lr = self.starts(), round_lr(self)
        super().next_state(sums)
        if self.corrects and lr:  # a rate of 0 moves nothing and says nothing of the gradient
            self.server["M"] = (starts["directions"] - sums.mean("directions")) / lr
