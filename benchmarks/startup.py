"""How long a command takes until something is seen.

python benchmarks/startup.py [--repeats 3] [--config configs/kd_default.yaml]

``--help``, ``fit --help``, and ``fit``: until the first round is in metrics.csv, and until the command ends
after two rounds; without a tracking store, with one that has to be made, and with one that is there. Median
and range; each ``fit`` in a folder of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
LOOK = 0.01  # seconds between looks at metrics.csv


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "kd_default.yaml")
    options = parser.parse_args()
    fit = ["fit", "--config", str(options.config.resolve()), "--trainer.max_rounds", "2"]
    print(f"{'seconds':<34}{'first round':>24}{'end':>24}")
    for label, arguments in (("--help", ["--help"]), ("fit --help", ["fit", "--help"])):
        report(label, [run(arguments, Path.cwd()) for _ in range(options.repeats)])
    report(
        "fit, no tracking store",
        [in_new_folder([*fit, "--trainer.logger", "false"]) for _ in range(options.repeats)],
    )
    report("fit, new mlflow.db", [in_new_folder(fit) for _ in range(options.repeats)])
    with tempfile.TemporaryDirectory() as folder:
        run(fit, Path(folder))
        report("fit, mlflow.db is there", [run(fit, Path(folder)) for _ in range(options.repeats)])


def in_new_folder(arguments: Sequence[str]) -> tuple[float | None, float]:
    with tempfile.TemporaryDirectory() as folder:
        return run(arguments, Path(folder))


def run(arguments: Sequence[str], folder: Path) -> tuple[float | None, float]:
    """Seconds until a run's metrics.csv has its first round, if there is one, and until the command ends."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    before, first = set(folder.glob("runs/*/*/metrics.csv")), None
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "fl_lightning", *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None:
        if first is None and any(
            lines(path) > 1 for path in set(folder.glob("runs/*/*/metrics.csv")) - before
        ):
            first = time.monotonic() - started
        time.sleep(LOOK)
    if process.returncode:
        raise SystemExit(process.communicate()[1])
    return first, time.monotonic() - started


def lines(path: Path) -> int:
    return path.read_text().count("\n")


def report(label: str, found: Sequence[tuple[float | None, float]]) -> None:
    first = [seconds for seconds, _ in found if seconds is not None]
    print(f"{label:<34}{spread(first):>24}{spread([end for _, end in found]):>24}", flush=True)


def spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})" if seconds else "-"


if __name__ == "__main__":
    main()
