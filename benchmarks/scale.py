"""Rounds a second, memory, and where the time goes, against the size of the cohort and of the
population.

    python benchmarks/scale.py [--quick] [--repeats 1] [--workers 1 2] [--engine auto]
        [--out FILE] [--figure FILE]
    python benchmarks/scale.py --read FILE --figure FILE    # draws what was measured before

One hidden layer of 128 on 64 features, 20 examples a client, one local step; whole runs with
MLflow, byte ledger and checkpoints, each a process of its own (``scale_point.py``). The figure is
the median of the repeats. Memory held is that of all its processes before the last round, shared
pages counted once, without what importing the libraries takes; the peak is of everything, from
start to end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from processes import run
from scale_figure import draw
from workloads import machine

HERE = Path(__file__).resolve().parent
COHORTS, POPULATION = (10, 20, 50, 100, 200, 500, 1000), 100_000
POPULATIONS, COHORT = (1000, 10_000, 100_000, 1_000_000), 100
QUICK_COHORTS, QUICK_POPULATIONS = (10, 100, 1000), (1000, 1_000_000)
WORK, FEWEST, MOST = 10_000, 8, 300
"""Client rounds that are timed at a point, in so many rounds at least and at most."""
TIMEOUT = 180  # seconds of one point
Point = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the ends and the middle only")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[1, 2],
        help="processes that train clients; 1: the run's own",
    )
    parser.add_argument("--engine", default="auto", choices=("auto", "sequential", "batched"))
    parser.add_argument("--out", type=Path, metavar="FILE", help="everything measured, as JSON")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="where the figure goes, .png or .pdf"
    )
    parser.add_argument(
        "--read",
        type=Path,
        metavar="FILE",
        help="measure nothing, take this --out of an earlier call",
    )
    options = parser.parse_args(arguments)
    if options.read:
        document = json.loads(options.read.read_text())
    else:
        document = {
            "machine": machine(),
            "repeats": options.repeats,
            "engine": options.engine,
            "points": measure(options),
        }
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    if options.figure:
        draw([point for point in document["points"] if "error" not in point]).savefig(
            options.figure, dpi=150
        )


def measure(options: argparse.Namespace) -> list[Point]:
    cohorts, populations = (
        (QUICK_COHORTS, QUICK_POPULATIONS) if options.quick else (COHORTS, POPULATIONS)
    )
    wanted = dict.fromkeys(
        [(POPULATION, cohort) for cohort in cohorts]
        + [(population, COHORT) for population in populations]
    )
    points = []
    print(
        f"{'population':>10} {'cohort':>6} {'processes':>9} {'engine':>10} {'ms a round':>10} "
        f"{'rounds/s':>8} {'start s':>7} {'held MiB':>8} {'peak MiB':>8}  most of the time"
    )  # fmt: skip
    for population, cohort in wanted:
        for workers in options.workers:
            found = [
                one(population, cohort, workers, options.engine) for _ in range(options.repeats)
            ]
            points.append(summarise(found))
            print(line(points[-1]), flush=True)
    return points


def one(population: int, cohort: int, workers: int, engine: str) -> Point:
    """One run in a folder of its own; whatever goes wrong is ``error``."""
    settings = {"population": population, "cohort": cohort, "workers": workers}
    flags = settings | {
        "engine": engine,
        "rounds": max(FEWEST, min(MOST, WORK // cohort)),
        "launched": time.time(),
    }
    command = [
        sys.executable,
        str(HERE / "scale_point.py"),
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        done = run(command, folder=Path(folder), environment=dict(os.environ), timeout=TIMEOUT)
    if done.code != 0:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        return settings | {
            "error": f"not done after {TIMEOUT} s" if done.code is None else said[-1]
        }
    found: Point = json.loads(
        [text for text in done.stdout.splitlines() if text.startswith("{")][-1]
    )
    return found | {
        "peak_mib": max(done.peak_mib or 0.0, found["memory_mib"] + found["libraries_mib"]),
        "load": load,
    }


def summarise(found: list[Point]) -> Point:
    """The run with the median time, and the runs behind it."""
    good = sorted(
        (point for point in found if "error" not in point), key=lambda point: point["seconds"]
    )
    if not good:
        return found[0]
    return good[len(good) // 2] | {
        "seconds": median(point["seconds"] for point in good),
        "runs": found,
    }


def line(point: Point) -> str:
    head = f"{point['population']:>10} {point['cohort']:>6} {point['workers']:>9}"
    if "error" in point:
        return f"{head} failed: {point['error'][:160]}"
    most = sorted(point["shares"].items(), key=lambda item: -item[1])[:4]
    shown = ", ".join(f"{name} {100 * share:.0f} %" for name, share in most)
    return (
        f"{head} {point['engine']:>10} {1e3 * point['seconds']:>10.1f} "
        f"{1 / point['seconds']:>8.2f} {point['start_seconds']:>7.1f} {point['memory_mib']:>8.0f} "
        f"{point['peak_mib']:>8.0f}  {shown}"
    )


if __name__ == "__main__":
    main()
