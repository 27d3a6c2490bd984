"""What has become of every cell of a study: ``cells.json``, and the runs in the study's folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from fl_lightning.errors import InputError
from fl_lightning.probing import PROBES
from fl_lightning.run.directory import read_json, to_json
from fl_lightning.settings import flatten, settings_hash
from fl_lightning.study.results.run_records import find_run, read_cells, read_metrics
from fl_lightning.study.spec.plan import Cell, Study
from fl_lightning.support.disk import replace
from fl_lightning.support.redaction import redact_settings

log = logging.getLogger("fl_lightning")

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
        problem: what keeps a run that has ended from being counted, and what to do; or empty.
    """

    cell: Cell
    config: Mapping[str, Any]
    hash: str
    status: State = "waiting"
    run: Path | None = None
    threads: int = 0
    problem: str = ""

    @property
    def rounds(self) -> int:
        """Rounds that the run has when it is finished."""
        return int(self.config.get("trainer.max_rounds", 1))

    def find_run(self, folder: Path) -> None:
        """Look for the run of this cell and this configuration, and read how it ended."""
        if self.run is None:
            self.run = find_run(folder, self.cell.name, self.hash)
        if self.run is not None:
            status = read_json(self.run / "metadata.json").get("status")
            self.status = status if status in ("finished", "failed") else "interrupted"
            self.problem = ""
            if status == "finished" and not self.metrics():
                self.status = "failed"
                self.problem = (
                    f"{self.run}; it is finished, but its metrics.csv is missing or cannot be read; "
                    "put it back, or move the folder away and the cell is run again"
                )

    def is_tested(self, flags: Mapping[str, Any]) -> bool:
        """Whether the run, as it is now, has what ``test`` finds with these flags."""
        if self.run is None:
            return False
        found, run = read_json(self.run / "test.json"), read_json(self.run / "metadata.json")
        which = flags.get("checkpoint", "last")
        wanted = {*flags["probes"].split(",")} if "probes" in flags else {*PROBES}
        present = {
            "last": ("weights_sha256", "weights_sha256"),
            "best": ("round", "final/best_val_round"),
        }.get(which)
        same = present is None or found.get(present[0]) == run.get(present[1])
        return (
            found.get("chosen") == which
            and same
            and wanted <= {*found.get("probes", {}), *found.get("skipped", {})}
        )

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
                    resolved[key] = resolved_settings(cell.args, resolve)
                except InputError as error:
                    raise error.within(f"{study.path}, cell {cell.name}") from error
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


def resolved_settings(args: list[str], resolve: Callable[[list[str]], str]) -> dict[str, Any]:
    """The configuration that ``fit`` makes of these arguments, as it stands in the ``config.yaml`` of a
    run."""
    settings: dict[str, Any] = redact_settings(yaml.safe_load(resolve(args)))
    return settings
