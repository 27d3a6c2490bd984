"""What one GPU makes of it: rounds of experiment 2, its whole suite, small steps, the prices of quantisation
and distillation, seats.

python benchmarks/gpu.py [round suite steps prices seats] [--seconds 300] [--repeats 5] [--out gpu.json]
python benchmarks/gpu.py --device cpu --small --seconds 20          # the same code on a toy, to see that it runs

No figures of it exist yet: no GPU was at hand when it was written. All times are of whole rounds (orders,
training, uploads decoded and checked, aggregation), synchronised with the device; contenders take turns, A B
A B, after ``turns.WARM`` rounds each; the figure is the median. Each part stops repeating after
``--seconds``. Recordings (CUDA graphs) are played steps of ``fl_lightning.engines.cuda.graphs``; what could
not be recorded is in the log.

  round   20 of 100 clients, E = 2, MobileNet-V2, FedMPQ-KD, synthetic images of CIFAR-100's shape; target: 1/8 of eager, sequential
  suite   5 methods x 3 seeds x 100 rounds from measured rounds, each with its evaluation; target: 30 minutes
  steps   1000 clients x 50 images, cohort 50, batch 10, CNN of two convolutions; target: 5000 SGD steps a second
  prices  FedMPQ-KD / FedMPQ (target 1.08) and FedMPQ / FedAvg, with the steps recorded and without
  seats   the round, and the cohort of steps, with 1, 2, 4 and 8 clients at once (--trainer.workers), each on a stream; ratio: to 1
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from turns import compete
from workload import TwoConvolutions

from fl_lightning import methods, models, rng
from fl_lightning.data import Dirichlet, FederatedData, FederatedImages, Partition
from fl_lightning.engines import BatchedEngine, Engine, SequentialEngine
from fl_lightning.engines.cuda.graphs import RecordedSteps
from fl_lightning.engines.cuda.recorders import CudaGraphs, Rerun
from fl_lightning.engines.cuda.seats import SeatsEngine
from fl_lightning.engines.determinism import deterministic
from fl_lightning.engines.steps import Steps
from fl_lightning.loop import Federation
from fl_lightning.methods import Method

SUITE = ("FedAvg", "QFedAvg", "FedKD", "FedMPQ", "FedMPQKD")
SEEDS, ROUNDS = 3, 100
SEATS = (1, 2, 4, 8)
TARGETS = {"round": 1 / 8, "suite": 30.0, "steps": 5000.0, "prices": 1.08}


def federation(
    method: Callable[[], Method], data: FederatedData, options: argparse.Namespace, *, how: str = "recorded", precision: str = "32-true",
    participation: float = 0.2, epochs: int = 2, evaluate: bool = False, contiguous: bool = False, seats: int = 1,
) -> tuple[Federation, Engine]:  # fmt: skip
    """A federation that is ready for its first round, and its engine.

    Args:
        how: ``eager``, ``recorded`` or ``batched``.
        contiguous: the network's memory in torch's default order, not channels last.
        seats: clients at once; not for ``batched``.
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
    else:
        make_steps = Steps if how == "eager" else recorded
        if seats > 1:
            engine = SeatsEngine(fabric, built, data, seats, make_steps=make_steps)
        else:
            engine = SequentialEngine(fabric, built, data, make_steps(fabric, built))
    engine.start()
    every = 1 if evaluate else 10**9
    return Federation(fabric, built, data, (), 0, -1, participation, epochs, every), engine


def recorded(fabric: Fabric, method: Method) -> Steps:
    return RecordedSteps(
        fabric, method, CudaGraphs(fabric.device) if fabric.device.type == "cuda" else Rerun()
    )


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
        {name: partial(federation, method(name, options), data, options, evaluate=True) for name in SUITE},
        options,
    )
    seconds = sum(result["seconds"] for result in found.values()) * SEEDS * ROUNDS
    return {**found, f"{len(SUITE)} methods x {SEEDS} seeds x {ROUNDS} rounds": {"minutes": seconds / 60}}


def part_steps(options: argparse.Namespace) -> dict[str, Any]:
    make = small_steps(options)
    ways = {
        "eager": {"how": "eager"},
        "recorded": {},
        "recorded, bf16": {"precision": "bf16-mixed"},
        "batched": {"how": "batched"},
    }
    return compete({name: partial(make, **settings) for name, settings in ways.items()}, options)


def small_steps(options: argparse.Namespace) -> Callable[..., tuple[Federation, Engine]]:
    clients, cohort = (20, 5) if options.small else (1000, 50)
    data = Shards(clients, 50, batch_size=10)
    data.setup()
    data.distribute(0, torch.device(options.device))
    built = partial(methods.FedAvg, network=TwoConvolutions, optimizer=partial(torch.optim.SGD, lr=0.1))
    return partial(federation, built, data, options, participation=cohort / clients, epochs=1)


def part_seats(options: argparse.Namespace) -> dict[str, Any]:
    """Eager steps too: what cannot be recorded is bound by the one thread that asks for it, and should gain
    nothing."""
    whole = partial(federation, method("FedMPQKD", options), images(options), options)
    found: dict[str, Any] = {}
    numbers = SEATS[:2] if options.small else SEATS
    for name, make in (("round", whole), ("steps", small_steps(options))):
        for how in ("recorded", "eager"):
            some = compete(
                {f"{name}, {how}, {n} seats": partial(make, how=how, seats=n) for n in numbers}, options
            )
            one = next(iter(some.values()))["seconds"]
            found |= {
                contender: {**result, "ratio": result["seconds"] / one} for contender, result in some.items()
            }
    return found


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
        getattr(methods, name),
        network=network,
        optimizer=partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.01, fused=True),
    )


class EqualShards(Partition):
    def __call__(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        return np.split(np.arange(len(labels)), num_clients)


class Shards(FederatedData):
    """Noise of the shape 3x32x32, ``examples`` a client: only the time matters."""

    num_classes, example_shape = 10, (3, 32, 32)

    def __init__(self, clients: int, examples: int, batch_size: int) -> None:
        super().__init__(
            dataset="noise",
            num_clients=clients,
            partition=EqualShards(),
            batch_size=batch_size,
            val_fraction=0.0,
        )
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


PARTS = {
    "round": part_round,
    "suite": part_suite,
    "steps": part_steps,
    "prices": part_prices,
    "seats": part_seats,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=" ".join(PARTS))
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="after which a part starts no further repeat"
    )
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
                print(
                    f"  {who:40}" + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()),
                    flush=True,
                )
            Path(options.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
