"""What the rest of a study will take, told from the rounds that runs of the same method have recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from fl_lightning.study.execute.board import Board, Record
from fl_lightning.study.execute.display import clock

START = 10.0  # seconds of imports and set-up of a run
PROBE = 3  # rounds


@dataclass(frozen=True)
class Cost:
    """Of one round.

    Args:
        seconds: wall-clock.
        bytes: over the wire, up and down.
        source: where it is known from.
    """

    seconds: float
    bytes: float
    source: str

    @classmethod
    def of(cls, rows: list[dict[str, float]], source: str) -> Cost | None:
        """Means over the rounds; the first one warms up and does not count, unless it is alone."""
        rows = rows[1:] or rows
        if not rows:
            return None
        means = [
            sum(row.get(name, 0.0) for row in rows) / len(rows) for name in ("time/round", "comm/total_bytes")
        ]
        return cls(means[0], means[1], source)


def known_cost(board: Board, record: Record) -> Cost | None:
    """From a run of the same method: of the same levels if there is one, the longest."""
    own = [other for other in board.records if other.cell.method == record.cell.method]
    same = [other for other in own if other.cell.levels == record.cell.levels]
    for others in (same, own):
        rows, name = max(
            ((other.metrics(), other.cell.name) for other in others), key=lambda found: len(found[0])
        )
        if rows:
            return Cost.of(rows, name)
    return None


def probed_cost(record: Record) -> Cost | None:
    """From a few rounds of the cell in a folder that is thrown away."""
    with TemporaryDirectory() as folder:
        limits = [
            f"--trainer.max_rounds={PROBE}",
            f"--trainer.default_root_dir={folder}",
            "--trainer.logger=false",
        ]
        command = [
            sys.executable,
            "-m",
            "fl_lightning",
            "fit",
            *record.cell.args,
            *limits,
            "--trainer.run_name=probe",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(record.threads)}
        if subprocess.run(command, capture_output=True, env=environment).returncode:
            return None
        (run,) = Path(folder).glob("*/probe")
        return Cost.of(
            Record(record.cell, record.config, record.hash, run=run).metrics(), f"a probe of {PROBE} rounds"
        )


@dataclass(frozen=True)
class Total:
    """Of the cells that are left.

    Args:
        seconds: of work, one cell after another.
        bytes: over the wire.
        unknown: names of the methods that nothing is known of.
    """

    seconds: float
    bytes: float
    unknown: list[str]


def total(records: Iterable[Record], costs: dict[str, Cost | None]) -> Total:
    """Sum over the rounds that are left, and the start of each process.

    Args:
        costs: by name of cell.
    """
    seconds, size, unknown = 0.0, 0.0, dict[str, None]()
    for record in records:
        if record.status == "finished":
            continue
        left = record.rounds - len(record.metrics())
        cost = costs.get(record.cell.name)
        if cost is None:
            unknown[record.cell.method] = None
            continue
        seconds += START + left * cost.seconds
        size += left * cost.bytes
    return Total(seconds, size, list(unknown))


def show_plan(board: Board, jobs: int, *, probe: bool = False, console: Console | None = None) -> None:
    """Every cell with its state and cost, and the sum of what is left.

    Args:
        board: the study.
        jobs: cells that run at a time.
        probe: whether to run a few rounds of each method that nothing is known of.
        console: where to print; default: standard output.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    costs = find_costs(board, probe)
    table = Table("cell", "state", "rounds", "minutes", "MB", "known from")
    for record in board.records:
        cost, figures = costs[record.cell.name], ["unknown", "unknown", ""]
        if cost:
            figures = [
                f"{record.rounds * cost.seconds / 60:.1f}",
                f"{record.rounds * cost.bytes / 1e6:.1f}",
                cost.source,
            ]
        table.add_row(record.cell.name, record.status, f"{len(record.metrics())}/{record.rounds}", *figures)
    console.print(table)
    for record in board.records:
        if record.problem:
            console.print(f"{record.cell.name}: {record.problem}", markup=False)
    rest = total(board.records, costs)
    left = len(board.records) - board.count("finished")
    about = (
        f"about {clock(rest.seconds / jobs)} (h:mm:ss) with --jobs {jobs} and "
        f"{rest.bytes / 1000000.0:.1f} MB over the wire"
    )
    if rest.unknown:  # what is known of the others is a lower bound, and of nothing it is no bound
        about = f"more than {about.removeprefix('about ')}" if rest.seconds else "time and bytes unknown"
    console.print(f"{board.study.name}: {len(board.records)} cells, {left} to run: {about}", markup=False)
    if rest.unknown:
        hint = "" if probe else f"; --probe true runs {PROBE} rounds of each to find out"
        console.print(
            f"not counted, since nothing is known of their cost: {', '.join(rest.unknown)}{hint}",
            markup=False,
        )


def find_costs(board: Board, probe: bool) -> dict[str, Cost | None]:
    """By name of cell; None where nothing is known."""
    probed: dict[tuple[str, ...], Cost | None] = {}
    costs = {}
    for record in board.records:
        cost = known_cost(board, record)
        if cost is None and probe:
            key = (record.cell.method, *record.cell.levels.values())
            cost = probed[key] = probed[key] if key in probed else probed_cost(record)
        costs[record.cell.name] = cost
    return costs
