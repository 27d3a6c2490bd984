r"""A long run and a large population: what a round costs must grow with neither.

    python benchmarks/soak.py --rounds 10000 --mlflow --out small.json  # 50 of 100 clients a round
    python benchmarks/soak.py --rounds 10000 --cohort 20 --clients 1000000 --val_fraction 0 \
        --eval_every 1000 --out large.json
    python benchmarks/soak.py --draw small.json large.json --figure docs/results/figures/soak.png

Measured each hundredth of the run: milliseconds of a round, resident memory, open files and
Python's threads of the process, bytes of the run's directory without ``checkpoints``. Printed are
the second and the last tenth. All times are the processor's: other programs disturb them least.
``--mlflow`` tracks in ./mlflow.db.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning.data import FederatedData, Partition
from fl_lightning.figures import COLOURS, LINE_STYLES, open_frame
from fl_lightning.hooks import Meter
from fl_lightning.methods import FedAvg
from fl_lightning.trainer import FederatedTrainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 16
SHOWN = ("memory", "handles", "threads", "disk")
LABELS = {
    "milliseconds": "ms of a round",
    "memory": "resident memory, MiB",
    "handles": "open files",
    "threads": "Python's threads",
    "disk": "files but checkpoints, MiB",
}


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
    """What the process and the run's directory have, at the start of every so many rounds."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.found: dict[str, list[float]] = {name: [] for name in ("round", "clock", *SHOWN)}

    def on_round_start(self, round: int, context: Any) -> None:
        if (round - 1) % self.every:
            return
        if round == 1 + self.every:
            context.files.tracker.flush()  # opening the store, in a thread of its own, is start-up
        files = [
            path for path in self.trainer.run_dir.rglob("*") if "checkpoints" not in path.parts
        ]
        now = {
            "round": round - 1,
            "clock": time.process_time(),
            "memory": int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20,
            "handles": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "disk": sum(path.stat().st_size for path in files) / 2**20,
        }
        for name, value in now.items():
            self.found[name].append(value)


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run, and return what was watched, by name."""
    torch.set_num_threads(1)
    watch, started = Watch(max(1, options.rounds // 100)), time.process_time()
    data = Vectors(
        dataset="vectors", num_clients=options.clients, partition=Evenly(), batch_size=8, val_fraction=options.val_fraction,
    )  # fmt: skip
    method = FedAvg(
        network=lambda classes: nn.Linear(WIDTH, classes), optimizer=partial(SGD, lr=0.1)
    )
    with TemporaryDirectory() as folder:
        watch.trainer = trainer = FederatedTrainer(
            accelerator="cpu", participation=options.cohort / options.clients, local_epochs=1,
            max_rounds=options.rounds + 1, eval_every=options.eval_every, callbacks=[watch], logger=options.mlflow,
            default_root_dir=folder, workers=1,
        )  # fmt: skip
        trainer.fit(method, data)
    found = {name: np.array(values) for name, values in watch.found.items()}
    spent = np.diff(found["clock"]) / np.diff(found["round"])
    return {
        "clients": options.clients,
        "cohort": options.cohort,
        "rounds": options.rounds,
        "start_seconds": found["clock"][0] - started,
        "milliseconds": [1e3 * float(each) for each in spent],
        **{name: found[name][1:].tolist() for name in ("round", *SHOWN)},
    }


def tenths(values: Sequence[float]) -> tuple[float, float]:
    """The medians of the second and of the last tenth: the first has what a process does once."""
    tenth = max(1, len(values) // 10)
    return float(np.median(values[tenth : 2 * tenth] or values)), float(np.median(values[-tenth:]))


def per_round(found: dict[str, Any], name: str) -> list[float]:
    """How much of a quantity each watched stretch of the run added, a round."""
    grown = np.diff(found[name], prepend=0.0) / np.diff(found["round"], prepend=0.0)
    return [float(each) for each in grown]


def text(found: dict[str, Any]) -> str:
    lines = [
        f"{found['clients']} clients, {found['cohort']} a round, {found['rounds']} rounds; "
        f"the first began after {found['start_seconds']:.1f} s"
    ]
    for name, what in LABELS.items():
        if name == "disk":
            continue
        before, after = tenths(found[name])
        lines.append(f"{what}: {before:.4g} in the second tenth, {after:.4g} in the last")
    before, after = (2**10 * each for each in tenths(per_round(found, "disk")))
    return "\n".join(
        [*lines, f"KiB of files a round: {before:.4g} in the second tenth, {after:.4g} in the last"]
    )


def draw(runs: Sequence[dict[str, Any]]) -> Figure:
    """A panel for each quantity, a line for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 3.4), layout="constrained")
    for axes, (name, what) in zip(figure.subplots(1, len(LABELS)), LABELS.items(), strict=True):
        for at, run in enumerate(runs):
            label = f"{run['cohort']} of {run['clients']:,} clients".replace(",", " ")
            axes.plot(
                run["round"], run[name], color=COLOURS[at], linestyle=LINE_STYLES[at], label=label
            )
        axes.set_title(what, fontsize="medium")
        axes.set_xlabel("round")
        axes.set_ylim(bottom=0)
        open_frame(axes)
    axes.legend(fontsize="small", frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--eval_every", type=int, default=1)
    parser.add_argument("--val_fraction", type=float, default=0.2)
    parser.add_argument("--mlflow", action="store_true", help="track in ./mlflow.db")
    parser.add_argument("--out", type=Path, metavar="FILE", help="everything measured, as JSON")
    parser.add_argument(
        "--draw", type=Path, nargs="+", metavar="FILE", help="draw these, and run nothing"
    )
    parser.add_argument("--figure", type=Path, default=Path("soak.png"))
    options = parser.parse_args()
    if options.draw:
        runs = [json.loads(file.read_text()) for file in options.draw]
        draw(runs).savefig(options.figure, dpi=150)
        print("\n".join(map(text, runs)))
        return
    found = soak(options)
    if options.out:
        options.out.write_text(json.dumps(found) + "\n")
    print(text(found))


if __name__ == "__main__":
    main()
