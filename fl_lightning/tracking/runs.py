"""Runs in MLflow that are not training: a study's own run, one that has ended, and all runs of a
study."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import copysign, inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import yaml
from lightning.fabric.loggers import Logger

from fl_lightning.config.settings import flatten
from fl_lightning.errors import InputError
from fl_lightning.support.redaction import redact
from fl_lightning.tracking.mlflow_store import (
    CALL_LIMIT,
    START_LIMIT,
    TAKEN_BACK,
    Status,
    absolute_uri,
    call_with_limit,
    connect,
    default_uri,
    find_mlflow_run,
    is_missing,
    is_mlflow,
    log_batches,
    loggers_of,
    metric_names,
    open_run,
    reason,
)

log = logging.getLogger("fl_lightning")


class StudyRun(NamedTuple):
    """The ids of a study's own run and of its experiment in the store."""

    run_id: str
    experiment_id: str


STUDY_FILES = ("study.yaml", "cells.json", "registration.json")
"""The files of a study that are copied to its own run."""


def begin_study(
    study: str,
    folder: Path,
    tags: Mapping[str, str],
    experiment_tags: Mapping[str, str] = MappingProxyType({}),
) -> StudyRun | None:
    """Open the run of the default store under which the runs of a study are nested.

    It is created the first time and then found by the study's folder.

    Args:
        study: name of the study and of the experiment.
        folder: the folder of the study's runs on disk.
        tags: tags of the run.
        experiment_tags: tags of the experiment.

    Returns:
        The ids of the run; None if the store fails, which a warning reports. The runs are then not
        nested.
    """
    uri = default_uri()
    marks = {"study": study, "study_dir": str(folder.absolute()), **tags}

    def begin() -> StudyRun:
        run_id = find_mlflow_run(uri, study, "study_dir", marks["study_dir"])
        logger: Any = open_run(uri, study, study, run_id, marks)
        for key, value in marks.items():
            logger.experiment.set_tag(logger.run_id, key, value)
        for key, value in experiment_tags.items():
            logger.experiment.set_experiment_tag(logger.experiment_id, key, value)
        logger.experiment.update_run(logger.run_id, status="RUNNING")
        return StudyRun(str(logger.run_id), str(logger.experiment_id))

    without = (
        "the study has no run of its own there; make the store reachable and writable, set "
        "MLFLOW_TRACKING_URI, or write --logger false"
    )
    return _try(uri, START_LIMIT, begin, without)


def _try(uri: str, limit: float, function: Callable[[], Any], without: str) -> Any:
    """Return the function's result; None where the store fails or takes longer than the limit,
    which a warning reports, with what is then missing."""
    try:
        return call_with_limit(limit, function)
    except Exception as error:
        log.warning("MLflow at %s failed (%s); %s", redact(uri), reason(error), without)


def tag_experiment(begun: StudyRun | None, tags: Mapping[str, str]) -> None:
    """Set tags of the experiment that :func:`begin_study` opened; where that fails, a warning says
    so."""
    if begun is None:
        return

    def tag() -> None:
        client = connect(default_uri())
        for key, value in tags.items():
            client.set_experiment_tag(begun.experiment_id, key, value)

    _try(default_uri(), CALL_LIMIT, tag, "the view of the study there is not up to date")


def end_study(
    begun: StudyRun | None, folder: Path, status: Status, files: Sequence[str] = STUDY_FILES
) -> None:
    """Close the run that :func:`begin_study` opened.

    Args:
        begun: the ids that ``begin_study`` returned; for None nothing is done.
        folder: the folder of the study.
        status: how the study ended.
        files: names of files in the folder that are copied to the run, as far as they are there.
    """
    if begun is None:
        return
    uri = default_uri()

    def end() -> None:
        client = connect(uri)
        for name in files:
            if (folder / name).exists():
                client.log_artifact(begun.run_id, str(folder / name))
        client.set_terminated(begun.run_id, status)

    _try(uri, CALL_LIMIT, end, "the study's own run there is not closed")


def add_to_run(
    logger: Logger | Sequence[Logger] | bool,
    run_id: str,
    metrics: Mapping[str, float],
    step: int,
    files: Sequence[Path],
) -> None:
    """Add metrics and files to a run that has ended; its status stays as it is.

    Metrics that the run has already at this step, with the same values, are not logged again.

    Args:
        logger: the store of the run: True for the default one, or the loggers that the run was made
            with.
        run_id: id of the MLflow run.
        metrics: the metrics by name.
        step: the round to which the metrics belong.
        files: files on disk, which are copied to the run.
    """
    stores = [
        default_uri() if each is None else absolute_uri(str(getattr(each, "_tracking_uri", "")))
        for each in loggers_of(logger)
        if each is None or is_mlflow(each)
    ]
    for uri in stores:
        add = partial(_add, uri, run_id, metrics, step, files)
        _try(uri, START_LIMIT, add, f"the results are in {files[0]}")


