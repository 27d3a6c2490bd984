"""Public workloads: fl_lightning against a plain loop (sequential clients, tensors in memory), in turn, A B A B.

python benchmarks/workloads.py [W1 W2 W3 W4] [--repeats 3] [--engines auto sequential] [--workers 2]

Each measurement is a process of its own and gives the mean seconds of a round after the first; the figure is the median of the
repeats, the ratio that of the medians. Ours runs with MLflow, the byte ledger and checkpoints on; the plain loop has none of them.
Neither evaluates in between.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """Clients x examples each, cohort, batch, local epochs, network, and the local SGD's settings."""

    clients: int
    examples: int
    shape: tuple[int, ...]
    classes: int
    cohort: int
    batch: int
    epochs: int
    network: Callable[[int], nn.Module] | str
    sgd: dict[str, float]
    rounds: int


class TwoConvolutions(nn.Sequential):
    """The CNN of Reddi et al. (2021) for 32x32 colour images, without dropout: 1.6 M weights."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, num_classes),
        )  # fmt: skip


class OneHidden(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, num_classes))


WORKLOADS = {
    "W1": Workload(100, 50, (3, 32, 32), 10, 10, 10, 1, TwoConvolutions, {"lr": 0.1}, 12),
    "W2": Workload(10, 500, (3, 32, 32), 10, 10, 64, 1, "resnet20", {"lr": 0.1, "momentum": 0.9}, 4),
    "W3": Workload(100, 500, (3, 28, 28), 100, 8, 64, 2, "mobilenetv2", {"lr": 0.05, "momentum": 0.9}, 3),
    "W4": Workload(1000, 20, (64,), 10, 200, 20, 1, OneHidden, {"lr": 0.1}, 20),
}


def examples(work: Workload) -> tuple[Tensor, Tensor]:
    """Every client's examples, one after another: noise of the true shape, since only the time matters."""
    generator = torch.Generator().manual_seed(0)
    size = work.clients * work.examples
    return torch.randn(size, *work.shape, generator=generator), torch.randint(work.classes, (size,), generator=generator)


def plain(work: Workload, rounds: int) -> float:
    """Seconds a round of the loop that one would write by hand."""
    from fl_lightning.models import build_network

    inputs, target = examples(work)
    torch.manual_seed(0)
    model = build_network(work.network, work.classes, work.shape)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rng = np.random.default_rng(0)
    starts = []
    for _ in range(rounds + 1):
        starts.append(perf_counter())
        total = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in state.items()}
        for client in rng.choice(work.clients, work.cohort, replace=False):
            model.load_state_dict(state)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), **work.sgd)
            for _ in range(work.epochs):
                order = torch.from_numpy(rng.permutation(work.examples)) + int(client) * work.examples
                for index in order.split(work.batch):
                    loss = nn.functional.cross_entropy(model(inputs[index]), target[index])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            for name, value in model.state_dict().items():
                total[name] += value / work.cohort
        state = {name: value.to(state[name].dtype) for name, value in total.items()}
    return (starts[-1] - starts[1]) / (len(starts) - 2)


def ours(work: Workload, rounds: int, engine: str, workers: str) -> float:
    """Seconds a round of fl_lightning, with everything on that a run has by default."""
    from fl_lightning.data import FederatedData, Partition
    from fl_lightning.hooks import Context, Meter
    from fl_lightning.methods import FedAvg
    from fl_lightning.trainer import FederatedTrainer

    class EqualShards(Partition):
        def __call__(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
            return np.split(np.arange(len(labels)), num_clients)

    class Tensors(FederatedData):
        num_classes, example_shape = work.classes, work.shape

        def setup(self, stage: str | None = None) -> None:
            self.train_inputs, self.train_target = examples(work)
            self.test_target = self.train_target[:100]

        def inputs(self, split: Any, index: Tensor, draws: Tensor | None = None) -> Tensor:
            return self.train_inputs[index]

    class Starts(Meter):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_round_start(self, round: int, context: Context) -> None:
            self.seconds.append(perf_counter())

    starts = Starts()
    data = Tensors(dataset="workload", num_clients=work.clients, partition=EqualShards(), batch_size=work.batch, val_fraction=0.0)
    more = {} if workers == "auto" else {"workers": int(workers)}
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=rounds + 1, participation=work.cohort / work.clients, local_epochs=work.epochs,
        eval_every=10**6, callbacks=[starts], engine=engine, deterministic=False, **more,
    )  # fmt: skip
    trainer.fit(FedAvg(network=work.network, optimizer=partial(torch.optim.SGD, **work.sgd)), data)
    return (starts.seconds[-1] - starts.seconds[1]) / (len(starts.seconds) - 2)


def measure(name: str, who: str, rounds: int, workers: str) -> dict[str, float]:
    """In a process of its own, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(__file__), name, "--one", who, "--rounds", str(rounds), "--workers", workers]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{name} {who} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help="W1 W2 W3 W4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0, help="rounds that are timed; 0: the workload's own number")
    parser.add_argument("--engines", nargs="+", default=["auto"], help="auto, sequential, batched")
    parser.add_argument("--workers", default="auto", help="processes of ours")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        work = WORKLOADS[options.workloads[0]]
        rounds = options.rounds or work.rounds
        seconds = plain(work, rounds) if options.one == "plain" else ours(work, rounds, options.one, options.workers)
        peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        print(json.dumps({"seconds": seconds, "peak_mib": peak / 1024}))
        return
    print(f"{'workload':10}{'who':14}{'ms a round':>12}{'ratio':>8}{'peak MiB':>10}")
    for name in options.workloads:
        runs: dict[str, list[dict[str, float]]] = {who: [] for who in ("plain", *options.engines)}
        for _ in range(options.repeats):
            for who, found in runs.items():
                found.append(measure(name, who, options.rounds or WORKLOADS[name].rounds, options.workers))
        base = median(run["seconds"] for run in runs["plain"])
        for who, found in runs.items():
            seconds = median(run["seconds"] for run in found)
            peak = max(run["peak_mib"] for run in found)
            print(f"{name:10}{who:14}{1e3 * seconds:12.1f}{seconds / base:8.2f}{peak:10.0f}", flush=True)


if __name__ == "__main__":
    main()
