"""Where the time of a round goes, in percent of it: wire, callbacks, MLflow, checkpoints,
evaluation, training.

    python benchmarks/shares.py [CONFIG.yaml | W1 ... W4] [--rounds 20] [--workers 1]
        [--trainer.eval_every 5 ...]

The run is one of the project's configurations (default: kd_default) or workloads, tracked in an
mlflow.db of its own; the first three rounds, in which the store is opened, are left out. Functions
are wrapped from here; a share is its own time, without that of other shares inside it. With one
worker, the clients' half of the wire is in this process and counted; with more it is in theirs.
What the writer's thread does is CPU time of that thread: it shares the interpreter with the rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

# as the command sets it, before torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from workload import WORKLOADS
from workload_ours import Tensors

from fl_lightning import exchange, hooks, loop
from fl_lightning.aggregation.plain import PlainSum
from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.engines.stacked import batched
from fl_lightning.methods import FedAvg
from fl_lightning.run import session
from fl_lightning.run.journal import Journal
from fl_lightning.run.progress import Progress
from fl_lightning.tracking.loggers import Channel
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.wire import Payload

ROOT = Path(__file__).resolve().parents[1]
WARM = 3  # rounds that are left out
WIRE = ("encode", "decode", "check", "aggregate")


class Shares:
    """Seconds by name; what runs inside another share is taken from that one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.measured: dict[str, float] = {}  # as it was after the last round
        self._open: list[float] = []  # seconds of inner shares, per open call

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **settings: Any) -> Any:
            self._open.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **settings)
            finally:
                took, inner = time.perf_counter() - started, self._open.pop()
                self.seconds[name] += took - inner
                if self._open:
                    self._open[-1] += took

        return timed

    def in_thread(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """CPU time of a function that runs in a thread of its own."""

        @wraps(function)
        def timed(*args: Any, **settings: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **settings)
            finally:
                self.seconds[name] += time.thread_time() - started

        return timed

    def wrap(self, name: str, owner: Any, attribute: str) -> None:
        setattr(owner, attribute, self.of(name, getattr(owner, attribute)))

    def wrap_everywhere(self, name: str, function: Callable[..., Any]) -> None:
        """A function that modules import by its name."""
        timed = self.of(name, function)
        for module in [
            module for key, module in sys.modules.items() if key.startswith("fl_lightning")
        ]:
            for attribute in [key for key, value in vars(module).items() if value is function]:
                setattr(module, attribute, timed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", default=str(ROOT / "configs" / "kd_default.yaml"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    options, flags = parser.parse_known_args()
    make = workload if options.run in WORKLOADS else configured
    run = options.run if options.run in WORKLOADS else str(Path(options.run).resolve())
    sys.path.append(str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        trainer, method, start = make(run, options.rounds + WARM, options.workers, flags)
        shares = Shares()
        instrument(shares, trainer, method)
        start()
        os.chdir(ROOT)
    report(shares.measured, options.rounds)


def configured(
    config: str, rounds: int, workers: int, flags: list[str]
) -> tuple[Any, Any, Callable[[], Any]]:
    __import__("callbacks")
    cli = FederatedCLI(
        "fit",
        [
            "--config",
            config,
            "--trainer.max_rounds",
            str(rounds),
            "--trainer.workers",
            str(workers),
            *flags,
        ],
    )
    return cli.trainer, cli.model, cli.start


def workload(
    name: str, rounds: int, workers: int, flags: list[str]
) -> tuple[Any, Any, Callable[[], Any]]:
    work = WORKLOADS[name]
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=rounds, participation=work.cohort / work.clients, local_epochs=work.epochs,
        eval_every=10**6, workers=workers, deterministic=False,
    )  # fmt: skip
    method = FedAvg(network=work.network, optimizer=partial(torch.optim.SGD, **work.sgd))
    return trainer, method, partial(trainer.fit, method, Tensors(work))


def instrument(shares: Shares, trainer: Any, method: Any) -> None:
    for callback in trainer.callbacks:
        for hook in [name for name in dir(callback) if name.startswith(("on_", "change_"))]:
            shares.wrap(f"callback {type(callback).__name__}", callback, hook)
    for function in (hooks.tell, hooks.stress):
        shares.wrap_everywhere("callbacks, calling them", function)
    # where it is defined: one that is set on an instance is not the default any more, and the
    # default is done for a stack at once
    shares.wrap(
        "encode", next(owner for owner in type(method).__mro__ if "upload" in vars(owner)), "upload"
    )
    shares.wrap("encode", batched, "default_uploads")
    shares.wrap("encode", exchange, "encode_broadcast")
    shares.wrap("encode", Payload, "to_bytes")
    shares.wrap("decode", method, "receive")
    Payload.from_bytes = classmethod(shares.of("decode", Payload.from_bytes.__func__))  # type: ignore[method-assign, attr-defined]
    shares.wrap("check", exchange, "check_upload")
    shares.wrap("aggregate", PlainSum, "close")
    shares.wrap("evaluation", loop, "evaluate")
    shares.wrap("rows and snapshot", Progress, "add")
    shares.wrap("checkpoint", Progress, "save")
    shares.wrap("MLflow, seen by the rounds", Journal, "log_round")
    Channel._write = shares.in_thread("MLflow, the writer's thread", Channel._write)  # type: ignore[method-assign]
    one, count = session.run_round, 0

    def run_round(fed: Any, engine: Any, round: int) -> Any:
        nonlocal count
        count += 1
        if count == WARM + 1:
            trainer.journal.tracker.flush()
            shares.seconds.clear()
        started = time.perf_counter()
        record = shares.of("training and the rest", one)(fed, engine, round)
        shares.seconds["round"] += time.perf_counter() - started
        if count == trainer.max_rounds:
            trainer.journal.tracker.flush()
            shares.measured = dict(shares.seconds)
        return record

    session.run_round = run_round


def report(seconds: dict[str, float], rounds: int) -> None:
    whole = seconds.pop("round")
    print(f"a round: {1e3 * whole / rounds:.1f} ms, mean of {rounds}")
    sums = {
        "encode + decode + check + aggregate": sum(seconds.get(name, 0.0) for name in WIRE),
        "MLflow + callbacks": sum(
            value for name, value in seconds.items() if name.startswith(("MLflow", "callback"))
        ),
    }
    for name, value in [*sorted(seconds.items(), key=lambda item: -item[1]), *sums.items()]:
        print(f"{name:<40}{1e3 * value / rounds:10.3f} ms{100 * value / whole:8.2f} %")


if __name__ == "__main__":
    main()