def _add(
    uri: str, run_id: str, metrics: Mapping[str, float], step: int, files: Sequence[Path]
) -> None:
    if is_missing(uri):
        raise FileNotFoundError("there is no such database")
    client, now = connect(uri), int(1000 * time.time())
    from mlflow.entities import Metric

    known = client.get_run(run_id).data.metrics
    names = metric_names(metrics)
    metrics = {names[name]: value for name, value in metrics.items()}
    there = {
        name: m.value
        for name in metrics
        if name in known
        for m in client.get_metric_history(run_id, name)
        if m.step == step
    }
    new = {
        name: value
        for name, value in metrics.items()
        if name not in there or not np.array_equal(there[name], value, equal_nan=True)
    }
    log_batches(
        client, run_id, metrics=[Metric(name, value, now, step) for name, value in new.items()]
    )
    for path in files:
        client.log_artifact(run_id, str(path))


def read_runs(uri: str, experiment: str) -> list[dict[str, Any]]:
    """Return the runs of an experiment, sorted by name.

    Each is a dictionary with ``name``, ``id``, ``metadata`` (as in ``metadata.json``), ``history``
    (one row per round), ``clients`` (the text of ``clients.csv``, or nothing), ``settings`` (with
    dotted keys) and ``typed``. The last is False if ``config.yaml`` could not be read from the
    store: the settings are then its parameters, which are all texts.

    Args:
        uri: address of the store.
        experiment: name of the experiment.

    Raises:
        InputError: there is no such store or experiment, or the store does not answer.
    """
    uri = absolute_uri(uri)
    if is_missing(uri):
        raise InputError(
            f"--mlflow {redact(uri)}",
            "there is no such database",
            "name the one that the runs were tracked in",
        )
    try:
        client = connect(uri)
        found = client.get_experiment_by_name(experiment)
        if found is None:
            raise InputError(
                f"--mlflow {redact(uri)}",
                f"it has no experiment {experiment}",
                "name a study whose runs it tracked",
            )
        runs = [_read_run(client, run) for run in _search(client, found.experiment_id)]
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"--mlflow {redact(uri)}",
            f"it cannot be read ({reason(error)})",
            "mend it, or leave --mlflow out",
        ) from error
    return sorted(runs, key=lambda entry: (entry["name"], entry["id"]))


def _search(client: Any, experiment_id: str) -> list[Any]:
    """Return the experiment's runs of methods, without the study's own run, which has no partition,
    and without those that were taken back."""
    runs, token = [], None
    while True:
        page = client.search_runs(
            [experiment_id], order_by=["attributes.start_time ASC"], page_token=token
        )
        runs += [
            run
            for run in page
            if "partition_sha256" in run.data.tags and TAKEN_BACK not in run.data.tags
        ]
        if not (token := page.token):
            return runs


def _read_run(client: Any, run: Any) -> dict[str, Any]:
    from mlflow.artifacts import load_dict, load_text

    tags = dict(run.data.tags)
    git = {"commit": tags.get("commit"), "dirty": tags.get("dirty") == "True"}
    metadata: dict[str, Any] = {**tags, "seed": int(tags.get("seed", -1)), "git": git, "tags": tags}
    with suppress(Exception):  # the files of some runs are on another machine; their tags remain
        metadata = load_dict(f"{run.info.artifact_uri}/metadata.json")
    settings: dict[str, Any] = dict(run.data.params)
    typed = False
    with suppress(Exception):
        settings = flatten(yaml.safe_load(load_text(f"{run.info.artifact_uri}/config.yaml")))
        typed = True
    clients = ""
    with suppress(Exception):  # earlier releases wrote none
        clients = load_text(f"{run.info.artifact_uri}/clients.csv")
    rows: dict[int, dict[str, float]] = {}
    for name, last in run.data.metrics.items():
        if name.startswith("final/"):
            metadata[name] = last
            continue
        # a round that was made anew in another way has two values, of which the later one
        # counts
        for point in sorted(
            client.get_metric_history(run.info.run_id, name), key=lambda one: one.timestamp
        ):
            value = (
                copysign(inf, point.value)
                if abs(point.value) == sys.float_info.max
                else point.value
            )
            # the store has no infinity
            rows.setdefault(point.step, {"round": point.step})[name] = value
    metadata["status"] = run.info.status.lower()
    history = [rows[step] for step in sorted(rows)]
    found = {
        "name": run.info.run_name,
        "id": run.info.run_id,
        "metadata": metadata,
        "history": history,
    }
    return found | {"clients": clients, "settings": settings, "typed": typed}
