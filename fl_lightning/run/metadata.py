"""The content of ``metadata.json``: what a run computes, on what, when, and how it ended.

Environment variables are not part of it, since they may hold secrets.
"""

from __future__ import annotations

import logging
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fl_lightning.data import FederatedData
from fl_lightning.federation import Federation
from fl_lightning.methods import Method
from fl_lightning.metrics.declared import Emitter, declared_by
from fl_lightning.models.recipe import recipe_of
from fl_lightning.run.directory import RunName, read_json
from fl_lightning.support.redaction import redact_arguments
from fl_lightning.support.user_code import code_of
from fl_lightning.tasks import Task

log = logging.getLogger("fl_lightning")

PACKAGES = (
    "fl_lightning",
    "torch",
    "torchvision",
    "timm",
    "lightning",
    "torchmetrics",
    "jsonargparse",
    "mlflow",
    "numpy",
    "transformers",
    "peft",
)


def describe_run(
    fed: Federation, engine: str, identity: Mapping[str, Any], command_line: Sequence[str]
) -> dict[str, Any]:
    """Return the metadata of a run that begins now on this machine.

    Args:
        fed: the federation that is trained.
        engine: name of the engine that trains it.
        identity: SHA-256 of what the results rest on beside the configuration, by name.
        command_line: the words of the command that started the run; secrets in it are hidden.
    """
    return {
        "seed": fed.seed,
        "method": type(fed.method).__name__,
        "dataset": dataset_of(fed.data),
        "task": task_of(fed.data.task, (fed.method, *fed.callbacks)),
        "constant_guess": fed.data.task.constant_guess(fed.data.test_target),
        "git": git_state(),
        "versions": versions(),
        "code": code_of(fed, *fed.callbacks, *parts_of(fed)) | code_of_model(fed),
        "command_line": redact_arguments(list(command_line)),
        "device": str(fed.fabric.device),
        "engine": engine,
        "processes": fed.fabric.world_size,
        "threads": torch.get_num_threads(),
        "precision": fed.fabric.strategy.precision.precision,
        "started": now(),
        **{f"{name}_sha256": value for name, value in identity.items() if name != "constants"},
        **{f"costs_{name}": value for name, value in fed.method.measured_by.items()},
        "weights_sha256": None,
        "status": "running",
        "tracking_run_id": None,
    }


def parts_of(fed: Federation) -> Iterator[object]:
    """Yield what has parts of a federation, such as devices, staleness and a graph."""
    yield fed.aggregation
    if fed.timing is not None:
        yield from (fed.timing.clock, fed.timing.rounds)


def code_of_model(fed: Federation) -> dict[str, str]:
    """Return the user's files of the method, the network and the data, see
    :func:`fl_lightning.support.user_code.code_of`."""
    recipe = recipe_of(fed.method.network)
    network = {type(part) for part in fed.method.modules()} | {recipe and recipe.function}
    return code_of(fed.method, fed.data, *network)


def task_of(task: Task, emitters: Iterable[Emitter] = ()) -> dict[str, Any]:
    """Return what a report has to know of the metrics of a run: the one that selects, how it is
    read, and what the method and the callbacks declare of those that they add."""
    declared = {name: asdict(one) for name, one in declared_by(emitters).items()}
    return {
        "name": type(task).__name__,
        "primary": task.primary,
        "higher_is_better": task.higher_is_better,
        "shares": sorted(task.shares),
        **({"named": {one.name: one.higher_is_better for one in task.named}} if task.named else {}),
        **({"declared": declared} if declared else {}),
    }


def continued_metadata(
    before: Mapping[str, Any], here: Mapping[str, Any], round: int, *, changed: bool
) -> dict[str, Any]:
    """Return the metadata of a run that is continued after ``round``.

    A warning names what has changed and may round sums differently from here on.

    Args:
        before: the metadata in the run's file.
        here: the metadata that :func:`describe_run` gives now.
        round: the last round that is done.
        changed: whether it is continued with other settings or data.
    """
    for name in ("device", "threads", "versions"):  # the number of ranks changes no sum
        if name in before and before[name] != here[name]:
            log.warning(
                "%s: %s -> %s; from here on sums may be rounded differently",
                name,
                before[name],
                here[name],
            )
    code = before.get("code") or {}
    if other := [name for name, sha in here["code"].items() if code.get(name, sha) != sha]:
        log.warning("the code of %s has changed since the run began", ", ".join(other))
    resumed, deployment = before.get("resumed"), before.get("deployment")
    moved = {
        f"{name}_before": before[name]
        for name in ("engine", "device")
        if name in before and before[name] != here[name]
    }
    return {
        **here,
        # it has the id under which nodes keep states, which a process that is killed now must not
        # lose
        **({"deployment": deployment} if isinstance(deployment, dict) else {}),
        "tags": {**_mapping(before.get("tags")), **_mapping(here.get("tags"))},
        "started": before["started"] if is_time(before.get("started")) else here["started"],
        "tracking_run_id": before.get("tracking_run_id"),
        "tracking_run_dir": before.get("tracking_run_dir"),
        **{
            name: before[name]
            for name in ("tracked_since", "former_tracking_runs")
            if name in before
        },
        "resumed": [
            *(resumed if isinstance(resumed, list) else []),
            {
                "after_round": round,
                "at": now(),
                **({"changed": True} if changed else {}),
                **({"code_before": code} if other else {}),
                **moved,
            },
        ],
    }


