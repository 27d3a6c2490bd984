"""The state of every cell of a study: ``cells.json``, and the runs in the study's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from hashlib import sha256
from itertools import pairwise
from os.path import expanduser
from pathlib import Path
from typing import Any, Literal

import yaml

from fl_lightning.config.packaged import layers
from fl_lightning.config.settings import (
    changed_settings,
    flatten,
    is_under,
    listed_changes,
    settings_hash,
)
from fl_lightning.errors import InputError, require
from fl_lightning.probing import select_probes
from fl_lightning.run.directory import read_json, to_json
from fl_lightning.study.execute.lock import one_writer
from fl_lightning.study.execute.shards import WHOLE, Shard
from fl_lightning.study.plan.study import Cell, Study
from fl_lightning.study.results.run_records import (
    find_run,
    read_cells,
    read_directory,
    read_metrics,
)
from fl_lightning.support.disk import replace
from fl_lightning.support.redaction import redact_settings
from fl_lightning.support.user_code import changed_code

Status = Literal["waiting", "running", "interrupted", "finished", "failed"]


@dataclass
class CellState:
    """A cell and its run.

    Args:
        cell: the cell.
        config: its resolved configuration, with dotted keys.
        hash: the hash of the settings that count.
        status: ``waiting``: never started; ``interrupted``: it continues where it stopped.
        run: the folder of its run, once there is one.
        threads: the threads of its process; the same in every session, since they change how sums
            are rounded.
        problem: what keeps a run that has ended from being counted, and what to do; or empty.
        changed: modules of the user whose files are others now than when the run, or a part of it,
            was trained.
        content: the hash of the examples on which a finished run was trained, where it has one.
        files: the SHA-256 of each configuration file that ``config`` was read from.
    """

    cell: Cell
    config: Mapping[str, Any]
    hash: str
    status: Status = "waiting"
    run: Path | None = None
    threads: int = 0
    problem: str = ""
    changed: Sequence[str] = ()
    content: str = ""
    files: Mapping[Path, str] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """The rounds that the run has when it is finished."""
        return int(self.config.get("trainer.max_rounds", 1))

    def find_run(self, folder: Path) -> None:
        """Look for the run of this cell and this configuration, and read how it ended."""
        if self.run is None:
            self.run = find_run(folder, self.cell.name, self.hash)
        if self.run is not None:
            metadata = read_json(self.run / "metadata.json")
            status, threads = metadata.get("status"), metadata.get("threads")
            if not self.threads and isinstance(threads, int):
                # of a folder that was copied without the cells.json of its sweep
                self.threads = threads
            self.status = status if status in ("finished", "failed") else "interrupted"
            now = changed_code(metadata.get("code") or {})
            self.problem, self.changed = "", sorted({*now, *_changed_on_the_way(metadata)})
            self.content = metadata.get("content_sha256") or "" if status == "finished" else ""
            problem = read_directory(self.run).problem if status == "finished" else ""
            if problem:  # for which ``compare`` does not count it
                self.status = "failed"
                self.problem = (
                    f"{self.run} is finished, but {problem}; put its files back (checkpoints/ has a "
                    "copy of metrics.csv), or move the folder away and the cell is run again"
                )

    def is_tested(self, flags: Mapping[str, Any]) -> bool:
        """Return whether the run, as it is now, has what ``test`` finds with these flags."""
        if self.run is None:
            return False
        found, run = read_json(self.run / "test.json"), read_json(self.run / "metadata.json")
        checkpoint = flags.get("checkpoint", "last")
        same = {
            "last": found.get("weights_sha256") == run.get("weights_sha256"),
            "best": found.get("round") == run.get("final/best_val_round"),
        }.get(checkpoint, True)
        wanted = {*select_probes(flags.get("probes"))}
        done = {*found.get("probes", {}), *found.get("skipped", {})}
        return found.get("chosen") == checkpoint and same and wanted <= done

    def metrics(self) -> list[dict[str, float]]:
        """Return the rounds that its run has recorded so far."""
        return read_metrics(self.run)


class StudyCells:
    """The states of the cells of a study, in the order in which they are run.

    Args:
        study: the study.
        folder: the folder of its runs.
        resolve: turns arguments of ``fit`` into the whole configuration.
        shard: the part of the study that is run.
        states: one a cell of this shard.
        every: the states of all cells of the study, in its order; those of other shards too.
        others: the names of the cells of other shards.
    """

    def __init__(
        self, study: Study, folder: Path, resolve: Callable[[list[str]], str], shard: Shard
    ) -> None:
        self.study, self.folder, self.resolve, self.shard = study, folder, resolve, shard
        self.states, self.every, self.others = list[CellState](), list[CellState](), set[str]()
        self._known = read_cells(folder)
        # by method and levels: the seed changes one entry
        self._resolved: dict[tuple[str, ...], Any] = {}

    @classmethod
    def plan(
        cls, study: Study, root: Path, resolve: Callable[[list[str]], str], shard: Shard = WHOLE
    ) -> StudyCells:
        """Resolve every cell and look for its run; nothing is created.

        Of a study that adds seeds until its criteria are decided, these are the cells of the seeds
        that it lists and of those that were begun.

        Raises:
            InputError: ``fit`` would refuse a cell; the message begins with its name.
        """
        cells = cls(study, Path(expanduser(root)) / study.name, resolve, shard)
        begun = {entry.get("seed") for entry in cells._known.values()}
        count = max(
            i + 1 for i, seed in enumerate(study.seed_order) if seed in {*study.seeds, *begun}
        )
        for seed in study.seed_order[:count]:
            cells.add_seed(seed)
        return cells

    def add_seed(self, seed: int) -> list[CellState]:
        """Add the cells of one more seed, look for the runs of those of this shard, and return
        them.

        Raises:
            InputError: ``fit`` would refuse a cell; the message begins with its name.
        """
        states, cells = [], replaced(self.study, seeds=[seed]).cells()
        own = self.shard.names(cells)
        for cell in cells:
            key = (cell.method, *cell.levels.values())
            if key not in self._resolved:
                self._resolved[key] = config_files(cell.args), self._resolve(cell)
            files, settings = self._resolved[key]
            config = flatten(settings | {"seed_everything": cell.seed})
            threads = self._known.get(cell.name, {}).get("threads")
            threads = threads if isinstance(threads, int) else 0
            state = CellState(cell, config, settings_hash(config), threads=threads, files=files)
            self.every.append(state)
            if cell.name in own:
                state.find_run(self.folder)
                states.append(state)
            else:
                self.others.add(cell.name)
        self.states += states
        return states

    def check_config(self, state: CellState) -> None:
        """Check that ``fit`` still makes the configuration of a cell of its arguments.

        Raises:
            InputError: a configuration file has other settings now.
        """
        if config_files(state.cell.args) != state.files:
            changed = changed_settings(state.config, flatten(self._resolve(state.cell)))
            require(
                not changed,
                f"{self.study.path}, cell {state.cell.name}",
                f"its configuration has changed since this sweep began ({listed_changes(changed)})",
                "restore the files, or leave them so, and give the command again",
            )

    def _resolve(self, cell: Cell) -> dict[str, Any]:
        try:
            return resolved_settings(cell.args, self.resolve)
        except InputError as error:
            raise error.within(f"{self.study.path}, cell {cell.name}") from error

    def of_seed(self, seed: int) -> list[CellState]:
        """Return the cells of a seed; none when the seed was not added."""
        return [state for state in self.states if state.cell.seed == seed]

    def __getitem__(self, name: str) -> CellState:
        return next(state for state in self.states if state.cell.name == name)

    def __iter__(self) -> Iterator[CellState]:
        return iter(self.states)

    def count(self, status: Status) -> int:
        return sum(state.status == status for state in self.states)

    def stale(self) -> tuple[list[str], list[str]] | None:
        """Return the finished cells, by name, that other versions of a user's modules have trained,
        and these modules; None where there are none."""
        stale = [state for state in self.states if state.changed and state.status == "finished"]
        modules = sorted({name for state in stale for name in state.changed})
        return ([state.cell.name for state in stale], modules) if stale else None

    def check_content(self) -> None:
        """Check that the finished cells with the same settings of the data were trained on the same
        examples; else ``compare`` refuses them.

        Raises:
            InputError: two were not.
        """
        first: dict[str, CellState] = {}
        for state in self.every:
            if not state.content:  # not finished, or of images known by a name, in runs of before
                continue
            data = [item for item in sorted(state.config.items()) if is_under(item[0], ["data"])]
            other = first.setdefault(str(data), state)
            require(
                state.content == other.content,
                f"{other.cell.name} and {state.cell.name} in {self.folder}",
                "they were trained on different examples, and cannot be compared",
                "restore the data of before, move the runs on other examples away and start again",
            )

    def problems(self) -> list[str]:
        """Return what the user must do before some cells can be run, or run again."""
        problems = [f"{state.cell.name}: {state.problem}" for state in self.states if state.problem]
        if stale := self.stale():
            cells, modules = map(", ".join, stale)
            problems.append(
                f"{cells}: trained with another {modules}; "
                "move their runs away, or take another label, to train them again"
            )
        return problems

    def left_to_others(self) -> int:
        """Return how many cells of other shards have no finished run in this folder."""
        others = [state for state in self.every if state.cell.name in self.others]
        for state in others:
            state.find_run(self.folder)
        return sum(state.status != "finished" for state in others)

    def write(self) -> None:
        """Write ``cells.json``; what another shard has written there of a cell of its own stays."""
        with one_writer(self.folder, self.shard):
            there = read_cells(self.folder) if self.others else {}
            entries = []
            for state in self.every:
                entry = there.get(state.cell.name, {}) if state.cell.name in self.others else {}
                entries.append(entry if entry.get("hash") == state.hash else _entry(state))
            replace(self.folder / "cells.json", to_json(entries).encode())


def _changed_on_the_way(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield the modules of the user of which another version than at its end trained some rounds of
    a run."""
    code, sessions = metadata.get("code") or {}, metadata.get("resumed") or []
    for number, session in enumerate(sessions):
        kept = min(each.get("after_round", 0) for each in sessions[number:])
        before = session.get("code_before") or {} if kept else {}
        yield from (name for name, sha in before.items() if code.get(name, sha) != sha)


def _entry(state: CellState) -> dict[str, Any]:
    """Return what ``cells.json`` says of a cell."""
    return {
        "name": state.cell.name,
        "label": state.cell.method,
        "seed": state.cell.seed,
        "levels": dict(state.cell.levels),
        "hash": state.hash,
        "status": state.status,
        "run": state.run.name if state.run else None,
        "threads": state.threads if state.run else 0,  # those of a first start to come are open
    }


def resolved_settings(args: list[str], resolve: Callable[[list[str]], str]) -> dict[str, Any]:
    """Return the configuration that ``fit`` makes of these arguments, as the ``config.yaml`` of a
    run has it."""
    settings: dict[str, Any] = redact_settings(yaml.safe_load(resolve(args)))
    return settings


def config_files(args: Sequence[str]) -> dict[Path, str]:
    """Return the SHA-256 of each configuration file that arguments of ``fit`` name, and of those
    that they are based on; of a file that is not there, that of an empty one."""
    named = (Path(name) for flag, name in pairwise(args) if flag == "--config")
    return {
        file: sha256(file.read_bytes() if file.is_file() else b"").hexdigest()
        for path in named
        for file in layers(path)
    }
