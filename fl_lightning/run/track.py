"""The ``track`` command, which adds to an MLflow store whatever it lacks of runs on disk."""

from __future__ import annotations

import csv
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.config.documents import read_document
from fl_lightning.config.settings import flatten, is_number
from fl_lightning.errors import InputError, require
from fl_lightning.run.directory import RunDirectory, read_json, to_json
from fl_lightning.run.metadata import (
    is_time,
    is_tracked_elsewhere,
    milliseconds,
    round_times,
    tags_of,
    tracked_since,
)
from fl_lightning.run.paths import require_run
from fl_lightning.run.tables import cut_metrics, is_of_others, numbers
from fl_lightning.support.redaction import redact, redact_settings
from fl_lightning.tracking.loggers import as_params
from fl_lightning.tracking.mlflow_store import (
    Round,
    Status,
    absolute_uri,
    connect,
    default_uri,
    find_mlflow_run,
    has_run,
    is_missing,
    log_rounds,
    log_settings,
    logged_steps,
    mark_taken_back,
    open_run,
    reason,
    with_first_charts,
    with_ordered_times,
)

TRACKED_FILES = (
    "config.yaml",
    "metadata.json",
    "metrics.csv",
    "ledger.csv",
    "clients.csv",
    "partition.json",
    "test*.json",
)
# any other is KILLED
MLFLOW_STATUS: Mapping[str, Status] = {"finished": "FINISHED", "failed": "FAILED"}

log = logging.getLogger(__name__)


