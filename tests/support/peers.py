"""Nodes whose clients do no local steps, so that a round is nothing but an exchange."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn
from toy import Points, trainer_in

from fl_lightning.aggregation.average import Average
from fl_lightning.aggregation.averages import WeightedMean
from fl_lightning.aggregation.base import Receipt, Round
from fl_lightning.aggregation.client_weights import Weighing
from fl_lightning.methods import FedAvg
from fl_lightning.topology import Topology
from fl_lightning.wire import LedgerEntry, Payload


class Vector(nn.Module):
    """As many weights as one likes."""

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.classes = classes

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.new_zeros(len(inputs), self.classes) + self.weight.sum()


class Exchange:
    """Nodes with a vector each.

    Args:
        topology: who talks to whom.
        vectors: where the nodes begin, ``[n, P]``.
        examples: n_k of the clients, by which they weigh; by default they are the nodes, and weigh
            alike.
        seed: of the run.
        average: the method's.
    """

    def __init__(
        self,
        topology: Topology,
        vectors: Tensor,
        examples: tuple[int, ...] = (),
        seed: int = 0,
        average: Average | None = None,
    ) -> None:
        size = vectors.shape[1]
        weigh_by: Weighing = "examples" if examples else "clients"
        network, average = partial(Vector, size=size), average or WeightedMean()
        method = FedAvg(network=network, weigh_by=weigh_by, average=average)
        self.examples = examples or (1,) * len(vectors)
        count = len(self.examples)
        data = Points(self.examples, labels=(0,) * count)
        trainer = trainer_in("nothing is written", topology=topology)
        self.fed = trainer.prepare(method, data, seed=seed)
        self.method, self.way, self.round = method, self.fed.aggregation, 0
        method.cohort = count
        self.start(vectors)

    def start(self, vectors: Tensor) -> None:
        """Let the nodes have these vectors."""
        states = {id: {"weights": vector.clone()} for id, vector in enumerate(vectors)}
        self.way.nodes.put({"weights": vectors.double().mean(0).float()}, states)

    @property
    def vectors(self) -> Tensor:
        """``[n, P]``."""
        return torch.stack([self.way.nodes.get(id, "weights") for id in self.way.nodes.ids])

    def exchange(
        self,
        away: Collection[int] = (),
        lost: Collection[int] = (),
        local: Tensor | None = None,
    ) -> tuple[dict[str, float], list[LedgerEntry]]:
        """Make a round, and return its metrics and entries.

        Args:
            away: who never begins.
            lost: whose uploads are lost.
            local: what clients send in place of what they have, ``[K, P]``.
        """
        self.round += 1
        receipts, uploads, nodes = [], {}, self.way.nodes
        for id, examples in enumerate(self.examples):
            weights = local[id] if local is not None else nodes.get(self.way.node_of(id), "weights")
            upload = Payload(
                {"examples": torch.tensor(examples, dtype=torch.int32), "weights": weights}
            )
            client, entry = self.fed.data.client(id), LedgerEntry(self.round, id, "dropped")
            if id not in away:
                status, wasted = ("lost", upload.nbytes) if id in lost else ("trained", 0)
                entry = LedgerEntry(self.round, id, status, 0, upload.nbytes, wasted)
            if id not in away and id not in lost:
                uploads[id] = upload
            receipts.append(Receipt(client, entry))
        closing = Round(self.round, [], lambda client, sent: sent, lambda asked: None)
        entries = self.way.close(closing, uploads, receipts)
        return closing.metrics, [*entries, *closing.links]


def spread(vectors: Tensor) -> float:
    """Return the mean over peers of ||x_i - mean||^2, in float64."""
    vectors = vectors.double()
    return float((vectors - vectors.mean(0)).square().sum(1).mean())


def normal(count: int, size: int = 50, seed: int = 0) -> Tensor:
    """Return standard normal vectors ``[n, P]``."""
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
