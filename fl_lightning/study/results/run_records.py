"""The records of runs, read from their directories or from MLflow, finished or not."""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isclose, isnan
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fl_lightning.config.recorded import not_recorded
from fl_lightning.config.settings import config_of, is_free, is_number, settings_hash
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.metrics.summary import final_summary
from fl_lightning.run.checkpoint import CheckpointError, load_document
from fl_lightning.run.clients import FILE as CLIENTS
from fl_lightning.run.directory import numbered
from fl_lightning.run.paths import checkpoints_in
from fl_lightning.run.tables import CsvTable, cut_metrics, is_of_others, numbers
from fl_lightning.study.metric_names import TaskMetrics

log = logging.getLogger("fl_lightning")

PROBED = (
    *(
        "corrupted/",
        "typos/",
        "fgsm/",
        "pgd/",
        "calibration/",
        "cost/",
        "latency/",
        "memory/",
        "kind/",
    ),
    *("membership/", "inversion/"),
)
"""The beginnings of metrics that ``test`` alone measures."""
UNREADABLE = (OSError, ValueError, AttributeError, TypeError, RecursionError, csv.Error)
"""What reading a damaged file raises."""
ROUNDING = 1e-9
"""The largest relative difference between a number in ``metadata.json`` and the same one computed
anew from ``metrics.csv`` that is taken for rounding."""


class Tested(NamedTuple):
    """What ``test`` measured of one checkpoint.

    Args:
        metrics: by name.
        checkpoint: the one that it was told to take: ``last``, ``best`` or a name.
        round: the round of that checkpoint; None: nothing was tested.
        weights: SHA-256 of its weights; None: not known.
        recorded: what training had measured of that round, by name.
    """

    metrics: Mapping[str, float] = MappingProxyType({})
    checkpoint: str = "last"
    round: Any = None
    weights: str | None = None
    recorded: Mapping[str, float] = MappingProxyType({})

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Tested:
        """Return the content of a ``test.json``."""
        metrics = _numbers({**document.get("metrics", {}), **document.get("timings", {})})
        chosen, recorded = str(document.get("chosen", "last")), document.get("recorded", {})
        known = document.get("weights_sha256")
        return cls(metrics, chosen, document.get("round"), known, _numbers(recorded))

    @property
    def is_there(self) -> bool:
        """Whether something was tested, also where all that was asked could only be skipped."""
        return self.round is not None


@dataclass(frozen=True)
class RunRecord:
    """What was read of a run, finished or not.

    Args:
        name: the name of its folder, or its name in MLflow.
        where: the folder, or the run's id in MLflow.
        metadata: what ``metadata.json`` says.
        history: a row of metrics per round.
        test: what ``test`` has measured, the last time that it ran.
        problem: why the run cannot be counted, or empty.
        settings: its configuration, with dotted keys.
        typed: whether the settings have their types, as in ``config.yaml``; in MLflow all are text,
            and have no hash.
        clients: the text of ``clients.csv``; empty where there is none.
        older_tests: what ``test`` has measured of other checkpoints.
        test_problem: why what it measured last cannot be read; or empty.
    """

    name: str
    where: str
    metadata: Mapping[str, Any]
    history: list[dict[str, float]]
    test: Tested = field(default_factory=Tested)
    problem: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    typed: bool = True
    clients: str = ""
    older_tests: Sequence[Tested] = ()
    test_problem: str = ""

    @property
    def tags(self) -> Mapping[str, Any]:
        return self.metadata.get("tags") or {}

    def tested_at(self, round: float) -> RunRecord:
        """Return the record with what ``test`` measured of a round in the place of its last test,
        if that was of another round; that one is then among the older ones, before the others."""
        older = next((one for one in self.older_tests if one.round == round), None)
        if self.test.round == round or older is None:
            return self
        kept = [one for one in self.without_test().older_tests if one is not older]
        return replace(self, test=older, older_tests=kept)

    def without_test(self) -> RunRecord:
        """Return the record without its last test, which is then among the older ones."""
        older = [one for one in (self.test, *self.older_tests) if one.is_there]
        return replace(self, test=Tested(), older_tests=older)

    @property
    def is_test_of_others(self) -> bool:
        """Whether the round that ``test`` took has been made anew since, with other weights."""
        recorded, weights = self.test.recorded, self.test.weights
        test = {"round": self.test.round, "weights_sha256": weights, "recorded": recorded}
        return is_of_others(test, self.metadata, self.history)


def read_folder(folder: Path) -> list[RunRecord]:
    """Read every run directly in ``folder``, by name, also those that are damaged or still going
    on."""
    return [read_directory(path) for path in _run_directories(folder)]


