"""Print what virtual time takes of a round: on kd_default, and of 100 000 clients of whom 100 are
sampled.

    python benchmarks/clock_cost.py

Runs without and with a clock (devices, lines and clients that come and go) are timed in turn.
Printed are the median milliseconds of a round without and with it, their ratio, and the share of
the rounds' time that is spent in the clock itself: in ``Timing`` and what it calls, without
training, drawing and weighing stale updates, which it calls too; the first round is left out. The
share is far less noisy than the ratio. The clock is allowed 1 % of a round of kd_default and 5 % of
one of 100 000 clients. What an asynchronous round costs is by arrival, whatever the number of
clients, so its share is that of how long a client trains: one local step of 20 examples is the
least that there is, and ten are shown beside it.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from scale_point import EXAMPLES, Clock, Vectors
from workload import OneHidden

from fl_lightning import clock as virtual
from fl_lightning import loop
from fl_lightning.__main__ import main as fl_lightning
from fl_lightning.clock.asynchronous import Flights
from fl_lightning.data import IID
from fl_lightning.methods import FedAvg
from fl_lightning.trainer import FederatedTrainer

PHASES = {
    "training": (loop, "train_cohort"),
    "drawing": (loop, "draw"),
    "clock": (virtual.Timing, "collect"),
    "end": (virtual.Timing, "end_round"),
    "weighing": (Flights, "_land"),
}
"""Where each phase is; what a phase does inside another one counts for itself alone."""
OPTIONS = {
    "devices": "LogNormalDevices",
    "network.down": "2.5e6",
    "network.up": "6.25e5",
    "availability": "Diurnal",
    "availability.day": "2000",
    "availability.online": "600",
    "availability.offline": "600",
}


def kd_default(folder: str, rounds: int, form: str) -> pd.Series:
    """Return the seconds of each round of kd_default, with a clock where there is a form of the
    rounds."""
    flags = [part for name, value in OPTIONS.items() for part in (f"--trainer.clock.{name}", value)]
    flags += [
        "--trainer.max_rounds",
        str(rounds),
        "--trainer.logger",
        "false",
        "--trainer.workers",
        "1",
    ]
    flags += [
        "--trainer.default_root_dir",
        folder,
        "--trainer.run_name",
        "run",
        "--trainer.eval_every",
        "5",
    ]
    fl_lightning(["fit", "--config", "kd_default", *(flags if form else flags[2 * len(OPTIONS) :])])
    return _times(folder)


def scaled(
    folder: str, rounds: int, form: str, clients: int, cohort: int, epochs: int = 1
) -> pd.Series:
    """Return the same of many clients with little work each: as many local steps as epochs."""
    data = Vectors(
        dataset="vectors",
        num_clients=clients,
        partition=IID(),
        batch_size=EXAMPLES,
        val_fraction=0.0,
    )
    settings: dict[str, Any] = {}
    if form:
        online = virtual.Diurnal(online=600.0, offline=600.0, day=2000.0)
        lines = virtual.Lines(down=2.5e6, up=6.25e5)
        devices = virtual.LogNormalDevices()
        settings["clock"] = virtual.Clock(devices=devices, network=lines, availability=online)
    if form == "FedBuff":
        settings["rounds"] = virtual.FedBuff(cohort, cohort // 2)
    trainer = FederatedTrainer(
        accelerator="cpu",
        max_rounds=rounds,
        participation=cohort / clients,
        local_epochs=epochs,
        eval_every=10**6,
        engine="sequential",
        workers=1,
        logger=False,
        default_root_dir=folder,
        run_name="run",
        **settings,
    )
    method = FedAvg(
        network=OneHidden, optimizer=partial(torch.optim.SGD, lr=0.1), weigh_by="clients"
    )
    trainer.fit(method, data)
    return _times(folder)


def _times(folder: str) -> pd.Series:
    found = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
    path = min((path for path in found if path.endswith("metrics.csv")), key=len)
    return pd.read_csv(path)["time/round"]


def compare(
    name: str, run: Callable[[str, int, str], pd.Series], form: str, rounds: int, repeats: int
) -> None:
    """Time runs without and with a clock in turn, and print a line."""
    medians: dict[str, list[float]] = {"": [], form: []}
    shares = []
    for _ in range(repeats):
        for which in medians:
            phases.seconds.clear()
            marks.clear()
            with TemporaryDirectory() as folder:
                times = run(folder, rounds, which)
            medians[which].append(median(times[1:]))
            if which:
                shares.append((marks[-1] - marks[0]) / times[1:].sum())
    without, timed = (1000 * median(found) for found in medians.values())
    print(
        f"{name:<28} {form:<12} {without:8.2f} ms without, {timed:8.2f} with: {timed / without:.3f}; "
        f"of it the clock {100 * median(shares):.2f} %",
        flush=True,
    )


phases = Clock()
marks: list[float] = []
"""Seconds that the clock has taken when each round ended."""


def marked(end_round: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``end_round`` with a mark after it."""

    def ended(*arguments: Any, **named: Any) -> Any:
        found = end_round(*arguments, **named)
        marks.append(phases.seconds["clock"] + phases.seconds["end"])
        return found

    return ended


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--cohort", type=int, default=100)
    options = parser.parse_args()
    logging.getLogger("fl_lightning").setLevel(logging.WARNING)
    for name, (owner, function) in PHASES.items():
        setattr(owner, function, phases.timed(name, getattr(owner, function)))
    virtual.Timing.end_round = marked(virtual.Timing.end_round)  # type: ignore[method-assign]
    compare("kd_default", kd_default, "Synchronous", options.rounds, options.repeats)
    many = partial(scaled, clients=options.clients, cohort=options.cohort)
    for form in ("Synchronous", "FedBuff"):
        for steps in (1, 10):
            name, run = f"{options.clients} clients, {steps} steps", partial(many, epochs=steps)
            compare(name, run, form, options.rounds, options.repeats)


if __name__ == "__main__":
    main()
