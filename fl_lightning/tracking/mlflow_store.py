"""Access to MLflow's stores: open one, find its runs, and write to it with a time limit.

MLflow is imported when a store is first needed.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import sqlite3
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from filelock import FileLock
from lightning.fabric.loggers import Logger

from fl_lightning.errors import require
from fl_lightning.support.redaction import REDACTING, redact
from fl_lightning.tracking.writer import POLL_SECONDS, AwakeTimer

log = logging.getLogger("fl_lightning")

SQLITE = "sqlite:///"
DEFAULT_URI = f"{SQLITE}mlflow.db"
# seconds; a new database takes 3-6, and sqlite waits 20 for a lock
START_LIMIT, CALL_LIMIT = 60.0, 30.0
LOCK_LIMIT = START_LIMIT - 5  # seconds to wait for another process that opens the same database
# MLflow accepts no more than these
MAX_KEY_CHARACTERS, MAX_PARAM_CHARACTERS, MAX_TAG_CHARACTERS = 250, 6000, 5000
MAX_ENTRIES_PER_CALL, MAX_METRICS_PER_CALL = 100, 1000
# With these a dead server costs seconds and not minutes, and nothing is sent to third parties.
# Values that the user has set stay.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # the address that it prints may contain a password
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
Status = Literal["FINISHED", "FAILED", "KILLED"]
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_/. -]+")
_NOT_IN_KEYS = re.compile(r"[^\w/.: -]+")


class Round(NamedTuple):
    """The metrics of one round.

    Args:
        step: the round, counted from 1.
        metrics: its metrics by name.
        time: when it ended, in milliseconds since 1970.
    """

    step: int
    metrics: Mapping[str, float]
    time: int


def store() -> str:
    """Return the default store: ``MLFLOW_TRACKING_URI``, or ``mlflow.db`` in the working
    directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def default_uri() -> str:
    """Return the default store with an absolute path."""
    return absolute_uri(store())


def absolute_uri(uri: str) -> str:
    """Return the address of a store with an absolute path.

    MLflow keeps one connection per address as long as the process runs, so after a change of the
    working directory a relative address would still mean the old database.
    """
    if not uri.startswith(SQLITE):
        return uri
    path = Path(uri.removeprefix(SQLITE))
    here = Path() if path.is_absolute() else Path(sqlite_uri(Path.cwd()).removeprefix(SQLITE))
    return f"{SQLITE}{here / path}"


def sqlite_uri(path: Path) -> str:
    """Return the address of a database, in which ``%`` and ``?`` would else be signs of their
    own."""
    if not {"%", "?"} & {*str(path)}:
        return f"{SQLITE}{path}"
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(path)).render_as_string()


def is_missing(uri: str) -> bool:
    """Return whether an address is that of a database that does not exist; MLflow would create
    it."""
    return uri.startswith(SQLITE) and not _file(uri).is_file()


def _file(uri: str) -> Path:
    from sqlalchemy import make_url

    return Path(make_url(uri).database or "")


