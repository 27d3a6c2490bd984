"""Centralised: all examples in one place. The reference for what it costs that they are not.

    server:    w <- w - lr * gradient of L over all clients' examples

A round has as many steps as its clients were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.methods.base import Method
from fl_lightning.methods.lit_module import end_steps
from fl_lightning.methods.local_work import check_steps
from fl_lightning.methods.optimizing import clip_gradients, round_optimizer
from fl_lightning.methods.terms import refuse_readers
from fl_lightning.metrics import Mean
from fl_lightning.wire import Limit, Payload


class Centralised(Method):
    """The server holds the training examples of every client and trains by itself; clients only say
    how many steps they were asked for.

    A round has as many steps as the clients that returned would have made, with the clients'
    optimiser, schedule, clipping and batch size, in full precision whatever ``trainer.precision``.
    Labels are those of the data: label noise, which stressors put on clients, does not reach it.
    """

    kind = "references"
    pools_examples = True
    refuses = {
        "received_terms": "its clients receive nothing",
        "secure_sum": "its clients send no weights that could be added",
        "attack": "its clients send numbers of examples and steps alone",
        "privacy": "its server holds the examples of all clients",
        "own_data": "its server trains on the examples of all clients, and nodes keep them",
        "server_optimizer": "its server trains by itself, and averages nothing",
    }

    def build(self, data: FederatedData) -> None:
        why = "its clients have no model of their own"
        refuse_readers(self.terms, ("previous_features",), "Centralised", why)
        super().build(data)
        self.all_data = data
        clients = [data.client(int(id)) for id in data.active]
        everything = np.sort(np.concatenate([client.train for client in clients]))
        self.everyone = Client(data.num_clients, everything, np.empty(0, np.int64))
        self.asked_steps = 0
        self.losses: dict[str, Mean] = {}
        self.losses_of = 0

    def broadcast(self, client: Client) -> Payload:
        return Payload({})

    def receive(self, message: Payload, client: Client) -> None:
        """Do nothing: clients do not train."""

    def local_batches(
        self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int
    ) -> Iterator[Any]:
        """Yield nothing, and remember how many steps were asked for."""
        self.asked_steps = steps
        yield from ()

    def upload(self, client: Client) -> Payload:
        return Payload(
            {
                "examples": self.examples_of(client),
                "steps": torch.tensor(self.asked_steps, dtype=torch.float32),
            }
        )

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        return {"examples": (), "steps": ()}

    def check(self, upload: Payload, client: Client) -> None:
        upload.tensor("examples")
        check_steps(upload, self.steps_asked.get(client.id))

    def aggregate(self, uploads: Mapping[int, Payload]) -> None:
        steps = sum(int(upload.tensor("steps")) for upload in uploads.values())
        data, everyone = self.all_data, self.everyone
        epochs = -(-steps // data.num_steps(everyone, 1))
        self.layout.write(self.network, self.server["weights"])
        self.unsent.restore()
        self.remember_received()
        self.start_terms(everyone, data.labels(everyone))
        self.train()
        self.losses, self.losses_of = {}, self.round
        optimizer = round_optimizer(self)
        batches = data.train_batches(everyone, round=self.round, epochs=epochs, steps=steps)
        with rng.torch_stream(self.seed, "dropout", self.round, everyone.id):
            for number, batch in enumerate(batches):
                outputs = self.training_step(batch, number)
                optimizer.zero_grad()
                outputs["loss"].backward()
                if self.gradient_clip_val is not None:
                    clip_gradients(optimizer, self.gradient_clip_val, self.gradient_clip_algorithm)
                optimizer.step()
                for name, value in outputs.items():
                    size = len(batch[1])
                    self.losses[name] = self.losses.get(name, Mean()) + Mean(
                        float(value.detach()) * size, size
                    )
        if steps:
            end_steps(self)
        self.server["weights"] = self.layout.to_wire(self.layout.read(self.network))

    def server_metrics(self) -> dict[str, float]:
        losses = self.losses if self.losses_of == self.round else {}  # void: without steps
        return super().server_metrics() | {
            f"train/{name}": mean.value for name, mean in losses.items()
        }
