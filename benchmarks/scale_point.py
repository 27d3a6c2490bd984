"""One point of ``scale.py``: a whole run with all that it has by default (MLflow, byte ledger,
checkpoints); nobody evaluates in between.

Every client holds 20 examples of its own in the index arrays and the labels; their inputs are
taken, by turns, from a table of 65 536, so that what grows with the population is what the project
keeps of it and not the examples. The phases are measured from here: the functions of the round are
wrapped, nothing is added to the package.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from itertools import islice, pairwise
from statistics import median
from typing import Any

import torch
from processes import PROC, descendants
from torch import Tensor
from workload import OneHidden

from fl_lightning import loop
from fl_lightning.aggregation.plain import PlainSum
from fl_lightning.data import IID, FederatedData
from fl_lightning.hooks import Context, Meter
from fl_lightning.methods import FedAvg
from fl_lightning.run.journal import Journal
from fl_lightning.run.progress import Progress
from fl_lightning.trainer import FederatedTrainer

EXAMPLES, FEATURES, CLASSES, DISTINCT = 20, 64, 10, 2**16
WARM = 3
"""Rounds before those that are timed: the first checkpoint and the first rows of the tables are
among them."""
PHASES = {
    "sampling": (loop, "draw"),
    "orders": (loop, "make_tasks"),
    "training": (loop, "train_clients"),
    "collecting": (loop, "receive"),
    "aggregation": (PlainSum, "close"),
    "summary": (loop, "summarise"),
    "ledger and tables": (Progress, "add"),
    "checkpoints": (Progress, "save"),
    "logging": (Journal, "log_round"),
}
"""Where each phase is; what a phase does inside another one counts for itself alone."""


class Vectors(FederatedData):
    """Noise of the true shape, since only the time matters."""

    examplewise = True
    num_classes, example_shape = CLASSES, (FEATURES,)

    def setup(self, stage: str | None = None) -> None:
        self.table = torch.randn(DISTINCT, FEATURES, generator=torch.Generator().manual_seed(0))
        self.train_target = torch.arange(EXAMPLES * self.num_clients) % CLASSES
        self.test_target = self.train_target[:100].clone()

    def inputs(self, split: Any, index: Tensor, draws: Tensor | None = None) -> Tensor:
        return self.table[index % DISTINCT]


class Clock:
    """Seconds of each phase, without those of the phases inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.inside: list[float] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, measured; of an iterator that it returns, every step.

        What measuring takes is the measured function's, so that it is not in the phase around it.
        """

        @wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            self.inside.append(0.0)
            try:
                found = function(*arguments, **named)
                has_steps = isinstance(found, Iterator)
            finally:
                self.end(name, started)
            return self.steps(name, found) if has_steps else found

        return measured

    def steps(self, name: str, iterator: Iterator[Any]) -> Iterator[Any]:
        following = self.timed(name, lambda: [*islice(iterator, 1)])
        while item := following():
            yield item[0]

    def end(self, name: str, started: float) -> None:
        """Count a call that began then, without what was measured inside it."""
        inside = self.inside.pop()
        took = time.perf_counter() - started
        self.seconds[name] += took - inside
        if self.inside:
            self.inside[-1] += took


class Watch(Meter):
    """The clock at the start of every round; memory before the last one, whose start is the end of
    those that are timed."""

    def __init__(self, phases: Clock) -> None:
        self.phases, self.marks, self.shares = phases, [], {}  # type: tuple[Clock, list[float], dict[str, float]]

    def on_round_start(self, round: int, context: Context) -> None:
        self.marks.append(time.perf_counter())
        if len(self.marks) == WARM + 1:
            self.phases.seconds.clear()
        if round == context.max_rounds:
            self.shares = dict(self.phases.seconds)
            self.processes = [own for pid in sorted(descendants(os.getpid())) if (own := held(pid))]


def held(pid: int) -> float:
    """MiB that a process holds beside the files that it maps; a page that k processes share counts
    1/k in each."""
    found = 0
    with suppress(OSError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            found += int(line.split()[1]) if line.startswith(("Pss_Anon:", "Pss_Shmem:")) else 0
    return found / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--population", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20, help="that are timed")
    parser.add_argument("--engine", default="auto")
    parser.add_argument(
        "--launched",
        type=float,
        default=0.0,
        help="seconds since 1970; the start is counted from there",
    )
    options = parser.parse_args()
    logging.getLogger("fl_lightning").setLevel(logging.WARNING)
    phases = Clock()
    for name, (owner, function) in PHASES.items():
        setattr(owner, function, phases.timed(name, getattr(owner, function)))
    watch = Watch(phases)
    data = Vectors(
        dataset="vectors",
        num_clients=options.population,
        partition=IID(),
        batch_size=EXAMPLES,
        val_fraction=0.0,
    )
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=WARM + options.rounds + 1, participation=options.cohort / options.population, local_epochs=1,
        eval_every=10**6, callbacks=[watch], engine=options.engine, workers=options.workers, deterministic=False,
    )  # fmt: skip
    importlib.import_module("mlflow")  # which a run imports beside its first rounds
    libraries = held(os.getpid())
    begun, started = time.time(), time.perf_counter()
    trainer.fit(FedAvg(network=OneHidden, optimizer=partial(torch.optim.SGD, lr=0.1)), data)
    timed = watch.marks[WARM:]
    total = timed[-1] - timed[0]
    took = [later - earlier for earlier, later in pairwise(timed)]
    shares = {name: watch.shares.get(name, 0.0) / total for name in PHASES}
    print("\n" + json.dumps({
        "population": options.population, "cohort": options.cohort, "workers": options.workers, "rounds": options.rounds,
        "engine": json.loads((trainer.run_dir / "metadata.json").read_text())["engine"],
        "seconds": total / options.rounds, "median_seconds": median(took),
        "start_seconds": (begun - options.launched if options.launched else 0.0) + watch.marks[0] - started,
        "shares": shares | {"rest": 1 - sum(shares.values())},
        "memory_mib": sum(watch.processes) - libraries, "libraries_mib": libraries,
        "labels_mib": data.train_target.nbytes / 2**20,
        "upload_bytes": trainer.progress.history[-1]["comm/upload_bytes"] / options.cohort,
        "partition_json_bytes": (trainer.run_dir / "partition.json").stat().st_size,
    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