def prepare() -> None:
    """Import MLflow (1.3 s) with short time limits, and show only its warnings, without secrets."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401  (the import sets up its logging, which is changed next)

    if logging.lastResort is not None:  # it shows the warnings of libraries that have no handler
        logging.lastResort.addFilter(REDACTING)
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(REDACTING)
    # its warnings announce every new experiment
    logging.getLogger("lightning.pytorch.loggers.mlflow").setLevel(logging.ERROR)


def prepare_with_database() -> None:
    """Prepare, and import what MLflow otherwise imports when it opens a database."""
    prepare()
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


def connect(uri: str) -> Any:
    """Return an ``MlflowClient`` of a store."""
    prepare()
    from mlflow import MlflowClient

    return MlflowClient(uri)


def find_mlflow_run(
    uri: str,
    experiment: str,
    tag: str,
    value: str,
    since: float = 0.0,
    former: Container[str] = (),
    known: Mapping[str, str] | None = None,
) -> str | None:
    """Return the id of the newest run of an experiment with a tag; None if there is none.

    Args:
        uri: address of the store.
        experiment: name of the experiment.
        tag, value: name and value of the tag.
        since: earliest start of the run, in seconds since 1970.
        former: ids of runs that are not meant.
        known: other tags, which a run has so or not at all.
    """
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
        meant = (
            run.info.run_id
            for run in runs
            if run.info.start_time >= 1000 * (since - 1)
            and run.info.run_id not in former
            and all(run.data.tags.get(name, own) == own for name, own in (known or {}).items())
        )
        return next(meant, None)


def open_run(
    uri: str,
    experiment: str,
    run_name: str,
    run_id: str | None,
    tags: Mapping[str, str],
    started: int | None = None,
) -> Logger:
    """Return Lightning's MLflow logger for a run, which is created where ``run_id`` is None.

    Only one process at a time creates a database.

    Args:
        uri: address of the store.
        experiment: name of the experiment.
        run_name: name of the run in it.
        run_id: id of a run to continue, which the store has; None for a new one.
        tags: tags of a new run.
        started: when a new run began, in milliseconds since 1970; None for now.
    """
    with _database(uri) as local:
        prepare()
        from lightning.pytorch.loggers import MLFlowLogger

        place = Path("mlartifacts").resolve().as_uri() if local else None
        logger = MLFlowLogger(
            experiment, run_name, uri, tags=dict(tags), run_id=run_id, artifact_location=place
        )
        make_run(logger, started)
        return logger


def make_run(logger: Any, started: int | None) -> str:
    """Return the id of the logger's run, which is created if it does not exist.

    Args:
        logger: an MLflow logger of Lightning's.
        started: when a new run began, in milliseconds since 1970; None for now.
    """
    client = logger._mlflow_client
    if logger._run_id is None and started is not None:
        # Lightning's logger cannot pass a start time on
        client.create_run = partial(client.create_run, start_time=started)
    try:
        return str(logger.run_id)
    finally:
        vars(client).pop("create_run", None)


@contextmanager
def _database(uri: str) -> Iterator[bool]:
    """Yield whether the address is sqlite.

    If it is, hold its lock, and fail at once where MLflow would try again for minutes.
    """
    if not uri.startswith(SQLITE):
        yield False
        return
    path = _file(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_LIMIT):
        with closing(sqlite3.connect(path, timeout=20)) as database:
            database.execute("BEGIN IMMEDIATE")  # raises where it is damaged or not writable
            database.rollback()
        yield True


TAKEN_BACK = "taken_back"
"""The tag of a run of which rounds were made anew in another way; another one has them."""


def mark_taken_back(client: Any, run_ids: Sequence[str]) -> None:
    """Tag runs, and name them so, of which rounds were made anew; those that the store lacks are
    left out."""
    for run_id in run_ids:
        if not has_run(client, run_id):
            continue
        run = client.get_run(run_id)
        if TAKEN_BACK not in run.data.tags:
            client.set_tag(run_id, TAKEN_BACK, "rounds of it were made anew in another way")
            client.update_run(run_id, name=f"{run.info.run_name} (taken back)")


def has_run(client: Any, run_id: str) -> bool:
    """Return whether the store has a run of this id that is not deleted."""
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except Exception as error:
        if getattr(error, "error_code", "") in (
            "RESOURCE_DOES_NOT_EXIST",
            "INVALID_PARAMETER_VALUE",
        ):
            return False
        raise


def store_has_run(uri: str, run_id: str) -> bool:
    """Return what :func:`has_run` does of the store at an address; a database is made there if none
    is."""
    with _database(uri):
        return has_run(connect(uri), run_id)


def logged_steps(client: Any, run_id: str) -> dict[str, dict[int, int]]:
    """Return the steps of each metric that the store has of a run, and their times.

    The times are in milliseconds since 1970.
    """
    return {
        name: {one.step: one.timestamp for one in client.get_metric_history(run_id, name)}
        for name in client.get_run(run_id).data.metrics
    }


def with_first_charts(metrics: Mapping[str, float], primary: str) -> dict[str, float]:
    """Return the metrics and, once more, those of which MLflow's page is to draw its first charts.

    It has a section of charts for each word before a slash and sorts them by code point. ``Main``,
    with its capital letter, comes before the project's own; which charts come first cannot be said
    in another way.

    Args:
        metrics: the metrics of a round by name.
        primary: the task's primary metric; it and the loss, both of the test set, come first.
    """
    first = {f"Main/{name}": f"test/{name}" for name in (primary, "loss")}
    return {**metrics, **{copy: metrics[name] for copy, name in first.items() if name in metrics}}


def with_ordered_times(
    rounds: Sequence[Round], known: Mapping[str, Mapping[int, int]]
) -> list[Round]:
    """Return the rounds with their times moved between those in the store, so that times grow with
    steps.

    The times of rounds that were not tracked at once are only estimates.

    Args:
        rounds: the rounds.
        known: the steps and times in the store, as :func:`logged_steps` gives them.
    """
    times = {
        step: time
        for name, steps in known.items()
        if "final/" not in name
        for step, time in steps.items()
    }
    steps = sorted(times)
    moved = []
    for round in rounds:
        at = bisect_left(steps, round.step)
        time = max(round.time, times[steps[at - 1]]) if at else round.time
        moved.append(round._replace(time=min(time, times[steps[at]]) if at < len(steps) else time))
    return moved


def log_settings(
    client: Any, run_id: str, params: Mapping[str, str], tags: Mapping[str, str]
) -> None:
    """Log tags, and the parameters that a run lacks.

    A parameter that differs from the run's becomes a tag ``changed.<name>``, since MLflow does not
    let a parameter change; the tag of one that is as it was again goes.
    """
    from mlflow.entities import Param, RunTag

    there = client.get_run(run_id).data
    known = there.params
    cut = {_key(key): _cut(value, MAX_PARAM_CHARACTERS) for key, value in params.items()}
    changed = {
        _key(f"changed.{key}"): value
        for key, value in cut.items()
        if known.get(key, value) != value
    }
    marks = {
        _key(key): _cut(value, MAX_TAG_CHARACTERS) for key, value in {**tags, **changed}.items()
    }
    log_batches(
        client, run_id, params=[Param(key, value) for key, value in cut.items() if key not in known]
    )
    log_batches(client, run_id, tags=[RunTag(key, value) for key, value in marks.items()])
    for key in there.tags:
        if key.startswith("changed.") and key not in marks:
            client.delete_tag(run_id, key)


def metric_name(name: str) -> str:
    """Return the name of a metric as MLflow takes it.

    >>> metric_name("kind/copy (bank)/accuracy"), metric_name("kind/(?)/accuracy")
    ('kind/copy bank/accuracy', 'kind/accuracy')
    """
    return _as_path(_NOT_IN_NAMES.sub("", name))


def metric_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name of each metric as MLflow takes it, and say which it shows as one, since their
    names differ in what it does not take."""
    taken = {name: metric_name(name) for name in names}
    first: dict[str, str] = {}
    for name, there in taken.items():
        if (other := first.setdefault(there, name)) != name:
            _warn_of_equal_name(there, other, name)
    return taken


