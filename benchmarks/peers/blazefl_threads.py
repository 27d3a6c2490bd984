"""A workload in BlazeFL: its ``FedAvgThreadPoolClientTrainer`` with a thread for each core, which
free-threaded Python needs to run side by side; without evaluation.

Its FedAvg has SGD without momentum, so its training loop stands here again, with the workload's
settings.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # a thread is a client's, before torch is imported

import sys
from enum import StrEnum

import torch
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
from blazefl.contrib.fedavg import FedAvgUplinkPackage
from blazefl.core import deserialize_model, serialize_model
from torch import nn
from workload import WORKLOADS, Workload, now, parser, report, weights


class Name(StrEnum):
    """The one network."""

    WORKLOAD = "WORKLOAD"


class Networks:
    """What BlazeFL asks of a ``ModelSelector``; it makes a network anew for each client of each
    round."""

    def __init__(self, work: Workload, channels_last: bool) -> None:
        self.work, self.channels_last = work, channels_last

    def select_model(self, model_name: str) -> nn.Module:
        with torch.random.fork_rng([]):
            return self.work.build(self.channels_last)


class Batches:
    """What BlazeFL asks of a ``DataLoader``: a new order each time, batches that are slices of
    tensors."""

    def __init__(
        self, inputs: torch.Tensor, target: torch.Tensor, batch: int, generator: torch.Generator
    ):
        self.inputs, self.target, self.batch, self.generator = inputs, target, batch, generator

    def __iter__(self):
        for index in torch.randperm(len(self.target), generator=self.generator).split(self.batch):
            yield self.inputs[index], self.target[index]


class Dataset:
    """What BlazeFL asks of a ``PartitionedDataset``: each client's tensors in memory."""

    def __init__(self, work: Workload) -> None:
        self.inputs, self.target = (tensor.split(work.examples) for tensor in work.data())

    def get_dataloader(self, type_, cid, batch_size, generator=None) -> Batches:
        return Batches(self.inputs[cid], self.target[cid], batch_size, generator)


class Trainer(FedAvgThreadPoolClientTrainer):
    """BlazeFL's own with the workload's SGD, without its progress bar."""

    sgd: dict[str, float]

    def progress_fn(self, it):
        return it

    def train(
        self, model, model_parameters, train_loader, device, epochs, lr, stop_event, cid
    ) -> FedAvgUplinkPackage:
        deserialize_model(model, model_parameters)
        model.train()
        optimizer, steps, examples = torch.optim.SGD(model.parameters(), **self.sgd), 0, 0
        for _ in range(epochs):
            for data, target in train_loader:
                loss = nn.functional.cross_entropy(model(data), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps, examples = steps + 1, examples + len(target)
        return FedAvgUplinkPackage(cid, serialize_model(model), examples, {"steps": steps})


def main() -> None:
    options = parser(__doc__).parse_args()
    work, threads = WORKLOADS[options.workload], os.cpu_count() or 1
    networks, data = Networks(work, options.channels_last), Dataset(work)
    rounds = 1 + (options.rounds or work.rounds)
    federation = {"num_clients": work.clients, "batch_size": work.batch, "device": "cpu", "seed": 0}
    handler = FedAvgBaseServerHandler(
        networks, Name.WORKLOAD, data, global_round=rounds, sample_ratio=work.cohort / work.clients, **federation
    )  # fmt: skip
    trainer = Trainer(
        networks, Name.WORKLOAD, data, epochs=work.epochs, lr=work.sgd["lr"], num_parallels=threads, **federation
    )  # fmt: skip
    trainer.sgd = work.sgd
    before, steps, marks = weights(handler.model), 0, [now()]
    for _ in range(rounds):
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            steps += package.metadata["steps"]
            handler.load(package)
        marks.append(now())
    report(
        marks, steps=steps, rounds=rounds, moved=weights(handler.model) - before, packages=("timm", "blazefl"),
        gil=getattr(sys, "_is_gil_enabled", lambda: True)(), processes=1,
    )  # fmt: skip


if __name__ == "__main__":
    main()
