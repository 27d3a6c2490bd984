"""Loggers that can fail without the training noticing. The one module that knows MLflow; imports it when a run starts.

The default is MLflow in ``sqlite:///mlflow.db`` (or ``MLFLOW_TRACKING_URI``); any Lightning logger can stand in its place.
Artifacts go where the logger takes them (MLflow). A logger that raises, or does not answer, is reported once and left alone.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from lightning.fabric.loggers import Logger
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.errors import InputError
from fl_lightning.redaction import redact

log = logging.getLogger("fl_lightning")

SQLITE = "sqlite:///"
DEFAULT_URI = f"{SQLITE}mlflow.db"
START_LIMIT, CALL_LIMIT = 60.0, 30.0  # seconds; a new database takes 3-6, a busy one is waited for 20
KEY_LENGTH, PARAM_LENGTH, TAG_LENGTH, PER_BATCH = 250, 6000, 5000, 100  # what MLflow accepts: characters, and entries per call
ENVIRONMENT = {  # a dead server costs seconds, not minutes; nothing is sent to third parties; whoever sets these is heeded
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracking:
    """The loggers of one run. Nothing here raises on their behalf, and ranks other than 0 track nothing.

    Args:
        logger: True: MLflow; False: none; or one or more Lightning loggers.
        experiment: name of the MLflow experiment.
        run_name: name of the run in it.
        run_dir: where the run's own files are; named when a logger fails.
        run_id: MLflow run to continue: it is set to running, steps that it has are not logged again, and parameters that
            differ from the recorded ones become tags ``changed.<name>``.
        since: when ``run_dir`` was made (seconds since 1970), to continue a run whose id got lost: the default store is searched for
            one that was made for this directory after that.
    """

    def __init__(
        self,
        logger: Logger | Sequence[Logger] | bool = True,
        *,
        experiment: str,
        run_name: str,
        run_dir: Path,
        run_id: str | None = None,
        since: float | None = None,
    ) -> None:
        given = [] if isinstance(logger, bool) else [logger] if isinstance(logger, Logger) else list(logger)
        active = getattr(rank_zero_only, "rank", 0) == 0
        self.experiment, self.run_name, self.run_dir = experiment, run_name, Path(run_dir)
        self.loggers: list[Logger] = given if active else []
        self._wants_default = active and logger is True
        self._resume_id, self._since = run_id, since
        self._logged_until = self._summarised_at = self._step = 0

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run, for resuming; None without MLflow."""
        return next((_run_id(logger) for logger in self.loggers if _is_mlflow(logger)), None)

    @property
    def hint(self) -> str | None:
        """The command that shows the run, when the store is a local database."""
        uri = next((str(getattr(logger, "_tracking_uri", "")) for logger in self.loggers if _is_mlflow(logger)), "")
        if not uri.startswith(SQLITE):
            return None
        path = Path(uri.removeprefix(SQLITE))
        return f"mlflow ui --backend-store-uri {SQLITE}{path.name if path.parent == Path.cwd() else path}"

    def start(self, params: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        """Open the stores and record ``params`` (nested; flattened with dots) and ``tags``."""
        flat, marks = flatten(params), {key: str(value)[:TAG_LENGTH] for key, value in tags.items()}
        if self._wants_default:
            uri = _absolute(os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI)
            made = self._guarded(f"MLflow at {redact(uri)}", lambda: self._open_default(uri), START_LIMIT)
            self.loggers += [made] if made is not None else []
        for logger in list(self.loggers):
            self._call(logger, self._begin, logger, flat, marks, limit=START_LIMIT)

    def catch_up(self, history: Sequence[Mapping[str, float]]) -> None:
        """Give MLflow the rounds that it lacks: it may have been told less than the run's own files when the run was killed."""
        for row in history:
            self._step = int(row["round"])
            for logger in list(self.loggers):
                if _is_mlflow(logger) and self._step > self._logged_until:
                    self._call(logger, logger.log_metrics, {k: v for k, v in row.items() if k != "round"}, self._step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """The metrics of round ``step``: one call per logger, which for MLflow is one transaction of a few milliseconds."""
        self._step = step
        for logger in list(self.loggers):
            if not (_is_mlflow(logger) and step <= self._logged_until):
                self._call(logger, logger.log_metrics, dict(metrics), step)

    def log_artifact(self, path: Path | str, folder: str | None = None) -> None:
        """Copy a file to the loggers that keep files, into ``folder``."""
        for logger in list(self.loggers):
            if _is_mlflow(logger):
                self._call(logger, lambda it: it.experiment.log_artifact(it.run_id, str(path), folder), logger)

    def log_text(self, name: str, text: str) -> None:
        """As :meth:`log_artifact`, for a file that is not there yet."""
        for logger in list(self.loggers):
            if _is_mlflow(logger):
                self._call(logger, lambda it: it.experiment.log_text(it.run_id, text, name), logger)

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        """Record ``summary`` at the last step and close the run."""
        for logger in list(self.loggers):
            if summary and not (_is_mlflow(logger) and self._summarised_at >= self._step):
                self._call(logger, logger.log_metrics, dict(summary), self._step)
            ended = status if _is_mlflow(logger) else {"FINISHED": "success", "FAILED": "failed", "KILLED": "aborted"}[status]
            self._call(logger, logger.finalize, ended)

    def _open_default(self, uri: str) -> Logger:
        tags = {"run_dir": str(self.run_dir.absolute())}
        if self._since is not None and self._resume_id is None:
            self._resume_id = _lost_run(uri, self.experiment, tags["run_dir"], self._since)
        return _open_mlflow(uri, self.experiment, self.run_name, self._resume_id, tags)

    def _begin(self, logger: Any, params: dict[str, str], tags: dict[str, str]) -> None:
        if not _is_mlflow(logger):
            with suppress(NotImplementedError):  # Fabric's own CSVLogger has no place for them
                logger.log_hyperparams(params)
            return
        _prepare_mlflow()
        from mlflow.entities import Param, RunTag

        logger._run_id = logger._run_id or self._resume_id
        client, run_id = logger.experiment, logger.run_id
        known: dict[str, str] = {}
        if self._resume_id == run_id:
            client.update_run(run_id, status="RUNNING")
            known = client.get_run(run_id).data.params
            self._logged_until, self._summarised_at = _last_steps(client, run_id)
        cut = {key[:KEY_LENGTH]: _cut(value, PARAM_LENGTH) for key, value in params.items()}
        changed = {f"changed.{k}"[:KEY_LENGTH]: _cut(v, TAG_LENGTH) for k, v in cut.items() if known.get(k, v) != v}
        new = [Param(key, value) for key, value in cut.items() if key not in known]
        marks = [RunTag(key, value) for key, value in {**tags, **changed}.items()]
        for i in range(0, len(new), PER_BATCH):
            client.log_batch(run_id, params=new[i : i + PER_BATCH])
        for i in range(0, len(marks), PER_BATCH):
            client.log_batch(run_id, tags=marks[i : i + PER_BATCH])

    def _call(self, logger: Logger, function: Callable[..., Any], *args: Any, limit: float | None = None) -> None:
        uri = getattr(logger, "_tracking_uri", None)
        name = f"MLflow at {redact(uri)}" if uri else type(logger).__name__
        failed = object()
        if self._guarded(name, lambda: function(*args), limit or CALL_LIMIT, otherwise=failed) is failed:
            self.loggers.remove(logger)

    def _guarded(self, name: str, function: Callable[[], Any], limit: float, otherwise: Any = None) -> Any:
        """The function's result; ``otherwise``, and a warning, when it raises or takes more than ``limit`` seconds."""
        try:
            return _within(limit, function)
        except Exception as error:
            log.warning(
                "%s failed (%s); training goes on without it and every round is in %s; "
                "make the store reachable and writable, set MLFLOW_TRACKING_URI, or write --trainer.logger false",
                name, _reason(error), self.run_dir / "metrics.csv",
            )  # fmt: skip
            return otherwise


def begin_study(study: str, folder: Path, tags: Mapping[str, str]) -> str | None:
    """Id of the run that a study's runs are nested under, in the default store: made once, then found by its folder.

    Args:
        study: name of the study and of the experiment.
        folder: of its runs on disk.
        tags: shown beside it.

    Returns:
        None when the store fails, which is said in a warning: the runs are then on one level.
    """
    uri = _absolute(os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI)
    place = str(folder.absolute())

    def begin() -> str:
        run_id = _lost_run(uri, study, place, 0.0, tag="study_dir")
        marks = {"study": study, "study_dir": place, **tags}
        logger: Any = _open_mlflow(uri, study, study, run_id, marks)
        for key, value in marks.items():
            logger.experiment.set_tag(logger.run_id, key, value)
        logger.experiment.update_run(logger.run_id, status="RUNNING")
        return str(logger.run_id)

    try:
        return _within(START_LIMIT, begin)
    except Exception as error:
        log.warning(
            "MLflow at %s failed (%s); the study has no run of its own there; "
            "make the store reachable and writable, set MLFLOW_TRACKING_URI, or write --logger false",
            redact(uri), _reason(error),
        )  # fmt: skip
        return None


def end_study(run_id: str | None, folder: Path, status: Status, files: Sequence[str] = ("study.yaml", "cells.json")) -> None:
    """Close what :func:`begin_study` opened; ``files`` of the folder go with it."""
    if run_id is None:
        return
    uri = _absolute(os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI)

    def end() -> None:
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        for name in files:
            client.log_artifact(run_id, str(folder / name))
        client.set_terminated(run_id, status)

    try:
        _within(CALL_LIMIT, end)
    except Exception as error:
        log.warning("MLflow at %s failed (%s); the study's own run there is not closed", redact(uri), _reason(error))


def add_to_run(
    logger: Logger | Sequence[Logger] | bool, run_id: str, metrics: Mapping[str, float], step: int, files: Sequence[Path]
) -> None:
    """Give a run that has ended more metrics, and files; its status stays, and what it has already is not logged again.

    Args:
        logger: where the run is: True for the default store, or the loggers that it was made with.
        run_id: the MLflow run.
        step: the round that the metrics are of.
    """
    given = [] if isinstance(logger, bool) else [logger] if isinstance(logger, Logger) else list(logger)
    uris = [str(getattr(each, "_tracking_uri", "")) for each in given if _is_mlflow(each)]
    if logger is True:
        uris = [os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI]
    for uri in map(_absolute, uris):
        try:
            _within(START_LIMIT, lambda uri=uri: _add(uri, run_id, metrics, step, files))  # type: ignore[misc]
        except Exception as error:
            log.warning("MLflow at %s failed (%s); the results are in %s", redact(uri), _reason(error), files[0])


def _add(uri: str, run_id: str, metrics: Mapping[str, float], step: int, files: Sequence[Path]) -> None:
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE).partition("?")[0]).exists():
        raise FileNotFoundError("there is no such database")  # MLflow would make an empty one
    _prepare_mlflow()
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client, now = MlflowClient(uri), int(1000 * time.time())
    known = client.get_run(run_id).data.metrics
    there = {name for name in metrics if name in known for m in client.get_metric_history(run_id, name) if m.step == step}
    new = [Metric(name, value, now, step) for name, value in metrics.items() if name not in there]
    for i in range(0, len(new), PER_BATCH):
        client.log_batch(run_id, metrics=new[i : i + PER_BATCH])
    for path in files:
        client.log_artifact(run_id, str(path))


