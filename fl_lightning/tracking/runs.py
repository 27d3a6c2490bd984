"""Runs in MLflow, apart from the one that is training: a study's own, one that ended and is given more, all
of an experiment."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml
from lightning.fabric.loggers import Logger

from fl_lightning.errors import InputError
from fl_lightning.settings import flatten
from fl_lightning.support.redaction import redact
from fl_lightning.tracking.mlflow_store import (
    CALL_LIMIT,
    START_LIMIT,
    Status,
    absolute,
    connect,
    default_uri,
    find_mlflow_run,
    is_missing,
    is_mlflow,
    log_batches,
    open_run,
    reason,
    within,
)

log = logging.getLogger("fl_lightning")


class StudyRun(NamedTuple):
    """Where a study is in the store."""

    run_id: str
    experiment_id: str


def begin_study(
    study: str,
    folder: Path,
    tags: Mapping[str, str],
    experiment_tags: Mapping[str, str] = MappingProxyType({}),
) -> StudyRun | None:
    """The run that a study's runs are nested under, in the default store: made once, then found by its
    folder.

    Args:
        study: name of the study and of the experiment.
        folder: of its runs on disk.
        tags: shown beside it.
        experiment_tags: of the experiment.

    Returns:
        None when the store fails, which is said in a warning: the runs are then on one level.
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

    try:
        return within(START_LIMIT, begin)
    except Exception as error:
        log.warning(
            "MLflow at %s failed (%s); the study has no run of its own there; "
            "make the store reachable and writable, set MLFLOW_TRACKING_URI, or write --logger false",
            redact(uri), reason(error),
        )  # fmt: skip
        return None


def end_study(
    begun: StudyRun | None, folder: Path, status: Status, files: Sequence[str] = ("study.yaml", "cells.json")
) -> None:
    """Close what :func:`begin_study` opened; ``files`` of the folder go with it."""
    if begun is None:
        return
    uri = default_uri()

    def end() -> None:
        client = connect(uri)
        for name in files:
            client.log_artifact(begun.run_id, str(folder / name))
        client.set_terminated(begun.run_id, status)

    try:
        within(CALL_LIMIT, end)
    except Exception as error:
        log.warning(
            "MLflow at %s failed (%s); the study's own run there is not closed", redact(uri), reason(error)
        )


def add_to_run(
    logger: Logger | Sequence[Logger] | bool,
    run_id: str,
    metrics: Mapping[str, float],
    step: int,
    files: Sequence[Path],
) -> None:
    """Give a run that has ended more metrics, and files; its status stays, and what it has already is not
    logged again.

    Args:
        logger: where the run is: True for the default store, or the loggers that it was made with.
        run_id: the MLflow run.
        metrics: by name.
        step: the round that the metrics are of.
        files: on disk; copied.
    """
    given = [] if isinstance(logger, bool) else [logger] if isinstance(logger, Logger) else list(logger)
    uris = [absolute(str(getattr(each, "_tracking_uri", ""))) for each in given if is_mlflow(each)]
    for uri in [default_uri()] if logger is True else uris:
        try:
            within(START_LIMIT, partial(_add, uri, run_id, metrics, step, files))
        except Exception as error:
            log.warning(
                "MLflow at %s failed (%s); the results are in %s", redact(uri), reason(error), files[0]
            )


def _add(uri: str, run_id: str, metrics: Mapping[str, float], step: int, files: Sequence[Path]) -> None:
    if is_missing(uri):
        raise FileNotFoundError("there is no such database")
    client, now = connect(uri), int(1000 * time.time())
    from mlflow.entities import Metric

    known = client.get_run(run_id).data.metrics
    there = {
        name
        for name in metrics
        if name in known
        for m in client.get_metric_history(run_id, name)
        if m.step == step
    }
    log_batches(
        client,
        run_id,
        metrics=[Metric(name, value, now, step) for name, value in metrics.items() if name not in there],
    )
    for path in files:
        client.log_artifact(run_id, str(path))


def read_runs(uri: str, experiment: str) -> list[dict[str, Any]]:
    """The runs of an experiment, by name.

    Each has ``name``, ``id``, ``metadata`` as in ``metadata.json``, ``history``, a row per round,
    ``settings`` with dotted keys, and
    ``typed``: whether these are from ``config.yaml``, not from the store's parameters, which are all text.

    Raises:
        InputError: there is no such store or experiment, or it does not answer.
    """
    uri = absolute(uri)
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
    """The experiment's runs of methods, page by page; a study's own run has no partition."""
    runs, token = [], None
    while True:
        page = client.search_runs([experiment_id], order_by=["attributes.start_time ASC"], page_token=token)
        runs += [run for run in page if "partition_sha256" in run.data.tags]
        if not (token := page.token):
            return runs


def _read_run(client: Any, run: Any) -> dict[str, Any]:
    from mlflow.artifacts import load_dict, load_text

    tags = dict(run.data.tags)
    git = {"commit": tags.get("commit"), "dirty": tags.get("dirty") == "True"}
    metadata: dict[str, Any] = {**tags, "seed": int(tags.get("seed", -1)), "git": git, "tags": tags}
    with suppress(Exception):  # a run whose artifacts are elsewhere is known by its tags
        metadata = load_dict(f"{run.info.artifact_uri}/metadata.json")
    settings: dict[str, Any] = dict(run.data.params)
    typed = False
    with suppress(Exception):
        settings, typed = flatten(yaml.safe_load(load_text(f"{run.info.artifact_uri}/config.yaml"))), True
    rows: dict[int, dict[str, float]] = {}
    for name, last in run.data.metrics.items():
        if name.startswith("final/"):
            metadata[name] = last
            continue
        for point in client.get_metric_history(run.info.run_id, name):
            rows.setdefault(point.step, {"round": point.step})[name] = point.value
    metadata["status"] = run.info.status.lower()
    history = [rows[step] for step in sorted(rows)]
    found = {"name": run.info.run_name, "id": run.info.run_id, "metadata": metadata, "history": history}
    return found | {"settings": settings, "typed": typed}