def runs_in(folder: Path) -> int:
    """Return how many runs there are directly in ``folder``, whatever their state."""
    return len(_run_directories(folder)) if folder.is_dir() else 0


def _run_directories(folder: Path) -> list[Path]:
    paths = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    # one that cannot be looked into may be a run, and is named then
    return sorted(
        path
        for path in paths
        if not os.access(path, os.X_OK)
        or any((path / name).exists() for name in ("metadata.json", "config.yaml"))
    )


def read_directory(path: Path) -> RunRecord:
    """Read one run directory."""
    metadata: dict[str, Any] = {}
    history: list[dict[str, float]] = []
    file = "metadata.json"
    try:
        metadata = _mapping(path / file)
        file = "metrics.csv"
        table = (path / file).read_bytes() if (path / file).exists() else b""
        history = numbers(table)
        older = [_test_in(other)[0] for other in sorted(path.glob("test_round_*.json"))]
        file = "config.yaml"
        clients = _text(path / CLIENTS)
        settings = config_of(path) if (path / file).exists() else {}
        unknown = _not_recorded(settings)
    except UNREADABLE as error:
        wrong = f"{file} {_unreadable(error)}"
        return RunRecord(path.name, str(path), metadata, [], problem=wrong)
    tested, test_problem = _test_in(path / "test.json")
    wrong = (
        problem(metadata, history)
        or _changed_metrics(path, history)
        or cut_metrics(table, metadata, settings)
        or _changed_metadata(metadata, history, settings)
        or unknown
    )
    return RunRecord(
        path.name,
        str(path),
        metadata,
        history,
        tested,
        wrong,
        settings,
        clients=clients,
        older_tests=older,
        test_problem=test_problem,
    )


def _test_in(file: Path) -> tuple[Tested, str]:
    """Return what ``test`` has measured, and why that cannot be read, or empty."""
    try:
        return Tested.of(_mapping(file) if file.exists() else {}), ""
    except UNREADABLE as error:
        return Tested(), f"it {_unreadable(error)}; test it again"


def _unreadable(error: BaseException) -> str:
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def from_store(entry: Mapping[str, Any]) -> RunRecord:
    """Convert one entry of :func:`fl_lightning.tracking.runs.read_runs`.

    There, what ``test`` measured is among the metrics, at the round of its checkpoint.
    """
    metadata = entry["metadata"]
    # charts of MLflow alone are second copies
    history = [
        {name: value for name, value in row.items() if not name.startswith("Main/")}
        for row in entry["history"]
    ]
    points: dict[str, list[tuple[Any, float]]] = {}
    for row in history:
        for name, value in row.items():
            if name.startswith(PROBED) or name in ("test/ece", "test/brier"):
                points.setdefault(name, []).append((row["round"], value))
    probed = {
        name: found[-1]
        for name, found in points.items()
        if len(found) == 1 or name.startswith(PROBED)
    }
    rounds = {round for round, _ in probed.values()}
    last = history[-1]["round"] if history else None
    measured = {name: value for name, (_, value) in probed.items()}
    return RunRecord(
        entry["name"],
        entry["id"],
        metadata,
        [{name: value for name, value in row.items() if name not in probed} for row in history],
        Tested(measured, round=last if rounds <= {last} else min(rounds - {last})),
        problem(metadata, history),
        entry["settings"],
        entry["typed"],
        entry.get("clients", ""),
    )