def _mapping(value: object) -> dict[str, Any]:
    """Return a mapping; an empty one for what a damaged file has in its place."""
    return dict(value) if isinstance(value, Mapping) else {}


def tracked_anew(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a run that gets a new record in the tracking store, since rounds that
    the one of before has are made anew in another way: a store takes no metric back."""
    former = [*metadata.get("former_tracking_runs", ()), metadata.get("tracking_run_id")]
    return {
        "tracking_run_id": None,
        "tracking_run_dir": None,
        "tracked_since": now(),
        "former_tracking_runs": [run for run in former if run],
    }


def tracked_since(metadata: Mapping[str, Any]) -> int:
    """Return when a run's record in the tracking store begins, in milliseconds since 1970: with the
    run, or when rounds of it were last taken back."""
    since = metadata.get("tracked_since")
    return milliseconds(str(since) if is_time(since) else metadata["started"])


def is_time(value: object) -> bool:
    """Return whether a value is a time in the form that :func:`now` gives."""
    try:
        return isinstance(value, str) and bool(milliseconds(value))
    except ValueError:
        return False


def is_tracked_elsewhere(metadata: Mapping[str, Any], run: Path) -> bool:
    """Return whether the run in the tracking store belongs to another directory than ``run``.

    That is so when ``run`` is a copy and the original still exists.
    """
    original = metadata.get("tracking_run_dir")
    if not isinstance(original, str) or Path(original).resolve() == run.resolve():
        return False
    return read_json(Path(original) / "metadata.json").get("tracking_run_id") == metadata.get(
        "tracking_run_id"
    )


def tags_of(metadata: Mapping[str, Any], run_dir: Path) -> dict[str, str]:
    """Return the tags of a run for its trackers: the user's, and the project's, which take
    precedence.

    MLflow's table has a column for no tag but the source of a run, which is therefore its method
    and seed.
    """
    return {
        "mlflow.source.name": f"{metadata['method']}, seed {metadata['seed']}",
        **metadata.get("tags", {}),
        "method": metadata["method"],
        "dataset": metadata["dataset"],
        "seed": str(metadata["seed"]),
        "commit": str(metadata["git"]["commit"]),
        "dirty": str(metadata["git"]["dirty"]),
        "run_dir": str(run_dir.absolute()),
        "partition_sha256": metadata["partition_sha256"],
    }


def dataset_of(data: FederatedData) -> str:
    """Return the name of a data set; that of its class where it has none."""
    return getattr(data, "dataset", type(data).__name__)


def name_of(
    method: Method,
    data: FederatedData,
    seed: int,
    asked: str | None = None,
    changed: Sequence[str] = (),
) -> RunName:
    """Return the name of a run.

    Args:
        asked: the one that the user gave.
        changed: what flags change in the configuration files.
    """
    module = [] if method.module is None else [type(method.module).__name__]
    start = "-".join([type(method).__name__, *module, dataset_of(data)])
    return RunName(asked, start, changed, f"seed{seed}")


def now() -> str:
    """Return the time in UTC as ISO 8601 text, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def milliseconds(time: str) -> int:
    """Return the milliseconds since 1970 of a time in the form that :func:`now` gives.

    Raises:
        ValueError: the text is not such a time.
    """
    return round(1000 * datetime.fromisoformat(time).timestamp())


def round_times(metadata: Mapping[str, Any], history: Sequence[Mapping[str, float]]) -> list[int]:
    """Return when each round ended, in milliseconds since 1970.

    The times are sums: the start of the session (the run, or its last continuation) that a round
    belongs to, and the ``time/round`` seconds of the session's rounds until then.
    """
    sessions: dict[int, int] = {}
    for session in metadata.get("resumed", []):
        sessions = {after: at for after, at in sessions.items() if after < session["after_round"]}
        sessions[session["after_round"]] = milliseconds(session["at"])
    clock, times = float(milliseconds(metadata["started"])), []
    for row in history:
        clock = max(clock, sessions.get(int(row["round"]) - 1, 0)) + 1000 * row.get(
            "time/round", 0.0
        )
        times.append(round(clock))
    return times


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that can change a result, by name."""
    return dict(_versions())


@cache  # they are read from the files of every package, and stay what was imported
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, object]:
    """Return the commit of the project's checkout, and whether it is ``dirty`` (has uncommitted
    changes), as they were at this process's first run.

    Both are None outside a checkout, and where the checkout is another project's, as that in whose
    ignored ``.venv`` the package is installed.
    """
    try:
        return dict(_git_state())
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


@cache  # two programs are started to ask
def _git_state() -> dict[str, object]:
    file = Path(__file__)
    command = ["git", "-C", str(file.parent)]
    commit, status = (
        subprocess.run(
            [*command, *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout
        # the second name fails where the commit does not hold this file
        for words in (["rev-parse", "HEAD", f"HEAD:./{file.name}"], ["status", "--porcelain"])
    )
    return {"commit": commit.split()[0], "dirty": bool(status.strip())}