@cache  # once for each, and not in every round
def _warn_of_equal_name(name: str, one: str, other: str) -> None:
    log.warning("MLflow shows the metrics %r and %r as one, %r; rename one", one, other, name)


def _key(name: str) -> str:
    """Return the name of a parameter or a tag as MLflow takes it.

    >>> _key("lr(max)"), _key("../a//b"), _key("%")
    ('lrmax', 'a/b', '_')
    """
    return _as_path(_NOT_IN_KEYS.sub("", name))


def _as_path(name: str) -> str:
    """Return a name as a path in its shortest form, not too long and never empty."""
    return posixpath.normpath("/" + name.lstrip("/")[:MAX_KEY_CHARACTERS])[1:] or "_"


def _cut(value: str, length: int) -> str:
    mark = f" ... ({len(value)} characters)"
    return value if len(value) <= length else value[: length - len(mark)] + mark


def log_batches(client: Any, run_id: str, **entries: Sequence[Any]) -> None:
    """Log ``metrics``, ``params`` or ``tags`` in as many calls as MLflow needs."""
    for kind, values in entries.items():
        for i in range(0, len(values), MAX_ENTRIES_PER_CALL):
            client.log_batch(run_id, **{kind: values[i : i + MAX_ENTRIES_PER_CALL]})


