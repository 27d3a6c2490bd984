"""The contract of a method. Its defaults are FedAvg (McMahan et al., AISTATS 2017).

A method is a LightningModule with two halves. The client's half: ``receive`` makes the module's parameters and buffers what this
client starts from, ``training_step`` is the local objective, ``upload`` says what goes back. The server's half: ``broadcast``,
``aggregate``, ``deploy``, and ``server``, the tensors that the server remembers. One resident module serves all clients of a process
in turn, so after ``receive`` nothing of another client may be left; what a client keeps lives in ``client.state``.

Tensors in ``server`` and in ``client.state`` are replaced, never written into: checkpoints and roll-backs hold on to the old ones.

``training_step`` has no ``.item()``, no branch on values and no metric object, so that the batched engine can run it under
``torch.func.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.methods.averaging import WEIGHTED_MEAN, Average
from fl_lightning.models import build_network
from fl_lightning.wire import Layout, Payload

OptimizerCallable = Callable[[Iterable], Optimizer]
NetworkCallable = Callable[[int], nn.Module]


class Method(LightningModule):
    """Base of all methods; what is not overridden is FedAvg.

    Args:
        network: name of a network (``small_cnn``, ``resnet20``, ``mobilenetv2``, ``vit_small``, any timm model), or a class whose first
            argument is the number of classes.
        optimizer: the clients' local optimiser, built anew for each client and round. Default: SGD, lr 0.05, momentum 0.9.
        average: how the server averages its clients' weights: ``WeightedMean``, or one that survives hostile clients:
            ``CoordinateMedian``, ``TrimmedMean``, ``NormClipping``.
    """

    personalised: bool = False
    """True when each client has a model of its own to evaluate."""

    logits: bool = True
    """Whether the network gives one logit for each class of the data, ``[B, num_classes]``. A method whose ``task_loss`` takes outputs of
    another width says False."""

    growing: frozenset[str] = frozenset()
    """Tensors of ``server`` with a row for each client heard of; the others keep the shape that ``build`` gave them."""

    stackable: bool = False
    """Whether many clients can be trained as one stack: ``training_step`` and ``on_train_batch_end`` read parameters, buffers and plain
    values, and set tensors only. It holds for the class that says so and not for its subclasses."""

    seed: int = 0
    round: int = 0

    def __init__(
        self,
        network: NetworkCallable | str = "small_cnn",
        optimizer: OptimizerCallable | None = None,
        average: Average = WEIGHTED_MEAN,
    ) -> None:
        super().__init__()
        self.network_spec = network
        self.optimizer_spec = optimizer
        self.average = average
        self.server: dict[str, Tensor] = {}

    # Both halves

    def build(self, data: FederatedData) -> None:
        """Make the network for this data and the server's first state. Initial weights come from torch's generators as they stand."""
        self.network = build_network(self.network_spec, data.num_classes, data.example_shape, logits=self.logits)
        self.layout = Layout.of(self.network)
        self.server = {"weights": self.layout.read(self.network)}

    def stream(self, purpose: str, client: Client | None = None) -> np.random.Generator:
        """The method's own randomness, for this round and client."""
        return rng.stream(self.seed, purpose, self.round, -1 if client is None else client.id)

    # The client's half

    def receive(self, message: Payload, client: Client) -> None:
        """Set every parameter and buffer that training reads or writes from ``message`` and ``client.state``, and nothing else."""
        self.layout.write(self.network, message.tensor("weights"))

    def local_batches(self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int) -> Iterator[Any]:
        """The batches of this client's round, at most ``steps`` of its own data."""
        return data.train_batches(client, round=self.round, epochs=epochs, labels=labels, steps=steps)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """The local objective: ``loss``, and each term by its metric name (``loss_task``, ...)."""
        inputs, target = batch
        loss = self.task_loss(self.network(inputs), target)
        return {"loss": loss, "loss_task": loss}

    def task_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """L_task of outputs ``[B, C]`` and target int64 ``[B]``, mean over the batch."""
        return F.cross_entropy(outputs, target)

    def configure_optimizers(self) -> Optimizer:
        trainable = self.trainable()
        return self.optimizer_spec(trainable) if self.optimizer_spec else SGD(trainable, lr=0.05, momentum=0.9)

    def trainable(self) -> Iterable[nn.Parameter]:
        """What the local optimiser steps on. Override where the module holds parameters of clients other than this one's kind."""
        return [p for p in self.parameters() if p.requires_grad]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After each optimiser step: projections, teacher refreshes."""

    def upload(self, client: Client) -> Payload:
        """What the client sends. ``examples`` is its weight n_k."""
        return Payload({"examples": examples_of(client), "weights": self.layout.read(self.network)})

    # The server's half; it sees decoded payloads and nothing else of a client

    def broadcast(self, client: Client) -> Payload:
        """What this client is sent at the start of the round."""
        return Payload({"weights": self.server["weights"]})

    def check(self, upload: Payload, client: Client) -> None:
        """Refuse an upload that must not be averaged.

        Raises:
            PayloadError: an entry that is missing or of the wrong size. (The loop has refused what is not finite, not float32,
                and ``examples`` that are not one positive integer.)
        """
        upload.tensor("examples")
        self.layout.check(self.decode(upload))

    def decode(self, upload: Payload) -> Tensor:
        """What this client's weights are after its round, as one vector of ``layout``; the server still has those that it broadcast.

        Raises:
            PayloadError: an entry that is missing or of the wrong size.
        """
        return upload.tensor("weights")

    def aggregate(self, uploads: Mapping[int, Payload]) -> None:
        """Make the next server state from what came back: client id -> payload, in cohort order, never empty."""
        vectors = [self.decode(upload) for upload in uploads.values()]
        self.server["weights"] = self.average(vectors, shares(uploads.values()), self.server["weights"])

    def server_metrics(self) -> dict[str, float]:
        """What the server knows of its own state, logged once a round."""
        return {"bits/average": 32.0}

    def deploy(self, client: Client | None = None) -> nn.Module:
        """The network that is evaluated, images to logits: the global one, or this client's when the method is personalised.

        That one is put together by the client, so it may read ``client.state``; no other half of the server may.
        """
        self.layout.write(self.network, self.server["weights"])
        return self.network

    def full_precision(self) -> nn.Module | None:
        """What ``deploy`` quantises, before it does, as a network of its own; None where it quantises nothing."""
        return None


def is_stackable(method: Method) -> bool:
    """Whether the method's own class says so; what a subclass adds may not be, and nobody can tell from outside."""
    return vars(method).get("stackable", vars(type(method)).get("stackable", False))


def examples_of(client: Client) -> Tensor:
    """n_k as it travels."""
    return torch.tensor(len(client.train), dtype=torch.int32)


def shares(uploads: Iterable[Payload]) -> list[float]:
    """n_k / sum n_k over the clients that returned."""
    examples = [int(upload.tensor("examples")) for upload in uploads]
    return [n / sum(examples) for n in examples]
