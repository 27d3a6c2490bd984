"""How long a command takes until something is seen.

python benchmarks/startup.py [--repeats 3] [--config configs/kd_default.yaml] [--only refusals]

Slips: until they are refused, in turn with the same slip where no description of the command is kept, which
the parser then refuses after importing torch; and the ratio of the two. ``--help``, ``fit --help``, and
``fit``: until the first round is in metrics.csv, and until the command ends after two rounds; without a
tracking store, with one that has to be made, and with one that is there. Median and range; each ``fit`` in a
folder of its own.
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
    parser.add_argument("--only", choices=["refusals"], help="leave the rest out")
    options = parser.parse_args()
    compare_refusals(str(options.config.resolve()), options.repeats)
    if options.only:
        return
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


def compare_refusals(config: str, repeats: int) -> None:
    """Time each slip in turn with and without the description that a first call leaves."""
    slips = {
        "a mistyped flag": ["--config", config, "--trainer.max_round", "3"],
        "an unknown method": ["--config", config, "--model", "FedFoo"],
        "a word for a number": ["--config", config, "--trainer.max_rounds", "three"],
        "a number out of range": ["--config", config, "--trainer.max_rounds", "0"],
        "an unknown network": ["--config", config, "--model.network", "resnet21"],
        "a run that is not there": ["--config", config, "--ckpt_path", "no_such_run"],
        "a file that is not there": ["--config", "no_such_file"],
    }
    print(f"{'seconds until a refusal':<34}{'described':>24}{'by the parser':>24}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as described:
        run(["fit", *slips["a mistyped flag"]], Path(described), described, code=2)
        for label, slip in slips.items():
            found: tuple[list[float], list[float]] = ([], [])
            for _ in range(repeats):
                found[0].append(run(["fit", *slip], Path(described), described, code=2)[1])
                with tempfile.TemporaryDirectory() as empty:
                    found[1].append(run(["fit", *slip], Path(empty), empty, code=2)[1])
            ratio = median(found[0]) / median(found[1])
            print(f"{label:<34}{spread(found[0]):>24}{spread(found[1]):>24}{ratio:>8.3f}", flush=True)


def in_new_folder(arguments: Sequence[str]) -> tuple[float | None, float]:
    with tempfile.TemporaryDirectory() as folder:
        return run(arguments, Path(folder))


def run(
    arguments: Sequence[str], folder: Path, cache: str | None = None, code: int = 0
) -> tuple[float | None, float]:
    """Seconds until a run's metrics.csv has its first round, if there is one, and until the command ends.

    Args:
        arguments: the command line after the program.
        folder: where it is run.
        cache: folder of caches; None: the user's.
        code: the exit code that is expected.
    """
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, **({"XDG_CACHE_HOME": cache} if cache else {})}
    before, first = set(folder.glob("runs/*/*/metrics.csv")), None
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "fl_lightning", *arguments], cwd=folder, env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None:
        if first is None and any(
            lines(path) > 1 for path in set(folder.glob("runs/*/*/metrics.csv")) - before
        ):
            first = time.monotonic() - started
        time.sleep(LOOK)
    if process.returncode != code:
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
