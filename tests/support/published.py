"""Published studies made of synthetic runs, and a pool that runs the jobs of a study in the test's
process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from synthetic_runs import make_study

from fl_lightning.__main__ import main
from fl_lightning.study.report.compare import compare

CONFIG = {
    "trainer": {
        "max_rounds": 5,
        "callbacks": [{"class_path": "callbacks.LabelNoise", "init_args": {"round": 1}}],
    },
    "data": {"init_args": {"batch_size": 32}},
    "model": {"class_path": "FedAvg", "init_args": {"network": "small_cnn", "mu": 0.1}},
}
"""The configuration of every synthetic run."""


def publish(
    root: Path,
    accuracies: Mapping[str, Any],
    name: str = "board",
    run: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """Return the folder of a report of synthetic runs, see ``make_study``; their folders are in
    ``root/runs``."""
    make_study(root / "runs", accuracies, name=name, run={"config": CONFIG, **(run or {})}, **keys)
    compare(name, root / "published" / name, root / "runs")
    return root / "published" / name


class InProcessPool:
    """A pool that runs one job after another by ``main``; ``started`` has their names."""

    started: list[str] = []  # noqa: RUF012

    def __init__(self, slots, held=(), program=()) -> None:
        self.slots = slots

    def run(self, jobs, ended, look=lambda running: None) -> None:
        for job in list(jobs):
            self.started.append(job.name)
            code = main(job.args)
            ended(SimpleNamespace(job=job), code)
