"""How long a command takes until something is seen.

    python benchmarks/startup.py [--repeats 3] [--config configs/kd_default.yaml]
        [--only refusals|fit|imports]

Slips: until they are refused, in turn with the same slip where no description of the command is
kept, which the parser then refuses after importing torch; and the ratio of the two. ``--help``,
``fit --help``, and ``fit``: until the first round is in metrics.csv, and until the command ends
after two rounds; without a tracking store, with one that has to be made, and with one that is
there. Seconds of the clock, and those of the processor that the command's process had used when the
first round was seen, which other work disturbs less. Median and range; each ``fit`` in a folder of
its own. Last, the imports of such a run up to its end by ``-X importtime``: which libraries' own
code takes how long, and how many modules of each there are.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LOOK = 0.01  # seconds between looks at metrics.csv


class Times(NamedTuple):
    """The seconds of a command until its first round, those of the processor until then, and those
    until its end."""

    first: float | None
    processor: float | None
    end: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "kd_default.yaml")
    parser.add_argument("--only", choices=["refusals", "fit", "imports"], help="leave the rest out")
    options = parser.parse_args()
    fit = ["fit", "--config", str(options.config.resolve()), "--trainer.max_rounds", "2"]
    if options.only in (None, "refusals"):
        compare_refusals(str(options.config.resolve()), options.repeats)
    if options.only in (None, "fit"):
        time_fits(fit, options.repeats)
    if options.only in (None, "imports"):
        show_imports([*fit, "--trainer.logger", "false"])


def time_fits(fit: Sequence[str], repeats: int) -> None:
    print(f"{'seconds':<34}{'first round':>24}{'of the processor':>24}{'end':>24}")
    for label, arguments in (("--help", ["--help"]), ("fit --help", ["fit", "--help"])):
        report(label, [run(arguments, Path.cwd()) for _ in range(repeats)])
    report(
        "fit, no tracking store",
        [in_new_folder([*fit, "--trainer.logger", "false"]) for _ in range(repeats)],
    )
    report("fit, new mlflow.db", [in_new_folder(fit) for _ in range(repeats)])
    with tempfile.TemporaryDirectory() as folder:
        run(fit, Path(folder))
        report("fit, mlflow.db is there", [run(fit, Path(folder)) for _ in range(repeats)])


def show_imports(fit: Sequence[str], rows: int = 20) -> None:
    """Print the libraries whose own code takes longest to import, of torch also its parts."""
    own: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-X", "importtime", "-m", "fl_lightning", *fit]
        done = subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, text=True
        )
    line = re.compile(r"^import time: +(\d+) \| +\d+ \| +(\S+)", re.MULTILINE)
    for microseconds, module in line.findall(done.stderr):
        names = module.split(".")
        library = ".".join(names[: 2 if names[0] == "torch" else 1])
        own[library] += int(microseconds)
        modules[library] += 1
    print(f"{'own code of the imports':<34}{'ms':>24}{'modules':>24}")
    for library, microseconds in own.most_common(rows):
        print(f"{library:<34}{1e-3 * microseconds:>24.0f}{modules[library]:>24}")
    print(f"{'all':<34}{1e-3 * own.total():>24.0f}{modules.total():>24}")


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
                found[0].append(run(["fit", *slip], Path(described), described, code=2).end)
                with tempfile.TemporaryDirectory() as empty:
                    found[1].append(run(["fit", *slip], Path(empty), empty, code=2).end)
            ratio = median(found[0]) / median(found[1])
            print(
                f"{label:<34}{spread(found[0]):>24}{spread(found[1]):>24}{ratio:>8.3f}", flush=True
            )


def in_new_folder(arguments: Sequence[str]) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        return run(arguments, Path(folder))


def run(arguments: Sequence[str], folder: Path, cache: str | None = None, code: int = 0) -> Times:
    """Return the seconds until a run's metrics.csv has its first round, and until the command ends.

    Args:
        arguments: the command line after the program.
        folder: where it is run.
        cache: folder of caches; None: the user's.
        code: the exit code that is expected.
    """
    before = set(folder.glob("runs/*/*/metrics.csv"))
    first = processor = None
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "fl_lightning", *arguments], cwd=folder, env=environment(cache),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None:
        if first is None and any(
            lines(path) > 1 for path in set(folder.glob("runs/*/*/metrics.csv")) - before
        ):
            first, processor = time.monotonic() - started, processor_seconds(process.pid)
        time.sleep(LOOK)
    if process.returncode != code:
        raise SystemExit(process.communicate()[1])
    return Times(first, processor, time.monotonic() - started)


def environment(cache: str | None = None) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, **({"XDG_CACHE_HOME": cache} if cache else {})}


def processor_seconds(process: int) -> float | None:
    """Return the seconds that a process has used of the processor; None where only Linux would
    tell."""
    if not (stat := Path(f"/proc/{process}/stat")).exists():
        return None
    user, system = stat.read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def lines(path: Path) -> int:
    return path.read_text().count("\n")


def report(label: str, found: Sequence[Times]) -> None:
    columns = [
        [seconds for seconds in column if seconds is not None]
        for column in zip(*found, strict=True)
    ]
    print(f"{label:<34}{''.join(f'{spread(column):>24}' for column in columns)}", flush=True)


def spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})" if seconds else "-"


if __name__ == "__main__":
    main()