def _tests_in(
    run: Path, metadata: Mapping[str, Any], history: Sequence[Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Return what ``test`` has measured; a file that is damaged, or of weights that the run has not
    any more, is named in a warning."""
    found = []
    for file in sorted(run.glob("test*.json")):
        test = read_json(file)
        if not is_number(test.get("round")) or not isinstance(test.get("metrics"), Mapping):
            log.warning("%s cannot be read and is left out; test the run again", file)
        elif is_of_others(test, metadata, history):
            log.warning("%s is of other weights and is left out; test the run again", file)
        else:
            found.append(test)
    return found


@dataclass
class StoredRun:
    """The content of a run directory.

    Args:
        run: the directory.
        metadata: the content of ``metadata.json``.
        config: the content of ``config.yaml``.
        rounds: the metrics of each round, with the ``final/*`` metrics and those of ``test`` among
            them.
    """

    run: RunDirectory
    metadata: dict[str, Any]
    config: dict[str, Any]
    rounds: list[Round]

    @classmethod
    def read(cls, path: str) -> StoredRun:
        """Read a run directory; nothing is created in it.

        Raises:
            InputError: the path is not a run directory, or a file in it cannot be read.
        """
        run = RunDirectory(require_run(path))
        metadata = run.read_json("metadata.json")
        if not is_time(metadata.get("started")):  # written by an older release, or damaged
            metadata["started"] = datetime.fromtimestamp(run.created, timezone.utc).isoformat(
                timespec="milliseconds"
            )
        try:
            config = (
                yaml.safe_load(
                    read_document(run.path / "config.yaml", str(run.path / "config.yaml"))
                )
                or {}
            )
            if not isinstance(config, dict):
                raise ValueError("config.yaml holds no mapping")
            metrics = run.path / "metrics.csv"
            table = metrics.read_bytes() if metrics.exists() else b""
            if metadata.get("status") == "finished":
                cut = cut_metrics(table, metadata, flatten(config)) if table else "no metrics.csv"
                require(
                    not cut,
                    path,
                    f"the run is finished, but {cut}",
                    "put the file back (checkpoints/ has a copy)",
                )
            history = numbers(table)
            tags_of(metadata, run.path)
            rounds = cls._rounds(metadata, history, _tests_in(run.path, metadata, history))
        except InputError:
            raise
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            csv.Error,
            yaml.YAMLError,
        ) as error:
            shown = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(
                path,
                f"its config.yaml, metadata.json or metrics.csv cannot be read ({shown})",
                "put it back",
            ) from error
        return cls(run, metadata, config, rounds)

    @staticmethod
    def _rounds(
        metadata: Mapping[str, Any],
        history: Sequence[Mapping[str, float]],
        tests: Sequence[Mapping[str, Any]],
    ) -> list[Round]:
        last = int(history[-1]["round"]) if history else 0
        later: dict[int, dict[str, float]] = {
            last: {key: metadata[key] for key in metadata if key.startswith("final/")}
        }
        for test in tests:
            found = {**test.get("metrics", {}), **test.get("timings", {})}
            later[int(test["round"])] = {**found, **later.get(int(test["round"]), {})}
        # not in older releases
        primary = str(metadata["task"]["primary"]) if "task" in metadata else ""
        return [
            Round(
                step := int(row["round"]),
                {
                    **later.get(step, {}),
                    **with_first_charts({k: v for k, v in row.items() if k != "round"}, primary),
                },
                time,
            )
            for row, time in zip(history, round_times(metadata, history), strict=True)
        ]

    @property
    def status(self) -> Status:
        """The status that the run has in MLflow."""
        return MLFLOW_STATUS.get(self.metadata.get("status", ""), "KILLED")

    @property
    def ended(self) -> int:
        """When the run ended, in milliseconds since 1970; a killed run ended when it last wrote a
        round."""
        noted = self.metadata.get("finished" if self.status == "FINISHED" else "stopped")
        if noted:
            return milliseconds(noted)
        metrics = self.run.path / "metrics.csv"
        return round(
            1000 * (metrics if metrics.exists() else self.run.path / "config.yaml").stat().st_mtime
        )

    @property
    def files(self) -> list[tuple[Path, str]]:
        """The files that the store keeps, each with its folder there."""
        figures = sorted(
            path for path in self.run.figures.glob("*") if path.is_file() and not path.is_symlink()
        )
        return [
            (path, "") for name in TRACKED_FILES for path in sorted(self.run.path.glob(name))
        ] + [(path, "figures") for path in figures]


def track(run_dirs: list[str], uri: str | None = None) -> None:
    """Add to an MLflow store whatever it lacks of some runs.

    That is parameters, tags, metrics, files, status and times.

    Args:
        run_dirs: run directories; a run that another process is writing is refused.
        uri: address of the store; default: MLFLOW_TRACKING_URI, or sqlite:///mlflow.db.

    Raises:
        InputError: a directory holds no run, or the store does not accept it.
    """
    if not run_dirs:
        raise InputError(
            "track without a run",
            "run directories are needed",
            "write python -m fl_lightning track runs/EXPERIMENT/NAME",
        )
    address = absolute_uri(uri) if uri else default_uri()
    paths = [StoredRun.read(path).run.path for path in run_dirs]  # before anything is added
    for path in paths:
        run = RunDirectory(path)
        run.lock()
        try:
            # again, since another process may have gone on with it until it was locked
            one = StoredRun.read(str(path))
            missing, run_id = add_missing(one, address)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"--uri {redact(address)}",
                f"MLflow there does not take {path} ({reason(error)})",
                "make it reachable and writable, or name another one",
            ) from error
        finally:
            run.unlock()
        sys.stdout.write(
            f"{path}: {missing} of {len(one.rounds)} rounds were missing; "
            f"run {run_id} at {redact(address)}\n"
        )


def add_missing(stored: StoredRun, uri: str) -> tuple[int, str]:
    """Add to the store whatever it lacks of a run, and note in ``metadata.json`` that it is
    complete there.

    Returns:
        How many rounds were missing, and the id of the run in the store.
    """
    run, metadata = stored.run, stored.metadata
    tags, started = {"run_dir": str(run.path)}, tracked_since(metadata)
    known_id = find_in_store(stored, uri)
    logger: Any = open_run(uri, run.path.parent.name, run.path.name, known_id, tags, started)
    client, run_id = logger.experiment, logger.run_id
    tags = {key: str(value) for key, value in redact_settings(tags_of(metadata, run.path)).items()}
    if "mlflow.parentRunId" in tags and not has_run(client, tags["mlflow.parentRunId"]):
        del tags["mlflow.parentRunId"]  # the study's own run is in another store
    log_settings(client, run_id, as_params(redact_settings(stored.config)), tags)
    mark_taken_back(client, metadata.get("former_tracking_runs", ()))
    known = logged_steps(client, run_id)
    seen = {step for name, steps in known.items() if "final/" not in name for step in steps}
    log_rounds(logger, with_ordered_times(stored.rounds, known), known)
    note_tracked(stored, uri, run_id)
    copy_files(client, run_id, stored.files)
    info = client.get_run(run_id).info
    if (info.status, info.end_time) != (stored.status, stored.ended):
        client.set_terminated(run_id, stored.status, stored.ended)
    return sum(round.step not in seen for round in stored.rounds), run_id


def find_in_store(stored: StoredRun, uri: str) -> str | None:
    """Return the id of the run in the store; None if the store does not have it.

    It is the id in ``metadata.json`` if the store knows it, else that of the run tagged with this
    directory, unless its method or seed is another one: the directory has held another run then.
    """
    if is_missing(uri):
        return None
    noted, path = stored.metadata.get("tracking_run_id"), stored.run.path
    if noted and not is_tracked_elsewhere(stored.metadata, path) and has_run(connect(uri), noted):
        return str(noted)
    since = tracked_since(stored.metadata) / 1000
    former = stored.metadata.get("former_tracking_runs", ())
    known = {name: str(stored.metadata[name]) for name in ("method", "seed")}
    return find_mlflow_run(uri, path.parent.name, "run_dir", str(path), since, former, known)


def note_tracked(stored: StoredRun, uri: str, run_id: str) -> None:
    """Note in ``metadata.json`` the id of a run that had none, and that the store lacks no rounds.

    The file keeps its modification time, which tells when the run ended, and whatever else it has.
    """
    metadata = stored.run.read_json("metadata.json")
    before = to_json(metadata)
    if not metadata.get("tracking_run_id") or is_tracked_elsewhere(metadata, stored.run.path):
        metadata |= {"tracking_run_id": run_id, "tracking_run_dir": str(stored.run.path)}
    lacking = metadata.pop("untracked_rounds", {})
    left = {
        name: rounds
        for name, rounds in lacking.items()
        if absolute_uri(name.removeprefix("MLflow at ")) != redact(uri)
    }
    if left:
        metadata["untracked_rounds"] = left
    path = stored.run.path / "metadata.json"
    if to_json(metadata) != before:
        with suppress(OSError):  # the user may read the run and not write it
            time = path.stat().st_mtime_ns
            stored.run.write_json("metadata.json", metadata)
            os.utime(path, ns=(time, time))


def copy_files(client: Any, run_id: str, files: Sequence[tuple[Path, str]]) -> None:
    """Copy to the store the files that it lacks or that differ there; each comes with its folder
    there."""
    sizes = {
        entry.path: entry.file_size
        for folder in ("", "figures")
        for entry in client.list_artifacts(run_id, folder or None)
    }
    with tempfile.TemporaryDirectory() as aside:
        for path, folder in files:
            name = f"{folder}/{path.name}" if folder else path.name
            if sizes.get(name) == path.stat().st_size:
                there = Path(client.download_artifacts(run_id, name, aside))
                if there.read_bytes() == path.read_bytes():
                    continue
            client.log_artifact(run_id, str(path), folder or None)
