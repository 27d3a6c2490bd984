"""Loggers that the training neither waits for nor fails with.

The default is MLflow in ``sqlite:///mlflow.db`` (or ``MLFLOW_TRACKING_URI``); any Lightning logger can stand in its place.
Artifacts go where the logger takes them (MLflow). Each logger has a writer's thread of its own, and MLflow gets the rounds of three
seconds in one transaction; those that a killed run did not get to give it, it is given when the run is continued.
A logger that raises, or does not answer, is reported once and left alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.loggers import Logger
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.mlflow_store import (
    CALL_LIMIT,
    SQLITE,
    START_LIMIT,
    Round,
    Status,
    default_uri,
    find_run,
    is_mlflow,
    last_steps,
    log_rounds,
    log_settings,
    open_run,
    prepare,
    reason,
    takes_many,
)
from fl_lightning.redaction import redact
from fl_lightning.writer import Writer

log = logging.getLogger("fl_lightning")

PAUSE = 3.0
"""Seconds between two transactions: a page that is looked at is no older, and a transaction costs as much as 100 metrics do."""
TOGETHER = 100  # rounds of one write at most


class Channel:
    """One logger and the writer that speaks to it.

    Args:
        logger: None: the default store, to be opened.
        name: as people are told.
        failed: called once, with the channel and the error.
    """

    def __init__(self, logger: Logger | None, name: str, failed: Callable[[Channel, BaseException], Any]) -> None:
        self.logger: Any = logger
        self.name = name
        self.is_mlflow = logger is None or is_mlflow(logger)
        self.resumes: str | None = None  # the run of the store that is continued
        self.logged_until = self.summarised_at = 0
        self._together = logger is None or takes_many(logger)
        self.writer: Writer[Round] = Writer(
            self._write,
            partial(failed, self),
            limit=CALL_LIMIT,
            most=TOGETHER if self._together else 1,
            pause=PAUSE if self._together else 0.0,
        )

    def _write(self, rounds: Sequence[Round]) -> None:
        new = [round for round in rounds if not self.is_mlflow or round.step > self.logged_until]
        if self._together:
            log_rounds(self.logger, new)
            return
        for round in new:
            self.logger.log_metrics(dict(round.metrics), round.step)

    def summarise(self, summary: Mapping[str, float], step: int) -> None:
        if not (self.is_mlflow and self.summarised_at >= step):
            self.logger.log_metrics(dict(summary), step)
            self.summarised_at = step

    def finalize(self, status: Status) -> None:
        self.logger.finalize(
            status if self.is_mlflow else {"FINISHED": "success", "FAILED": "failed", "KILLED": "aborted"}[status]
        )


class Tracking:
    """The loggers of one run. Nothing here raises on their behalf or waits for them but :meth:`flush` and :meth:`finish`, and ranks
    other than 0 track nothing.

    Args:
        logger: True: MLflow; False: none; or one or more Lightning loggers.
        experiment: name of the MLflow experiment.
        run_name: name of the run in it.
        run_dir: where the run's own files are; named when a logger fails.
        run_id: MLflow run to continue: it is set to running, steps that it has are not logged again, and parameters that
            differ from the recorded ones become tags ``changed.<name>``.
        since: when ``run_dir`` was made (seconds since 1970), to continue a run whose id got lost: the store is searched for
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
        wanted: list[Logger | None] = [None] if logger is True else [*given]
        self._channels = [Channel(each, _name(each), self._failed) for each in wanted if active]
        self._resume_id, self._since = run_id, since
        self._step = 0

    @property
    def loggers(self) -> list[Logger]:
        """Those that are open and have not failed."""
        return [channel.logger for channel in list(self._channels) if channel.logger is not None]

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run, for resuming; None without MLflow, and until its store is open."""
        return next(
            (getattr(logger, "_run_id", None) for logger in self.loggers if is_mlflow(logger)), None
        )  # run_id would open the store

    @property
    def hint(self) -> str | None:
        """The command that shows the run, when the store is a local database."""
        uri = next((str(getattr(logger, "_tracking_uri", "")) for logger in self.loggers if is_mlflow(logger)), "")
        if not uri.startswith(SQLITE):
            return None
        path = Path(uri.removeprefix(SQLITE))
        return f"mlflow ui --backend-store-uri {SQLITE}{path.name if path.parent == Path.cwd() else path}"

    def start(self, params: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        """Open the stores, record ``params`` (nested; flattened with dots) and ``tags``, then what has been logged already."""
        flat, marks = as_params(params), {key: str(value) for key, value in tags.items()}
        for channel in list(self._channels):
            begin = partial(self._begin, channel, flat, marks), START_LIMIT
            if channel.logger is None:
                channel.writer.start((partial(self._open_default, channel), START_LIMIT), begin)
            else:
                channel.writer.start(begin)

    def catch_up(self, history: Sequence[Mapping[str, float]]) -> None:
        """Give MLflow the rounds that it lacks: it may have been told less than the run's own files when the run was killed."""
        for row in history:
            self._step = int(row["round"])
            metrics = {key: value for key, value in row.items() if key != "round"}
            self._put(Round(self._step, metrics, _now()), [channel for channel in self._channels if channel.is_mlflow])

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """The metrics of round ``step``."""
        self._step = step
        self._put(Round(step, dict(metrics), _now()), self._channels)

    def log_artifact(self, path: Path | str, folder: str | None = None) -> None:
        """Copy a file to the loggers that keep files, into ``folder``. It is copied soon, and must still be there then."""
        for channel in list(self._channels):
            if channel.is_mlflow:
                channel.writer.call(partial(_copy, channel, str(path), folder))

    def log_text(self, name: str, text: str) -> None:
        """As :meth:`log_artifact`, for a file that is not there yet."""
        for channel in list(self._channels):
            if channel.is_mlflow:
                channel.writer.call(partial(_copy_text, channel, name, text))

    def flush(self) -> None:
        """Wait until the loggers have all that they were given."""
        for channel in list(self._channels):
            channel.writer.flush()

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        """Record ``summary`` at the last step and close the run, once all that was given is written."""
        channels = list(self._channels)
        for channel in channels:
            if summary:
                channel.writer.call(partial(channel.summarise, dict(summary), self._step))
            channel.writer.call(partial(channel.finalize, status))
        for channel in channels:
            channel.writer.close()

    def _put(self, round: Round, channels: Sequence[Channel]) -> None:
        for channel in list(channels):
            channel.writer.put(round)

    def _open_default(self, channel: Channel) -> None:
        uri = default_uri()
        tags = {"run_dir": str(self.run_dir.absolute())}
        channel.resumes = self._resume_id or self._find(uri, self.experiment)
        channel.logger = open_run(uri, self.experiment, self.run_name, channel.resumes, tags)

    def _find(self, uri: str, experiment: str) -> str | None:
        """The run whose id got lost."""
        return None if self._since is None else find_run(uri, experiment, "run_dir", str(self.run_dir.absolute()), self._since)

    def _begin(self, channel: Channel, params: dict[str, str], tags: dict[str, str]) -> None:
        logger = channel.logger
        if not channel.is_mlflow:
            with suppress(NotImplementedError):  # Fabric's own CSVLogger has no place for them
                logger.log_hyperparams(params)
            return
        prepare()
        if logger._run_id is None:
            logger._run_id = self._resume_id or self._find(logger._tracking_uri, logger._experiment_name)
            channel.resumes = logger._run_id
        client, run_id = logger.experiment, logger.run_id
        known: dict[str, str] = {}
        if run_id in (channel.resumes, self._resume_id):
            client.update_run(run_id, status="RUNNING")
            known = client.get_run(run_id).data.params
            channel.logged_until, channel.summarised_at = last_steps(client, run_id)
        log_settings(client, run_id, params, tags, known)

    def _failed(self, channel: Channel, error: BaseException) -> None:
        self._channels.remove(channel)
        log.warning(
            "%s failed (%s); training goes on without it and every round is in %s; "
            "make the store reachable and writable, set MLFLOW_TRACKING_URI, or write --trainer.logger false",
            channel.name, reason(error), self.run_dir / "metrics.csv",
        )  # fmt: skip


def _name(logger: Logger | None) -> str:
    uri = default_uri() if logger is None else getattr(logger, "_tracking_uri", None)
    return f"MLflow at {redact(uri)}" if uri else type(logger).__name__


def _now() -> int:
    return int(1000 * time.time())


def _copy(channel: Channel, path: str, folder: str | None) -> None:
    channel.logger.experiment.log_artifact(channel.logger.run_id, path, folder)


def _copy_text(channel: Channel, name: str, text: str) -> None:
    channel.logger.experiment.log_text(channel.logger.run_id, text, name)


def as_params(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as people read them: strings with dotted names; a list is numbered only where it holds settings itself.

    >>> as_params({"data": {"root": None, "crop": [28, 28]}, "callbacks": [{"class_path": "A"}]})
    {'data.root': 'null', 'data.crop': '[28, 28]', 'callbacks.0.class_path': 'A'}
    """
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            flat |= as_params(value, f"{name}.")
        else:
            flat[name] = "null" if value is None else str(value)
    return flat
