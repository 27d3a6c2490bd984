"""Runs on ranks: programs that are started, and what of a run does not depend on them."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import ranks_program

PROGRAM = ranks_program.__file__


def started(
    *arguments: str | Path, launcher: tuple[str, ...] = (), program: str = PROGRAM
) -> subprocess.Popen:
    unset = ("LOCAL_RANK", "WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR", "NODE_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | {
        "OMP_NUM_THREADS": "1"
    }
    command = [sys.executable, *launcher, program, *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def result(run: Path) -> tuple[str, list[dict[str, str]], str]:
    """Hash of the weights, metrics without timings, ledger."""
    with (run / "metrics.csv").open() as file:
        rows = [
            {name: cell for name, cell in row.items() if not name.startswith("time/")}
            for row in csv.DictReader(file)
        ]
    return (
        json.loads((run / "metadata.json").read_text())["weights_sha256"],
        rows,
        (run / "ledger.csv").read_text(),
        (run / "clients.csv").read_text(),
    )
