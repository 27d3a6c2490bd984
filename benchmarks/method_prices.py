"""What a round of each method costs, as a multiple of FedAvg's.

    python benchmarks/method_prices.py [--network mobilenetv2] [--clients 4] [--examples 256]
        [--repeats 2]

Whole rounds of the trainer, clients and server, in one process and one thread, without evaluation.
Each method takes turns with FedAvg; of each turn the first round warms up. What counts is the
processor's time of the process in its fastest round, since other work on the machine only adds to
it: some percent even then, so compare on an idle one. The limits are those that a method may cost:
what differs on the server or in what stays on a client is nearly free, and each further pass of a
step costs what a pass costs.
"""

from __future__ import annotations

import argparse
import gc
import logging
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

from torch.optim import SGD

from fl_lightning import methods
from fl_lightning.data import IID, FederatedImages
from fl_lightning.hooks import Context, Meter, RoundRecord
from fl_lightning.methods import FedAvg, Method
from fl_lightning.trainer import FederatedTrainer

SERVER, STATE, TWO_PASSES = 1.05, 1.15, 2.1
"""Limits of what differs on the server or in what travels, of one vector that clients keep and read
in each step, and of sharpness-aware steps."""
BOTH = 0.15
"""What such a vector may cost on top of SCAFFOLD's or of sharpness-aware steps."""
METHODS: dict[str, tuple[Callable[..., Method], float | None]] = {
    "FedAvg": (FedAvg, None),
    **{
        name: (getattr(methods, name), SERVER)
        for name in ("FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "FedExP")
    },
    **{
        f"FedAvg, {name}": (partial(FedAvg, average=average), SERVER)
        for name, average in {
            "CoordinateMedian": methods.CoordinateMedian(),
            "TrimmedMean(0.25)": methods.TrimmedMean(0.25),
            "Krum(0)": methods.Krum(0),
            "MultiKrum(0, 4)": methods.MultiKrum(0, 4),
            "Bulyan(0)": methods.Bulyan(0),
            "GeometricMedian": methods.GeometricMedian(),
            "CenteredClipping(1)": methods.CenteredClipping(1.0),
        }.items()
    },
    **{
        name: (partial(getattr(methods, name), optimizer=partial(SGD, lr=0.01)), STATE)
        for name in ("FedProx", "FedACG", "SCAFFOLD", "FedDyn", "FedCM", "FedNova", "FedLC")
    },
    **{
        name: (partial(getattr(methods, name), optimizer=partial(SGD, lr=0.01)), limit)
        for name, limit in {
            "FedDC": round(STATE + BOTH, 2),
            "FedSAM": TWO_PASSES,
            "MoFedSAM": TWO_PASSES + BOTH,
            "FedSpeed": TWO_PASSES + BOTH,
        }.items()
    },
    **{
        name: (getattr(methods, name), SERVER)
        for name in ("FineTune", "FedPer", "FedBN", "LGFedAvg")
    },
    "MOON": (methods.MOON, 2.2),  # two more forward passes
    "FedRoD": (methods.FedRoD, STATE),
    **{
        name: (partial(getattr(methods, name), optimizer=partial(SGD, lr=0.01)), limit)
        for name, limit in {"Ditto": 2.2, "FedALA": 1.5, "FedProto": 1.3}.items()
    },
}


class RoundTimes(Meter):
    """Keeps the processor's time between the ends of rounds."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        self.ends.append(process_time())


def round_times(
    make: Callable[..., Method], data: FederatedImages, options: argparse.Namespace
) -> list[float]:
    """Return the seconds of the rounds between the first, which warms up, and the last, which is
    evaluated."""
    times = RoundTimes()
    settings: dict[str, Any] = {"network": options.network}
    if make is FedAvg or not isinstance(make, partial) or "optimizer" not in make.keywords:
        settings["optimizer"] = partial(SGD, lr=0.01, momentum=0.9)
    with TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=4, participation=1.0, local_epochs=2, engine="sequential", workers=1, logger=False,
            default_root_dir=folder, callbacks=[times], eval_every=10**6, checkpoint_every=0,
        )  # fmt: skip
        trainer.fit(make(**settings), data, seed=0)
    gc.collect()
    return [after - before for before, after in zip(times.ends[:-2], times.ends[1:-1], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="mobilenetv2")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--examples", type=int, default=256, help="images of each client")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="these methods, beside FedAvg")
    options = parser.parse_args()
    logging.getLogger("fl_lightning").setLevel(logging.CRITICAL)
    chosen = {
        name: METHODS[name]
        for name in METHODS
        if name == "FedAvg" or name in (options.only or METHODS)
    }
    print("| method | round, as a multiple of FedAvg's | limit |\n|---|---|---|", flush=True)
    for name, (make, limit) in chosen.items():
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.repeats):
            for times, method in zip(found, (FedAvg, make), strict=True):
                data = FederatedImages(
                    dataset="synthetic", synthetic_classes=100, num_clients=options.clients, partition=IID(),
                    synthetic_examples=options.clients * options.examples, val_fraction=0.0, batch_size=32,
                )  # fmt: skip
                times += round_times(method, data, options)
        ratio = min(found[1]) / min(found[0])
        above = " (above)" if limit and ratio > limit else ""
        print(f"| {name} | {ratio:.2f}{above} | {limit or ''} |", flush=True)


if __name__ == "__main__":
    main()
