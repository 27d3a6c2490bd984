"""MLflow's stores: how one is opened, which runs are in it, and patience with it. MLflow is imported when a
store is first needed."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import time
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from lightning.fabric.loggers import Logger

from fl_lightning.support.disk import open_own
from fl_lightning.support.redaction import REDACTING, redact
from fl_lightning.tracking.writer import POLL, AwakeTimer

log = logging.getLogger("fl_lightning")

SQLITE = "sqlite:///"
DEFAULT_URI = f"{SQLITE}mlflow.db"
START_LIMIT, CALL_LIMIT = 60.0, 30.0  # seconds; a new database takes 3-6, a busy one is waited for 20
KEY_LENGTH, PARAM_LENGTH, TAG_LENGTH, PER_BATCH = (
    250,
    6000,
    5000,
    100,
)  # what MLflow accepts: characters, and entries per call
METRICS_PER_CALL = 1000
# a dead server costs seconds, not minutes; nothing is sent to third parties; whoever sets these is heeded
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # it prints the server's address with the password in it
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
Status = Literal["FINISHED", "FAILED", "KILLED"]
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_/. -]+")


class Round(NamedTuple):
    """What is logged of a round, and when it was (milliseconds since 1970)."""

    step: int
    metrics: Mapping[str, float]
    time: int


def store() -> str:
    """Address of the default store: ``MLFLOW_TRACKING_URI``, or ``mlflow.db`` in the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def default_uri() -> str:
    """The same as MLflow is given it."""
    return absolute(store())


def absolute(uri: str) -> str:
    """MLflow keeps one connection per address for the life of the process: a relative one would outlive a
    change of folder."""
    return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).absolute()}" if uri.startswith(SQLITE) else uri


def is_missing(uri: str) -> bool:
    """Whether it is a database that is not there; MLflow would make an empty one."""
    return uri.startswith(SQLITE) and not _file(uri).is_file()


def _file(uri: str) -> Path:
    return Path(uri.removeprefix(SQLITE).partition("?")[0])


