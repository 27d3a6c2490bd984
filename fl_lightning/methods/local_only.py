"""LocalOnly: every client trains alone. The reference for what a federation gains, or costs, a
client.

    client k:  w_k <- w_k - lr * gradient of L_k, round after round

Batches, steps and stressors are those of every other method with the same seed, so that client by
client it is a paired comparison: what a client loses by taking part is *negative transfer*.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.methods.base import Method
from fl_lightning.wire import Limit, Payload


class LocalOnly(Method):
    """Clients keep their weights between rounds; nothing but n_k travels.

    A client starts from the initial weights, which follow from the seed, when it is first sampled.
    Where not all clients take part in every round, each trains in the rounds for which it was
    sampled.
    """

    kind = "references"
    stackable = True
    personalised = keeps_state = True
    refuses = {
        "received_terms": "its clients receive nothing",
        "secure_sum": "its clients send no weights that could be added",
        "attack": "its clients send their number of examples alone",
        "privacy": "nothing is learned from what its clients send",
        "server_optimizer": "nothing is averaged",
    }

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.first = {"weights": self.server.pop("weights")}

    def broadcast(self, client: Client) -> Payload:
        return Payload({})

    def receive(self, message: Payload, client: Client) -> None:
        self.layout.write(self.network, client.state.get("weights", self.first["weights"]))
        self.remember_received()

    def upload(self, client: Client) -> Payload:
        weights = self.layout.read(self.network)
        if not bool(torch.isfinite(weights).all()):
            return Payload({})  # it is rejected, and the client keeps what it had
        client.state["weights"] = weights
        return Payload({"examples": self.examples_of(client)})

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        return {"examples": ()}

    def check(self, upload: Payload, client: Client) -> None:
        upload.tensor("examples")

    def aggregate(self, uploads: Mapping[int, Payload]) -> None:
        """Do nothing: there is no common model."""

    def deploy(self, client: Client | None = None) -> nn.Module:
        state = {} if client is None else client.state
        self.layout.write(self.network, state.get("weights", self.first["weights"]))
        return self.network
