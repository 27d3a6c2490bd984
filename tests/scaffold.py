"""SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1 with option II), as a user of the library would write
it."""

from functools import partial

import torch
from torch.optim import SGD

from fl_lightning.methods import Method
from fl_lightning.wire import Layout, Payload


class Scaffold(Method):
    """Local steps along g - c_i + c, so that clients do not drift; for local optimisers without momentum.

    python -m fl_lightning fit --config configs/fedavg.yaml --model scaffold.Scaffold
    --model.optimizer.momentum 0
    """

    stackable = True
    uniform_clients = True
    control_variates = True
    scales_with_federation = True

    def build(self, data):
        super().build(data)
        self.optimizer_spec = self.optimizer_spec or partial(SGD, lr=0.05)
        if any(group.get("momentum") for group in self.configure_optimizers().param_groups):
            raise ValueError(
                "--model Scaffold; (x - y) / (K lr) is no mean gradient with momentum; write "
                "--model.optimizer.momentum 0"
            )
        names = {name for name, parameter in self.network.named_parameters() if parameter.requires_grad}
        self.trained = Layout.of(self.network, include=names.__contains__)
        self.num_clients = data.num_clients
        self.server["c"] = torch.zeros(self.trained.size)
        for name in ("start", "c", "c_i", "correction"):
            self.register_buffer(name, self.server["c"], persistent=False)

    def broadcast(self, client):
        return Payload({"weights": self.server["weights"], "c": self.server["c"]})

    def receive(self, message, client):
        super().receive(message, client)
        self.start, self.c = self.trained.read(self.network), message.tensor("c")
        self.c_i = client.state.get("c_i", torch.zeros_like(self.c))
        self.correction = (self.c - self.c_i).to(self.device)

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        parameters = dict(self.network.named_parameters())
        pull = sum(
            (parameters[name] * part).sum() for name, part in self.trained.unpack(self.correction).items()
        )
        return {**outputs, "loss": outputs["loss"] + pull}

    def upload(self, client):
        new = (
            self.c_i
            - self.c
            + (self.start - self.trained.read(self.network)) / (self.local_steps * self.local_lr)
        )
        if new.isfinite().all():
            client.state["c_i"] = new
        return Payload({**super().upload(client), "change": new - self.c_i})

    def check(self, upload, client):
        super().check(upload, client)
        self.trained.check(upload.tensor("change"))

    def aggregate(self, uploads):
        weights = [upload.tensor("weights") for upload in uploads.values()]
        self.server["weights"] = self.average(
            weights, [1 / len(weights)] * len(weights), self.server["weights"]
        )
        changes = torch.stack([upload.tensor("change") for upload in uploads.values()])
        self.server["c"] = self.server["c"] + changes.sum(0) / self.num_clients