def read_runs(uri: str, experiment: str) -> list[dict[str, Any]]:
    """The runs of an experiment, by name: ``name``, ``id``, ``metadata`` as in ``metadata.json``, and ``history``, a row per round.

    Raises:
        InputError: there is no such store or experiment, or it does not answer.
    """
    uri = _absolute(uri)
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE).partition("?")[0]).is_file():
        raise InputError(f"--mlflow {redact(uri)}; there is no such database; name the one that the runs were tracked in")
    _prepare_mlflow()
    from mlflow import MlflowClient

    try:
        client = MlflowClient(uri)
        found = client.get_experiment_by_name(experiment)
        if found is None:
            raise InputError(f"--mlflow {redact(uri)}; it has no experiment {experiment}; name a study whose runs it tracked")
        runs, token = [], None
        while True:
            page = client.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"], page_token=token)
            runs += [run for run in page if "partition_sha256" in run.data.tags]  # a study's own run has none
            if not (token := page.token):
                break
        return sorted((_read_run(client, run) for run in runs), key=lambda entry: (entry["name"], entry["id"]))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"--mlflow {redact(uri)}; it cannot be read ({_reason(error)}); mend it, or leave --mlflow out"
        ) from error


def _read_run(client: Any, run: Any) -> dict[str, Any]:
    from mlflow.artifacts import load_dict

    tags = dict(run.data.tags)
    git = {"commit": tags.get("commit"), "dirty": tags.get("dirty") == "True"}
    metadata: dict[str, Any] = {**tags, "seed": int(tags.get("seed", -1)), "git": git, "tags": tags}
    with suppress(Exception):  # a run whose artifacts are elsewhere is known by its tags
        metadata = load_dict(f"{run.info.artifact_uri}/metadata.json")
    rows: dict[int, dict[str, float]] = {}
    for name, last in run.data.metrics.items():
        if name.startswith("final/"):
            metadata[name] = last
            continue
        for point in client.get_metric_history(run.info.run_id, name):
            rows.setdefault(point.step, {"round": point.step})[name] = point.value
    metadata["status"] = run.info.status.lower()
    history = [rows[step] for step in sorted(rows)]
    return {"name": run.info.run_name, "id": run.info.run_id, "metadata": metadata, "history": history}