def prepare() -> None:
    """Import MLflow (1.3 s), with its patience shortened and its announcements turned down."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401  (sets up its logging, which is turned down next)

    if logging.lastResort is not None:  # which shows the warnings of libraries that have no handler
        logging.lastResort.addFilter(REDACTING)
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(REDACTING)
    logging.getLogger("lightning.pytorch.loggers.mlflow").setLevel(
        logging.ERROR
    )  # announces every new experiment


def connect(uri: str) -> Any:
    """An ``MlflowClient``."""
    prepare()
    from mlflow import MlflowClient

    return MlflowClient(uri)


def find_mlflow_run(uri: str, experiment: str, tag: str, value: str, since: float = 0.0) -> str | None:
    """Id of the newest run of the experiment with this tag that was made after ``since`` (seconds since
    1970), if there is one."""
    if is_missing(uri):
        return None
    with _database(uri):
        client = connect(uri)
        found = client.get_experiment_by_name(experiment)
        quote = '"' if "'" in value else "'"
        if found is None or quote in value:
            return None
        runs = client.search_runs(
            [found.experiment_id],
            f"tags.{tag} = {quote}{value}{quote}",
            order_by=["attributes.start_time DESC"],
        )
        return next((run.info.run_id for run in runs if run.info.start_time >= 1000 * (since - 1)), None)


def open_run(
    uri: str,
    experiment: str,
    run_name: str,
    run_id: str | None,
    tags: Mapping[str, str],
    started: int | None = None,
) -> Logger:
    """Lightning's MLflow logger with its run created, or found by ``run_id``; one process at a time creates
    the database.

    Args:
        started: when a new run began, in milliseconds since 1970; None: now.
    """
    with _database(uri) as local:
        prepare()
        from lightning.pytorch.loggers import MLFlowLogger

        place = Path("mlartifacts").resolve().as_uri() if local else None
        logger = MLFlowLogger(
            experiment, run_name, uri, tags=dict(tags), run_id=run_id, artifact_location=place
        )
        try:
            make_run(logger, started)
        except Exception as error:
            if run_id is None or getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            log.warning(
                "MLflow at %s has no run %s to continue; the rounds from here on go to a new run", uri, run_id
            )
            logger = MLFlowLogger(experiment, run_name, uri, tags=dict(tags), artifact_location=place)
            make_run(logger, started)
        return logger


def make_run(logger: Any, started: int | None) -> str:
    """Id of the logger's run. Creates it, and its experiment, where it has none: the run then begins at
    ``started``."""
    client = logger._mlflow_client
    if logger._run_id is None and started is not None:
        client.create_run = partial(
            client.create_run, start_time=started
        )  # Lightning's call has no place for it
    try:
        return str(logger.run_id)
    finally:
        vars(client).pop("create_run", None)


@contextmanager
def _database(uri: str) -> Iterator[bool]:
    """Yields whether the address is sqlite. If so: hold its lock, and fail at once where MLflow would try
    again for minutes."""
    if not uri.startswith(SQLITE):
        yield False
        return
    import fcntl

    path = _file(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_own(path.with_name(f".{path.name}.lock"), "a") as lock:
        waited = AwakeTimer()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waited.seconds() > START_LIMIT - 5:
                    raise TimeoutError(f"another process holds {lock.name}") from None
                time.sleep(0.05)
        with closing(sqlite3.connect(path, timeout=20)) as database:
            database.execute(
                "BEGIN IMMEDIATE"
            ).connection.rollback()  # raises where it is damaged or not writable
        yield True


def logged_steps(client: Any, run_id: str) -> dict[str, dict[int, int]]:
    """For each metric that the store has of the run: its steps, and the time of each (milliseconds since
    1970)."""
    names = client.get_run(run_id).data.metrics
    return {
        name: {metric.step: metric.timestamp for metric in client.get_metric_history(run_id, name)}
        for name in names
    }


def between(rounds: Sequence[Round], known: Mapping[str, Mapping[int, int]]) -> list[Round]:
    """Rounds whose times are not known exactly, moved to where they lie between those of ``known``: time goes
    up with the step."""
    times = {
        step: time for name, steps in known.items() if "final/" not in name for step, time in steps.items()
    }
    steps = sorted(times)
    moved = []
    for round in rounds:
        at = bisect_left(steps, round.step)
        time = max(round.time, times[steps[at - 1]]) if at else round.time
        moved.append(round._replace(time=min(time, times[steps[at]]) if at < len(steps) else time))
    return moved


def log_settings(
    client: Any, run_id: str, params: Mapping[str, str], tags: Mapping[str, str], known: Mapping[str, str]
) -> None:
    """Tags, and the parameters that the run lacks; one that differs from the ``known`` one becomes a tag
    ``changed.<name>``."""
    from mlflow.entities import Param, RunTag

    cut = {key[:KEY_LENGTH]: _cut(value, PARAM_LENGTH) for key, value in params.items()}
    changed = {
        f"changed.{key}"[:KEY_LENGTH]: value for key, value in cut.items() if known.get(key, value) != value
    }
    marks = {key: _cut(value, TAG_LENGTH) for key, value in {**tags, **changed}.items()}
    log_batches(client, run_id, params=[Param(key, value) for key, value in cut.items() if key not in known])
    log_batches(client, run_id, tags=[RunTag(key, value) for key, value in marks.items()])


def _cut(value: str, length: int) -> str:
    mark = f" ... ({len(value)} characters)"
    return value if len(value) <= length else value[: length - len(mark)] + mark


def log_batches(client: Any, run_id: str, **entries: Sequence[Any]) -> None:
    """``metrics``, ``params`` or ``tags``, as many a call as MLflow accepts."""
    for kind, values in entries.items():
        for i in range(0, len(values), PER_BATCH):
            client.log_batch(run_id, **{kind: values[i : i + PER_BATCH]})


def takes_many(logger: object) -> bool:
    """Whether rounds can be logged together: the logger's way to log one is Lightning's own."""
    return (
        is_mlflow(logger)
        and getattr(type(logger), "log_metrics", log_rounds).__module__ == "lightning.pytorch.loggers.mlflow"
    )


def log_rounds(
    logger: Any, rounds: Sequence[Round], known: Mapping[str, Container[int]] = MappingProxyType({})
) -> None:
    """What ``logger.log_metrics`` would do, for many rounds in a call; a call is one transaction and holds
    whole rounds.

    A call costs MLflow 5 ms, and 0.05 ms a metric.

    Args:
        known: what is not logged again, as :func:`logged_steps` gives it.
    """
    from lightning.fabric.utilities.logger import _add_prefix
    from mlflow.entities import Metric

    client, run_id = logger.experiment, logger.run_id
    batch: list[Metric] = []
    for round in rounds:
        named: Mapping[str, Any] = _add_prefix(dict(round.metrics), logger._prefix, logger.LOGGER_JOIN_CHAR)
        numbers = {
            key: value for key, value in named.items() if not isinstance(value, str)
        }  # which Lightning skips as well
        row = [
            Metric(_NOT_IN_NAMES.sub("", key), value, round.time, round.step)
            for key, value in numbers.items()
        ]
        row = [metric for metric in row if round.step not in known.get(metric.key, ())]
        if batch and len(batch) + len(row) > METRICS_PER_CALL:
            client.log_batch(run_id, metrics=batch, **logger._log_batch_kwargs)
            batch = []
        batch += row
    if batch:
        client.log_batch(run_id, metrics=batch, **logger._log_batch_kwargs)


def is_mlflow(logger: object) -> bool:
    return any(cls.__name__ == "MLFlowLogger" for cls in type(logger).__mro__)  # without importing it


def within(limit: float, function: Callable[[], Any]) -> Any:
    """The function's result; raises what it raises, or TimeoutError after ``limit`` seconds in which this
    process ran."""
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["result"] = function()
        except Exception as error:
            outcome["error"] = error

    thread = Thread(
        target=work, name="tracking", daemon=True
    )  # one that never answers does not keep the process alive
    thread.start()
    waited = AwakeTimer()
    while thread.is_alive() and waited.seconds() < limit:
        thread.join(POLL)
    if "result" in outcome:
        return outcome["result"]
    raise outcome.get("error", TimeoutError(f"no answer in {limit:g} s"))


def reason(error: BaseException) -> str:
    """The error in one line, without secrets: hidden before it is cut, since half an address is not known as
    one."""
    return f"{type(error).__name__}: {redact(str(error)).strip().partition(chr(10))[0][:200]}"