def _text(path: Path) -> str:
    """Return the text of a file; empty where it is missing, or cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""


def _mapping(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict):
        raise ValueError("it holds no mapping")
    return document


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if is_number(value)}


def _changed_metrics(run: Path, history: Sequence[Mapping[str, float]]) -> str:
    """Return that the rounds in ``metrics.csv`` are not those that the run wrote, by the hash in
    its newest checkpoint that can be read; empty where they are, and for a run without
    checkpoints."""
    table = CsvTable(run / "metrics.csv", run / "metrics.csv")
    for checkpoint in checkpoints_in(run / "checkpoints"):
        with suppress(CheckpointError, KeyError, TypeError, OSError):
            mark = load_document(checkpoint, "progress")["tables"]["metrics"]
            if table.holds(mark):
                if mark["rows"] != len(history):
                    return (
                        f"metrics.csv has {len(history)} rounds, and its newest checkpoint is "
                        f"{checkpoint.name}: nothing says that the later ones are the run's; fit "
                        "with its config.yaml and --ckpt_path makes them anew"
                    )
                return ""
            return (
                f"metrics.csv was changed since the run wrote it, by its SHA-256 in checkpoints/"
                f"{checkpoint.name}; checkpoints/metrics.csv is its copy"
            )
    return ""


def _changed_metadata(
    metadata: Mapping[str, Any], history: Sequence[Mapping[str, float]], settings: Mapping[str, Any]
) -> str:
    """Return what ``metadata.json`` has that is not what the rounds, or ``config.yaml``, say; empty
    where nothing is."""
    seed = settings.get("seed_everything")
    if type(seed) is int and seed != metadata["seed"]:
        return f"metadata.json has seed {metadata['seed']}, and config.yaml {seed}"
    task = TaskMetrics.of_run(metadata)
    measured = {name: value for row in history for name, value in row.items()}
    found = {f"final/{name[5:]}": value for name, value in measured.items() if name[:5] == "test/"}
    try:
        found |= final_summary(
            history,
            task.primary,
            higher_is_better=task.higher_is_better,
            is_share=task.primary in task.shares,
        )
    except MisuseError as error:
        return f"metrics.csv: {error.given}"
    for name in found.keys() & metadata.keys():
        both = float(metadata[name]), float(found[name])
        if not isclose(*both, rel_tol=ROUNDING) and not all(map(isnan, both)):
            return f"metadata.json has {name} {both[0]:.6g}, and metrics.csv gives {both[1]:.6g}"
    return ""


def _not_recorded(settings: Mapping[str, Any]) -> str:
    """Return why runs with these settings cannot be told apart from others; empty where they
    can."""
    if not settings:
        return "its settings were not recorded: config.yaml is missing or empty"
    unknown = [key for key in not_recorded(settings) if not is_free(key, settings)]
    return f"{unknown[0]} cannot be recorded ({settings[unknown[0]]})" if unknown else ""


MAPPINGS = ("tags", "git", "versions", "code", "task")
LISTS = {"resumed": Mapping, "command_line": str}
"""Entries of ``metadata.json`` that are mappings, and lists of mappings or texts; empty ones may be
anything."""


def _of_another_form(metadata: Mapping[str, Any]) -> str:
    """Return the name of an entry that is there and is not what a run writes; empty: there is
    none."""
    given = {name: value for name, value in metadata.items() if value}
    for name in MAPPINGS:
        if not isinstance(given.get(name, {}), Mapping):
            return name
    lists = {**given, "task": given.get("task", {}).get("shares") or []}
    for name, kind in {**LISTS, "task": str}.items():
        found = lists.get(name, [])
        if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
            return name
    return ""


def problem(metadata: Mapping[str, Any], history: list[dict[str, float]]) -> str:
    """Return why a run cannot be counted; empty when it can."""
    status = metadata.get("status")
    rounds = [row.get("round") for row in history]
    if status != "finished":
        return f"not finished: {status}, {len(rounds)} rounds done"
    if not rounds:
        return "it has no rounds"
    if rounds != list(range(1, len(rounds) + 1)):
        return "metrics.csv does not hold every round once"
    if not isinstance(metadata.get("seed"), int) or not metadata.get("partition_sha256"):
        return "metadata.json has no seed, or no hash of the partition"
    if wrong := _of_another_form(metadata):
        return f"metadata.json has something else as {wrong} than a run writes"
    texts = [
        name
        for name, value in metadata.items()
        if name.startswith("final/") and not is_number(value)
    ]
    return f"metadata.json has no number as {texts[0]}" if texts else ""


def find_run(folder: Path, name: str, hash: str) -> Path | None:
    """Return the latest run called ``name``, ``name-2`` ... whose settings have this hash.

    It is the run that ``fit`` would continue. A run whose ``config.yaml`` cannot be read is named
    in a warning.
    """
    for run in numbered(folder, name):
        try:
            if (run / "config.yaml").exists() and settings_hash(config_of(run)) == hash:
                return run
        except (InputError, RecursionError) as error:
            log.warning("not looked at: %s", " ".join(str(error).split()) or run)
    return None


def read_cells(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a study's ``cells.json`` says of each cell, by name; empty when it cannot be
    read."""
    try:
        return {entry["name"]: entry for entry in json.loads((folder / "cells.json").read_bytes())}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def read_metrics(run: Path | None) -> list[dict[str, float]]:
    """Return the rounds in a run's ``metrics.csv``; empty when it cannot be read.

    It may be in the middle of being written.
    """
    if run is None:
        return []
    try:
        return numbers((run / "metrics.csv").read_bytes())
    except (OSError, ValueError, TypeError, csv.Error):
        # TypeError: a row that is longer than the header
        return []