def _within(limit: float, function: Callable[[], Any]) -> Any:
    """The function's result; raises what it raises, or TimeoutError after ``limit`` seconds."""
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["result"] = function()
        except Exception as error:
            outcome["error"] = error

    thread = Thread(target=work, name="tracking", daemon=True)  # one that never answers does not keep the process alive
    thread.start()
    thread.join(limit)
    if "result" in outcome:
        return outcome["result"]
    raise outcome.get("error", TimeoutError(f"no answer in {limit:g} s"))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as strings with dotted names; list entries that are settings themselves are numbered.

    >>> flatten({"data": {"root": None, "crop": [28, 28]}, "callbacks": [{"class_path": "A"}]})
    {'data.root': 'null', 'data.crop': '[28, 28]', 'callbacks.0.class_path': 'A'}
    """
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = "null" if value is None else str(value)
    return flat


def _prepare_mlflow() -> None:
    """Import it (1.3 s), with its patience shortened and its announcements turned down."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401  (sets up its logging, which is turned down next)

    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.loggers.mlflow").setLevel(logging.ERROR)  # announces every new experiment


def _lost_run(uri: str, experiment: str, run_dir: str, since: float, tag: str = "run_dir") -> str | None:
    """The run that was made for this directory by a process that was killed before it could note the run's id."""
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE).partition("?")[0]).exists():
        return None
    with _database(uri):
        _prepare_mlflow()
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        found = client.get_experiment_by_name(experiment)
        if found is None or "'" in run_dir:
            return None
        runs = client.search_runs([found.experiment_id], f"tags.{tag} = '{run_dir}'", order_by=["attributes.start_time DESC"])
        return next((run.info.run_id for run in runs if run.info.start_time >= 1000 * (since - 1)), None)


