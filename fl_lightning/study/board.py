"""What has become of every cell of a study: ``cells.json``, and the runs in the study's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from fl_lightning.disk import replace
from fl_lightning.errors import InputError
from fl_lightning.redaction import redact_settings
from fl_lightning.run_directory import numbered, read_json, to_json
from fl_lightning.settings import config_of, flatten, settings_hash
from fl_lightning.study.plan import Cell, Study
from fl_lightning.tables import numbers

State = Literal["waiting", "running", "interrupted", "finished", "failed"]


@dataclass
class Record:
    """A cell and its run.

    Args:
        cell: which.
        config: its resolved configuration, with dotted keys.
        hash: of what counts in it.
        status: ``waiting``: never started; ``interrupted``: it continues where it stopped.
        run: folder of its run, once there is one.
        threads: threads of its process; the same in every session, since they change how sums are rounded.
    """

    cell: Cell
    config: Mapping[str, Any]
    hash: str
    status: State = "waiting"
    run: Path | None = None
    threads: int = 0

    @property
    def rounds(self) -> int:
        """Rounds that the run has when it is finished."""
        return int(self.config.get("trainer.max_rounds", 1))

    def find_run(self, folder: Path) -> None:
        """Look for the run of this cell and this configuration, and read how it ended."""
        if self.run is None:
            candidates = [run for run in numbered(folder, self.cell.name) if (run / "config.yaml").exists()]
            self.run = next((run for run in candidates if settings_hash(config_of(run)) == self.hash), None)
        if self.run is not None:
            status = read_json(self.run / "metadata.json").get("status")
            self.status = status if status in ("finished", "failed") else "interrupted"

    def is_tested(self, flags: Mapping[str, Any]) -> bool:
        """Whether the run has what ``test`` finds with these flags."""
        found = read_json(self.run / "test.json") if self.run else {}
        wanted = flags.get("probes", "")
        return bool(found) and {*wanted.split(",")} - {""} <= {*found.get("probes", {}), *found.get("skipped", {})}

    def metrics(self) -> list[dict[str, float]]:
        """The rounds that its run has recorded so far."""
        return read_metrics(self.run)


class Board:
    """All records of a study, in the order in which they are run.

    Args:
        study: the study.
        folder: of its runs.
        records: one a cell.
    """

    def __init__(self, study: Study, folder: Path, records: list[Record]) -> None:
        self.study, self.folder, self.records = study, folder, records

    @classmethod
    def plan(cls, study: Study, root: Path, resolve: Callable[[list[str]], str]) -> Board:
        """Resolve every cell and look for its run; nothing is created.

        Raises:
            InputError: ``fit`` would refuse a cell; the message begins with its name.
        """
        folder = root / study.name
        resolved: dict[tuple[str, ...], Any] = {}  # by method and levels: the seed changes one entry
        records = []
        for cell in study.cells():
            key = (cell.method, *cell.levels.values())
            if key not in resolved:
                try:
                    resolved[key] = redact_settings(yaml.safe_load(resolve(cell.args)))
                except InputError as error:
                    raise InputError(f"{study.path}, cell {cell.name}: {error}") from error
            config = flatten(resolved[key] | {"seed_everything": cell.seed})
            records.append(Record(cell, config, settings_hash(config)))
        known = read_cells(folder)
        for record in records:
            record.threads = int(known.get(record.cell.name, {}).get("threads", 0))
            record.find_run(folder)
        return cls(study, folder, records)

    def __getitem__(self, name: str) -> Record:
        return next(record for record in self.records if record.cell.name == name)

    def count(self, *states: State) -> int:
        return sum(record.status in states for record in self.records)

    def write(self) -> None:
        """``cells.json``."""
        entries = [
            {
                "name": record.cell.name,
                "label": record.cell.method,
                "seed": record.cell.seed,
                "levels": dict(record.cell.levels),
                "hash": record.hash,
                "status": record.status,
                "run": record.run.name if record.run else None,
                "threads": record.threads,
            }
            for record in self.records
        ]
        replace(self.folder / "cells.json", to_json(entries).encode())


def read_cells(folder: Path) -> dict[str, dict[str, Any]]:
    """What a study's ``cells.json`` says of each cell, by name; empty when it cannot be read."""
    try:
        return {entry["name"]: entry for entry in json.loads((folder / "cells.json").read_bytes())}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def read_metrics(run: Path | None) -> list[dict[str, float]]:
    """The rounds in a run's ``metrics.csv``; empty when there is none. It may be in the middle of being written."""
    if run is None:
        return []
    try:
        return numbers((run / "metrics.csv").read_bytes())
    except (OSError, ValueError):
        return []
