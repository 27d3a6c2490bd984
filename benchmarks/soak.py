"""A long run and a large population: memory and time per round must not grow with either.

    python benchmarks/soak.py --rounds 1000                                    # small federation, 50 of 100 clients a round
    python benchmarks/soak.py --clients 100000 --cohort 50 --rounds 200        # 50 of 100 000

Prints start-up seconds, then resident memory (MiB) and milliseconds per round at the start and at the end of
the run, and the slope of memory by least squares over its second half. All times are the processor's: other
programs disturb it least.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning.data import FederatedData, Partition
from fl_lightning.hooks import Meter
from fl_lightning.methods import FedAvg
from fl_lightning.trainer import FederatedTrainer

WIDTH = 16


class Evenly(Partition):
    """Each client holds as many examples as any other."""

    def __call__(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        return np.array_split(np.arange(len(labels)), num_clients)


class Vectors(FederatedData):
    """Five 16-number examples per client; the sign of the first decides the class."""

    example_shape, num_classes = (WIDTH,), 2

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.examples = torch.randn(5 * self.num_clients, WIDTH, generator=generator)
        self.test_examples = torch.randn(500, WIDTH, generator=generator)
        self.train_target, self.test_target = (
            x[:, 0].gt(0).long() for x in (self.examples, self.test_examples)
        )

    def inputs(self, split: str, index: Tensor, draws: Tensor | None = None) -> Tensor:
        return (self.examples if split == "train" else self.test_examples)[index]


class Watch(Meter):
    """Resident memory and the clock at the start of every round."""

    def __init__(self) -> None:
        self.memory: list[float] = []
        self.clock: list[float] = []

    def on_round_start(self, round: int, context: object) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.memory.append(pages * 4096 / 2**20)
        self.clock.append(time.process_time())


def soak(clients: int, cohort: int, rounds: int, eval_every: int, val_fraction: float, logger: bool) -> str:
    torch.set_num_threads(1)
    watch, started = Watch(), time.process_time()
    data = Vectors(
        dataset="vectors", num_clients=clients, partition=Evenly(), batch_size=8, val_fraction=val_fraction
    )
    method = FedAvg(network=lambda classes: nn.Linear(WIDTH, classes), optimizer=partial(SGD, lr=0.1))
    with TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            accelerator="cpu", participation=cohort / clients, local_epochs=1, max_rounds=rounds, eval_every=eval_every,
            callbacks=[watch], logger=logger, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(method, data)
        checkpoint = sum(
            file.stat().st_size for file in trainer.run.checkpoints.glob(f"round_{rounds:06d}/*")
        )
    milliseconds, tenth = 1000 * np.diff(watch.clock), max(1, rounds // 10)
    half = np.arange(rounds // 2, rounds)
    slope = np.polyfit(half, np.array(watch.memory)[half], 1)[0] * 1000
    return (
        f"{clients} clients, {cohort} a round, {rounds} rounds: first round after {watch.clock[0] - started:.1f} s; memory "
        f"{watch.memory[0]:.0f} MiB before round 1, {watch.memory[tenth]:.1f} at {tenth}, {watch.memory[-1]:.1f} at the end "
        f"({slope:+.2f} per 1000 rounds over the second half); median round {np.median(milliseconds[:tenth]):.1f} ms at first, "
        f"{np.median(milliseconds[-tenth:]):.1f} ms at last; last checkpoint {checkpoint} bytes\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--eval_every", type=int, default=1)
    parser.add_argument("--val_fraction", type=float, default=0.2)
    parser.add_argument("--mlflow", action="store_true", help="track in ./mlflow.db")
    given = parser.parse_args()
    sys.stdout.write(
        soak(given.clients, given.cohort, given.rounds, given.eval_every, given.val_fraction, given.mlflow)
    )