def _open_mlflow(uri: str, experiment: str, run_name: str, run_id: str | None, tags: Mapping[str, str]) -> Logger:
    """Lightning's MLflow logger with its run created; one process at a time creates the database."""
    with _database(uri) as local:
        _prepare_mlflow()
        from lightning.pytorch.loggers import MLFlowLogger

        place = Path("mlartifacts").resolve().as_uri() if local else None
        logger = MLFlowLogger(experiment, run_name, uri, tags=dict(tags), run_id=run_id, artifact_location=place)
        try:
            logger.run_id  # noqa: B018  (creates the experiment and the run, or finds the run)
        except Exception as error:
            if run_id is None or getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            log.warning("MLflow at %s has no run %s to continue; the rounds from here on go to a new run", uri, run_id)
            logger = MLFlowLogger(experiment, run_name, uri, tags=dict(tags), artifact_location=place)
            logger.run_id  # noqa: B018
        return logger


@contextmanager
def _database(uri: str) -> Iterator[bool]:
    """Yields whether the address is sqlite. If so: hold its lock, and fail at once where MLflow would try again for minutes."""
    if not uri.startswith(SQLITE):
        yield False
        return
    import fcntl

    path = Path(uri.removeprefix(SQLITE).partition("?")[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        deadline = time.monotonic() + START_LIMIT - 5
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process holds {lock.name}") from None
                time.sleep(0.05)
        with closing(sqlite3.connect(path, timeout=20)) as database:
            database.execute("BEGIN IMMEDIATE").connection.rollback()  # raises where it is damaged or not writable
        yield True


def _absolute(uri: str) -> str:
    """MLflow keeps one connection per address for the life of the process: a relative one would outlive a change of folder."""
    return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).absolute()}" if uri.startswith(SQLITE) else uri


def _is_mlflow(logger: object) -> bool:
    return any(cls.__name__ == "MLFlowLogger" for cls in type(logger).__mro__)  # without importing it


def _run_id(logger: Any) -> str | None:
    return logger._run_id  # run_id would open the store


def _last_steps(client: Any, run_id: str) -> tuple[int, int]:
    """Last round in the store, and the one at which ``final/*`` stands; each is one transaction, there as a whole or not at all."""
    rounds, summary = [0], [0]
    for name in client.get_run(run_id).data.metrics:
        steps = summary if name.startswith("final/") else rounds
        steps += [metric.step for metric in client.get_metric_history(run_id, name)]
    return max(rounds), max(summary)


def _cut(value: str, length: int) -> str:
    mark = f" ... ({len(value)} characters)"
    return value if len(value) <= length else value[: length - len(mark)] + mark
