"""What one GPU makes of it: rounds of experiment 2, its whole suite, small steps, and the prices of quantisation and distillation.

python benchmarks/gpu.py [round suite steps prices] [--seconds 300] [--repeats 5] [--out gpu.json]
python benchmarks/gpu.py --device cpu --small --seconds 20          # the same code on a toy, to see that it runs

No figures of it exist yet: no GPU was at hand when it was written. All times are of whole rounds (orders, training, uploads decoded and
checked, aggregation), synchronised with the device; contenders take turns, A B A B, after ``WARM`` rounds each; the figure is the median.
Each part stops repeating after ``--seconds``. Recordings (CUDA graphs) are played steps of ``fl_lightning.engines.graphs``; what could
not be recorded is in the log.

  round   20 of 100 clients, E = 2, MobileNet-V2, FedMPQ-KD, synthetic images of CIFAR-100's shape; target: 1/8 of eager, sequential
  suite   5 methods x 3 seeds x 100 rounds from measured rounds, each with its evaluation; target: 30 minutes
  steps   1000 clients x 50 images, cohort 50, batch 10, CNN of two convolutions; target: 5000 SGD steps a second
  prices  FedMPQ-KD / FedMPQ (target 1.08) and FedMPQ / FedAvg, with the steps recorded and without
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from workload import TwoConvolutions

from fl_lightning import methods, models, rng
from fl_lightning.data import Dirichlet, FederatedData, FederatedImages, Partition
from fl_lightning.engines import BatchedEngine, SequentialEngine
from fl_lightning.engines.determinism import deterministic
from fl_lightning.engines.graphs import RecordedSteps
from fl_lightning.engines.recorders import CudaGraphs, Rerun
from fl_lightning.engines.steps import Steps
from fl_lightning.loop import Federation, run_round
from fl_lightning.methods import Method

WARM = 2
"""Rounds before the first that counts: libraries choose their kernels in them, and what turns up often is recorded."""
SUITE = ("FedAvg", "QFedAvg", "FedKD", "FedMPQ", "FedMPQKD")
SEEDS, ROUNDS = 3, 100
TARGETS = {"round": 1 / 8, "suite": 30.0, "steps": 5000.0, "prices": 1.08}


@dataclass
class Contender:
    """A federation that takes its turn; seconds and peak bytes of the rounds that count."""

    federation: Federation
    done: int = 0
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    peak: int = 0

    def turn(self, counts: bool) -> None:
        device = self.federation.fabric.device
        self.done += 1
        before = _start(device)
        started = perf_counter()
        record = run_round(self.federation, self.done)
        _wait(device)
        if counts:
            self.seconds.append(perf_counter() - started)
            self.steps.append(sum(_steps(self.federation, self.done)))
            self.peak = max(self.peak, _peak(device) - before)
        assert record.metrics["clients/trained"] > 0

    def result(self) -> dict[str, float]:
        middle = median(self.seconds)
        return {
            "seconds": middle, "rounds": len(self.seconds), "steps_per_second": sum(self.steps) / sum(self.seconds),
            "peak_mib": self.peak / 2**20,
        }  # fmt: skip


def compete(contenders: Mapping[str, Callable[[], Federation]], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """In turn, until ``--repeats`` rounds of each are timed or the time is up; at least one of each."""
    started, found = perf_counter(), {}
    for name, make in contenders.items():
        found[name] = Contender(make())
        for _ in range(WARM):
            found[name].turn(counts=False)
    for repeat in range(options.repeats):
        if repeat and perf_counter() - started > options.seconds:
            print(f"  stopped after {repeat} of {options.repeats} repeats: {options.seconds} s are up")
            break
        for contender in found.values():
            contender.turn(counts=True)
    return {name: contender.result() for name, contender in found.items()}


def federation(
    method: Callable[[], Method], data: FederatedData, options: argparse.Namespace, *, how: str = "recorded", precision: str = "32-true",
    participation: float = 0.2, epochs: int = 2, evaluate: bool = False, contiguous: bool = False,
) -> Federation:  # fmt: skip
    """Ready for its first round.

    Args:
        how: ``eager``, ``recorded`` or ``batched``.
        contiguous: the network's memory in torch's default order, not channels last.
    """
    fabric = Fabric(accelerator=options.device, devices=1, precision=precision)
    with ExitStack() as stack:
        if contiguous:
            stack.enter_context(patch.object(models, "lay_out", lambda network: network))
        stack.enter_context(rng.torch_stream(0, "weights"))
        built = method()
        built.build(data)
    built.to(fabric.device)
    if how == "batched":
        engine: Any = BatchedEngine(fabric, built, data)
    elif how == "eager":
        engine = SequentialEngine(fabric, built, data, Steps(fabric, built))
    else:
        recorder = CudaGraphs(fabric.device) if fabric.device.type == "cuda" else Rerun()
        engine = SequentialEngine(fabric, built, data, RecordedSteps(fabric, built, recorder))
    context: Any = SimpleNamespace(max_rounds=-1)
    every = 1 if evaluate else 10**9
    return Federation(fabric, built, data, engine, (), context, 0, participation, epochs, every)


def part_round(options: argparse.Namespace) -> dict[str, Any]:
    data, make = images(options), partial(federation, options=options)
    kd = method("FedMPQKD", options)
    contenders = {
        "eager": partial(make, kd, data, how="eager"),
        "recorded": partial(make, kd, data),
        "recorded, bf16": partial(make, kd, data, precision="bf16-mixed"),
        "recorded, contiguous": partial(make, kd, data, contiguous=True),
        "eager, bf16": partial(make, kd, data, how="eager", precision="bf16-mixed"),
        "batched": partial(make, kd, data, how="batched"),
    }
    found = compete(contenders, options)
    for result in found.values():
        result["ratio"] = result["seconds"] / found["eager"]["seconds"]
    return found


def part_suite(options: argparse.Namespace) -> dict[str, Any]:
    data = images(options, public_examples=50 if options.small else 5000)
    found: dict[str, Any] = compete(
        {name: partial(federation, method(name, options), data, options, evaluate=True) for name in SUITE}, options
    )
    seconds = sum(result["seconds"] for result in found.values()) * SEEDS * ROUNDS
    return {**found, f"{len(SUITE)} methods x {SEEDS} seeds x {ROUNDS} rounds": {"minutes": seconds / 60}}


def part_steps(options: argparse.Namespace) -> dict[str, Any]:
    clients, cohort = (20, 5) if options.small else (1000, 50)
    data = Shards(clients, 50, batch_size=10)
    data.setup()
    data.distribute(0, torch.device(options.device))
    sgd = partial(torch.optim.SGD, lr=0.1)
    make = partial(
        federation, partial(methods.FedAvg, network=TwoConvolutions, optimizer=sgd), data, options, participation=cohort / clients, epochs=1
    )  # fmt: skip
    ways = {
        "eager": {"how": "eager"},
        "recorded": {},
        "recorded, bf16": {"precision": "bf16-mixed"},
        "batched": {"how": "batched"},
    }
    return compete({name: partial(make, **settings) for name, settings in ways.items()}, options)


def part_prices(options: argparse.Namespace) -> dict[str, Any]:
    data, names = images(options), ("FedAvg", "FedMPQ", "FedMPQKD")
    found: dict[str, Any] = compete(
        {f"{name}, {how}": partial(federation, method(name, options), data, options, how=how)
         for how in ("recorded", "eager") for name in names}, options,
    )  # fmt: skip
    for how in ("recorded", "eager"):
        base, quantised, distilled = (found[f"{name}, {how}"]["seconds"] for name in names)
        found[f"price of quantisation, {how}"] = {"ratio": quantised / base}
        found[f"price of distillation, {how}"] = {"ratio": distilled / quantised}
    return found


def images(options: argparse.Namespace, **settings: Any) -> FederatedImages:
    """Experiment 2's federation on synthetic images of CIFAR-100's shape and number."""
    clients, examples, tests = (10, 400, 100) if options.small else (100, 50_000, 10_000)
    data = FederatedImages(
        dataset="synthetic", synthetic_classes=100, synthetic_examples=examples, synthetic_test_examples=tests, num_clients=clients,
        partition=Dirichlet(0.1, min_size=2), crop="shrink", flip=True, **settings,
    )  # fmt: skip
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device(options.device))
    return data


def method(name: str, options: argparse.Namespace) -> Callable[[], Method]:
    network = "small_cnn" if options.small else "mobilenetv2"
    return partial(
        getattr(methods, name), network=network, optimizer=partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.01, fused=True)
    )


class EqualShards(Partition):
    def __call__(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        return np.split(np.arange(len(labels)), num_clients)


class Shards(FederatedData):
    """Noise of the shape 3x32x32, ``examples`` a client: only the time matters."""

    num_classes, example_shape = 10, (3, 32, 32)

    def __init__(self, clients: int, examples: int, batch_size: int) -> None:
        super().__init__(dataset="noise", num_clients=clients, partition=EqualShards(), batch_size=batch_size, val_fraction=0.0)
        self.size = clients * examples

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.train_inputs = torch.randn(self.size, *self.example_shape, generator=generator)
        self.train_target = torch.randint(self.num_classes, (self.size,), generator=generator)
        self.test_target = self.train_target[:100]

    def move(self, device: torch.device) -> None:
        super().move(device)
        self.train_inputs = self.train_inputs.to(device)

    def inputs(self, split: Any, index: Tensor, draws: Tensor | None = None) -> Tensor:
        return self.train_inputs[index]


def _steps(fed: Federation, round: int) -> list[int]:
    """Local steps of the clients of a round."""
    ids = [entry.client for entry in fed.ledger.entries if entry.round == round]
    return [fed.data.num_steps(fed.data.client(id), fed.local_epochs) for id in ids]


def _start(device: torch.device) -> int:
    _wait(device)
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


PARTS = {"round": part_round, "suite": part_suite, "steps": part_steps, "prices": part_prices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=" ".join(PARTS))
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a part starts no further repeat")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds of each contender")
    parser.add_argument("--small", action="store_true", help="a toy federation: the figures mean nothing")
    parser.add_argument("--out", default="gpu.json", help="file of the figures")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"{unknown[0]}; the parts are {' '.join(PARTS)}; write some of them")
    logging.basicConfig(level=logging.INFO, format="  %(message)s")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda; there is none; write --device cpu --small to see that it runs")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    report: dict[str, Any] = {
        "device": name, "small": options.small, "versions": {n: version(n) for n in ("torch", "lightning", "timm")}, "targets": TARGETS,
    }  # fmt: skip
    with deterministic(True):  # as every run is by default
        for part in options.parts:
            print(f"{part} on {name}", flush=True)
            report[part] = PARTS[part](options)
            for who, figures in report[part].items():
                print(f"  {who:40}" + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)
            Path(options.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