def accepts_batches(logger: object) -> bool:
    """Return whether :func:`log_rounds` may log several rounds at once in place of
    ``logger.log_metrics``.

    That is so for MLflow loggers whose ``log_metrics`` is Lightning's own.
    """
    return (
        is_mlflow(logger)
        and getattr(type(logger), "log_metrics", log_rounds).__module__
        == "lightning.pytorch.loggers.mlflow"
    )


def log_rounds(
    logger: Any, rounds: Sequence[Round], known: Mapping[str, Container[int]] = MappingProxyType({})
) -> None:
    """Log several rounds as ``logger.log_metrics`` would log each of them, with many rounds per
    call.

    A call is one transaction and holds whole rounds. It costs MLflow 5 ms, and 0.05 ms for each
    metric.

    Args:
        logger: a logger that :func:`accepts_batches`.
        rounds: the rounds.
        known: the steps that are not logged again, by metric, as :func:`logged_steps` gives them.
    """
    from lightning.fabric.utilities.logger import _add_prefix
    from mlflow.entities import Metric

    client, run_id = logger.experiment, logger.run_id
    batch: list[Metric] = []
    for round in rounds:
        named: Mapping[str, Any] = _add_prefix(
            dict(round.metrics), logger._prefix, logger.LOGGER_JOIN_CHAR
        )
        # Lightning skips texts as well
        numbers = {key: value for key, value in named.items() if not isinstance(value, str)}
        names = metric_names(numbers)
        row = [Metric(names[key], value, round.time, round.step) for key, value in numbers.items()]
        row = [metric for metric in row if round.step not in known.get(metric.key, ())]
        if batch and len(batch) + len(row) > MAX_METRICS_PER_CALL:
            client.log_batch(run_id, metrics=batch, **logger._log_batch_kwargs)
            batch = []
        batch += row
    if batch:
        client.log_batch(run_id, metrics=batch, **logger._log_batch_kwargs)


def is_mlflow(logger: object) -> bool:
    """Return whether a logger is Lightning's MLflow logger or derived from it, without importing
    MLflow."""
    return any(cls.__name__ == "MLFlowLogger" for cls in type(logger).__mro__)


def loggers_of(logger: Logger | Sequence[Logger] | bool) -> list[Logger | None]:
    """Return the loggers that a setting means; None is the default store.

    Raises:
        InputError: it means something else than loggers.
    """
    if isinstance(logger, bool):
        return [None] if logger else []
    loggers: list[Any] = [*logger] if isinstance(logger, list | tuple) else [logger]
    for one in loggers:
        require(
            isinstance(one, Logger),
            f"logger={one!r:.60}",
            "it is True for MLflow, False for none, or loggers of lightning.pytorch.loggers",
            "write logger=True, or logger=CSVLogger(...)",
        )
    return loggers


def call_with_limit(limit: float, function: Callable[[], Any]) -> Any:
    """Return the function's result, or raise its exception.

    Args:
        limit: seconds to wait; those in which this process is stopped do not count.
        function: the function, which is called in another thread.

    Raises:
        TimeoutError: it takes longer than ``limit``.
    """
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["result"] = function()
        except Exception as error:
            outcome["error"] = error

    # a daemon, so that a store that never answers does not keep the process alive
    thread = Thread(target=work, name="tracking", daemon=True)
    thread.start()
    waited = AwakeTimer()
    while thread.is_alive() and waited.seconds() < limit:
        thread.join(POLL_SECONDS)
    if "result" in outcome:
        return outcome["result"]
    raise outcome.get("error", TimeoutError(f"no answer in {limit:g} s"))


def reason(error: BaseException) -> str:
    """Return an error as one line without secrets.

    Secrets are hidden before the line is cut, since half of an address would not be recognised.
    """
    return f"{type(error).__name__}: {redact(str(error)).strip().partition(chr(10))[0][:200]}"
