"""A workload with fl_lightning, everything on that a run has by default: MLflow, byte ledger,
checkpoints. No evaluation in between."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from typing import Any

# as the command sets it, before torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from torch import Tensor
from workload import WORKLOADS, Workload, now, parser, report, wait, weights

from fl_lightning.client import Client
from fl_lightning.data import FederatedData, Partition
from fl_lightning.hooks import Context, Meter
from fl_lightning.methods import FedAvg
from fl_lightning.tasks import LanguageModelling
from fl_lightning.trainer import FederatedTrainer


class EqualShards(Partition):
    def __call__(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        return np.split(np.arange(len(labels)), num_clients)


class Tensors(FederatedData):
    """The workload's tensors."""

    examplewise = True

    def __init__(self, work: Workload) -> None:
        super().__init__(
            dataset="workload",
            num_clients=work.clients,
            partition=EqualShards(),
            batch_size=work.batch,
            val_fraction=0.0,
        )
        self.work, self.num_classes, self.example_shape = work, work.classes, work.shape
        if work.tokens:
            self.task = LanguageModelling()

    def setup(self, stage: str | None = None) -> None:
        self.train_inputs, self.train_target = self.work.data()
        self.test_target = self.train_target[:100]

    def move(self, device: torch.device) -> None:
        super().move(device)
        self.train_inputs = self.train_inputs.to(device)

    def example_inputs(self) -> Tensor:
        return self.work.data()[0][:2]

    def inputs(self, split: Any, index: Tensor, draws: Tensor | None = None) -> Tensor:
        return self.train_inputs[index]


class Marks(Meter):
    """The clock at the start of every round, the weights before the first one, the steps of those
    who trained."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.steps = 0

    def on_setup(self, context: Context) -> None:
        self.before = weights(context.method.deploy())

    def on_round_start(self, round: int, context: Any) -> None:
        if round == 2:
            context.files.tracker.flush()  # opening the store, in a thread of its own, is start-up
        wait(context.data.device.type)
        self.clock.append(now())

    def on_client_end(self, client: Client, round: int, context: Context) -> None:
        self.steps += context.data.num_steps(client, context.data.work.epochs)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engine", default="auto", choices=("auto", "sequential", "batched"))
    arguments.add_argument(
        "--workers", default="auto", help="processes that train clients, or auto"
    )
    arguments.add_argument(
        "--cohort", type=int, help="so many clients, all in a round, to look at memory"
    )
    arguments.add_argument(
        "--torch_layout", action="store_true", help="networks in torch's own memory layout"
    )
    options = arguments.parse_args()
    work, marks = WORKLOADS[options.workload], Marks()
    if options.cohort:
        work = replace(work, clients=options.cohort, cohort=options.cohort)
    # the start of the last one is the end of the one before it
    rounds = 2 + (options.rounds or work.rounds)
    trainer = FederatedTrainer(
        accelerator=options.device, precision=options.precision, max_rounds=rounds, participation=work.cohort / work.clients, local_epochs=work.epochs,
        eval_every=10**6, callbacks=[marks], engine=options.engine, deterministic=False,
        workers="auto" if options.workers == "auto" else int(options.workers),
    )  # fmt: skip
    method = FedAvg(
        network=work.network,
        optimizer=partial(torch.optim.SGD, **work.sgd),
        channels_last=not options.torch_layout,
    )
    trainer.fit(method, Tensors(work))
    metadata = json.loads((trainer.run_dir / "metadata.json").read_text())
    report(
        marks.clock, steps=marks.steps, rounds=rounds, moved=weights(method.deploy()) - marks.before,
        packages=("timm", "fl_lightning", "lightning", "mlflow"), engine=metadata["engine"], commit=metadata["git"]["commit"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
