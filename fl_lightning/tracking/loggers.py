"""The loggers of a run, for which the training does not wait and with which it does not fail.

The default is MLflow in ``sqlite:///mlflow.db`` (or ``MLFLOW_TRACKING_URI``); any Lightning logger
can take its place. Files go to MLflow only. Each logger has a thread of its own, and MLflow gets
the rounds of three seconds in one transaction. A logger that raises or does not answer is reported
once and tried again. It gets the rounds that it lacks as soon as it works, at the end of the run,
or when the run is continued. After that, ``python -m fl_lightning track`` adds them.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.loggers import Logger
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.errors import require
from fl_lightning.support.redaction import redact, redact_settings
from fl_lightning.tracking.mlflow_store import (
    CALL_LIMIT,
    SQLITE,
    START_LIMIT,
    Round,
    Status,
    accepts_batches,
    default_uri,
    find_mlflow_run,
    is_mlflow,
    log_rounds,
    log_settings,
    logged_steps,
    loggers_of,
    make_run,
    mark_taken_back,
    open_run,
    prepare,
    reason,
    store_has_run,
    with_first_charts,
    with_ordered_times,
)
from fl_lightning.tracking.writer import Writer

log = logging.getLogger("fl_lightning")

MIN_WRITE_INTERVAL_SECONDS = 3.0
"""Time between two transactions, each of which costs as much as 100 metrics; pages are no older
than this."""
MAX_ROUNDS_PER_WRITE = 100
RUN_OF_RECORD = "_run_of_record"
"""The attribute of a logger that says of which run directory it holds the record."""


def check_records(logger: Logger | Sequence[Logger] | bool, run_dir: Path | None) -> None:
    """Refuse loggers that hold the record of another run and cannot begin a new one.

    Args:
        run_dir: the run that is continued; None for a new one.

    Raises:
        InputError: a logger does, whose record would be of two runs.
    """
    for one in loggers_of(logger):
        require(
            is_mlflow(one) or _holds(one) in (None, run_dir and run_dir.resolve()),
            f"logger={type(one).__name__} of the run {_holds(one)}",
            "its record would be of two runs",
            "make a logger and a trainer for each run, or continue that run with ckpt_path",
        )


def _begin_record(logger: Logger, run_dir: Path) -> None:
    """Have a logger that a fit before may have used hold the record of this run, with each round
    once."""
    held, run_dir = _holds(logger), run_dir.resolve()
    if held not in (None, run_dir):  # only MLflow's, or check_records would have refused it
        vars(logger).update(_run_id=None, _initialized=False)
    elif held is not None and starts_new_log(logger):
        vars(logger).update(_experiment=None)  # it gets the rounds before once more
    setattr(logger, RUN_OF_RECORD, run_dir)


def _holds(logger: Logger | None) -> Path | None:
    return getattr(logger, RUN_OF_RECORD, None)


class Channel:
    """One logger and the thread that writes to it.

    Args:
        logger: the logger; None for the default store, which is opened later.
        name: name of the logger in messages.
        failed: a function that is called with the channel and the error when trouble begins.
        recovered: a function that is called with the channel when the logger works again.
    """

    def __init__(
        self,
        logger: Logger | None,
        name: str,
        failed: Callable[[Channel, BaseException], Any],
        recovered: Callable[[Channel], Any],
    ) -> None:
        self.logger: Any = logger
        self.name = name
        self.is_mlflow = logger is None or is_mlflow(logger)
        self.resumes: str | None = None  # id of the store's run that is continued
        # steps and times that the store had when last asked
        self.known: dict[str, dict[int, int]] = {}
        self.tries = 0  # attempts to open the store
        # whether a call raised that the store may have carried out all the same
        self._unsure = False
        self._batches = logger is None or accepts_batches(logger)
        self.writer: Writer[Round] = Writer(
            self._write,
            partial(failed, self),
            partial(recovered, self),
            limit=CALL_LIMIT,
            max_rows=MAX_ROUNDS_PER_WRITE if self._batches else 1,
            pause=MIN_WRITE_INTERVAL_SECONDS if self._batches else 0.0,
        )

    def _write(self, rounds: Sequence[Round]) -> None:
        if self._unsure and self.is_mlflow:
            self.known = logged_steps(self.logger.experiment, self.logger.run_id)
        before, self._unsure = self._unsure, True
        if self._batches:
            log_rounds(self.logger, with_ordered_times(rounds, self.known), self.known)
        else:
            for round in rounds:
                self._log(round, again=before)
        self._unsure = False

    def _log(self, round: Round, *, again: bool) -> None:
        """Log one round by the logger's own method."""
        if any(round.step in steps for name, steps in self.known.items() if "final/" not in name):
            return
        # a CSVLogger whose disk was full still holds the row
        held = getattr(getattr(self.logger, "_experiment", None), "metrics", None)
        if again and isinstance(held, list) and held and held[-1].get("step") == round.step:
            self.logger.save()
            return
        self.logger.log_metrics(dict(round.metrics), round.step)

    def log_summary(self, summary: Mapping[str, float], step: int) -> None:
        """Log the ``final/*`` metrics, unless a logger that takes single rounds has them
        already."""
        if self._batches:
            self._write([Round(step, summary, _now())])
        elif not any(step in steps for name, steps in self.known.items() if "final/" in name):
            self.logger.log_metrics(dict(summary), step)

    def finalize(self, status: Status, ended: int) -> None:
        """Close the logger's run, which ended at this time (milliseconds since 1970)."""
        self.logger.finalize(
            status
            if self.is_mlflow
            else {"FINISHED": "success", "FAILED": "failed", "KILLED": "aborted"}[status]
        )
        if self.is_mlflow:  # its finalize takes the current time as the end of the run
            self.logger.experiment.set_terminated(self.logger.run_id, status, ended)


class Tracking:
    """The loggers of one run.

    Only :meth:`flush` and :meth:`finish` wait for them, and no method raises their errors. Ranks
    other than 0 have no loggers.

    Args:
        logger: True for MLflow, False for none, or one or more Lightning loggers.
        experiment: name of the MLflow experiment.
        run_name: name of the run in it.
        run_dir: the directory of the run, which a warning names when a logger fails.
        run_id: id of an MLflow run to continue. Its status becomes running, steps that it has are
            not logged again, and parameters that differ from the recorded ones become tags
            ``changed.<name>``.
        resumes: whether the run has been tracked before. If its id is lost, the store is searched
            for a run of this directory.
        since: when ``run_dir`` was made, in seconds since 1970. Runs in the store that are older
            belong to an earlier directory of that name.
        started: when the run began, in milliseconds since 1970; None for now.
        former: ids of MLflow runs that had rounds which were taken back; they get a tag that says
            so.
        primary: the task's primary metric, which MLflow shows first; empty: none is.
    """

    def __init__(
        self,
        logger: Logger | Sequence[Logger] | bool = True,
        *,
        experiment: str,
        run_name: str,
        run_dir: Path,
        run_id: str | None = None,
        resumes: bool = False,
        since: float = 0.0,
        started: int | None = None,
        former: Sequence[str] = (),
        primary: str = "",
    ) -> None:
        active = getattr(rank_zero_only, "rank", 0) == 0
        self.experiment, self.run_name, self.run_dir = experiment, run_name, Path(run_dir)
        for each in loggers_of(logger):
            if each is not None:
                _begin_record(each, self.run_dir)
        self._channels = [
            Channel(each, _name(each), self._failed, self._recovered)
            for each in loggers_of(logger)
            if active
        ]
        self._resume_id, self._resumes, self._since = run_id, resumes, since
        self._started = _now() if started is None else started
        self._former = former
        self._step = 0
        self._primary = primary

    @property
    def loggers(self) -> list[Logger]:
        """The loggers that are open."""
        return [channel.logger for channel in self._channels if channel.logger is not None]

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run, for resuming; None without MLflow, and until its store is open."""
        # the public attribute run_id would open the store
        return next(
            (getattr(logger, "_run_id", None) for logger in self.loggers if is_mlflow(logger)), None
        )

    @property
    def hint(self) -> str | None:
        """The command that shows the run if the store is a local database, else None."""
        uri = next(
            (
                str(getattr(logger, "_tracking_uri", ""))
                for logger in self.loggers
                if is_mlflow(logger)
            ),
            "",
        )
        if not uri.startswith(SQLITE):
            return None
        path = Path(uri.removeprefix(SQLITE))
        shown = path.name if path.parent == Path.cwd() else path
        return f"mlflow ui --backend-store-uri {shlex.quote(f'{SQLITE}{shown}')}"

    def start(self, params: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
        """Open the stores, and record the settings, the tags and what has been logged already.

        Args:
            params: nested settings, which are recorded under dotted names.
            tags: tags of the run.
        """
        flat = as_params(redact_settings(params))
        marks = {key: str(value) for key, value in redact_settings(tags).items()}
        for channel in self._channels:
            begin = partial(self._begin, channel, flat, marks), START_LIMIT
            if channel.logger is None:
                channel.writer.start((partial(self._open_default, channel), START_LIMIT), begin)
            else:
                channel.writer.start(begin)

    def catch_up(self, history: Sequence[Mapping[str, float]], times: Sequence[int]) -> None:
        """Give the rounds before this start to the loggers that may lack them.

        Those are MLflow, and loggers that begin a new log at each start.

        Args:
            history: one row of metrics per round.
            times: when each round ended, in milliseconds since 1970.
        """
        channels = [
            channel
            for channel in self._channels
            if channel.is_mlflow or starts_new_log(channel.logger)
        ]
        for row, ended in zip(history, times, strict=True):
            self._step = int(row["round"])
            metrics = {key: value for key, value in row.items() if key != "round"}
            self._put(Round(self._step, metrics, ended), channels)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of round ``step``."""
        self._step = step
        self._put(Round(step, dict(metrics), _now()), self._channels)

    def _put(self, round: Round, channels: Sequence[Channel]) -> None:
        for channel in channels:
            shown = (
                with_first_charts(round.metrics, self._primary)
                if channel.is_mlflow
                else round.metrics
            )
            channel.writer.put(round._replace(metrics=shown))

    def log_artifact(self, path: Path | str, folder: str | None = None) -> None:
        """Copy a file to the loggers that keep files, into ``folder``.

        It is copied later by another thread, and must still exist then.
        """
        for channel in self._channels:
            if channel.is_mlflow:
                channel.writer.call(partial(_copy, channel, str(path), folder), optional=True)

    def log_text(self, name: str, text: Callable[[], str]) -> None:
        """Write a text file to the loggers that keep files.

        ``text`` is called by another thread when the run has its id.
        """
        for channel in self._channels:
            if channel.is_mlflow:
                channel.writer.call(partial(_copy_text, channel, name, text), optional=True)

    def flush(self) -> None:
        """Wait until the loggers have written everything, or have failed."""
        for channel in self._channels:
            channel.writer.flush()

    def finish(
        self, status: Status, summary: Mapping[str, float], ended: int | None = None
    ) -> dict[str, int]:
        """Record a summary at the last step and close the run, after everything else is written.

        Args:
            status: how the run ended.
            summary: the ``final/*`` metrics; empty if the run did not finish.
            ended: when the run ended, in milliseconds since 1970; None for now.

        Returns:
            The number of rounds that a logger may lack, by the logger's name; loggers that have all
            are left out.
        """
        ended = _now() if ended is None else ended
        for channel in self._channels:
            if summary:
                channel.writer.call(partial(channel.log_summary, dict(summary), self._step))
            channel.writer.call(partial(channel.finalize, status, ended))
        for channel in self._channels:
            if not channel.writer.close() or channel.writer.put_aside:
                self._tell_missing(channel)
        return {
            channel.name: channel.writer.waiting
            for channel in self._channels
            if channel.writer.waiting
        }

    def _tell_missing(self, channel: Channel) -> None:
        rounds, files = channel.writer.waiting, channel.writer.put_aside
        missing = (
            f"{rounds} rounds" if rounds else f"{files} files" if files else "how the run ended"
        )
        again = "they are in metrics.csv"
        if channel.is_mlflow:
            uri = getattr(channel.logger, "_tracking_uri", None)
            flag = "" if uri in (None, default_uri()) else f" --uri {shlex.quote(redact(uri))}"
            again = f"to bring it in: python -m fl_lightning track {shlex.quote(str(self.run_dir))}{flag}"
        error = channel.writer.error
        log.warning(
            "%s lacks %s (%s); %s",
            channel.name,
            missing,
            reason(error) if error else "no answer",
            again,
        )

    def _open_default(self, channel: Channel) -> None:
        uri = default_uri()
        tags = {"run_dir": str(self.run_dir.absolute())}
        channel.resumes = self._continued(channel, uri, self.experiment)
        channel.logger = open_run(
            uri, self.experiment, self.run_name, channel.resumes, tags, self._started
        )

    def _continued(self, channel: Channel, uri: str, experiment: str) -> str | None:
        """Return the run that goes on: that of the known id if the store has it, else the one of
        this directory; None for a new one."""
        if self._resume_id and store_has_run(uri, self._resume_id):
            return self._resume_id
        found = self._find(channel, uri, experiment)
        if self._resume_id and not found:
            log.warning(
                "MLflow at %s has no run %s to continue; the run gets a new record there",
                redact(uri),
                self._resume_id,
            )
        return found

    def _find(self, channel: Channel, uri: str, experiment: str) -> str | None:
        """Return the run whose id is lost, after a kill or because the store's answer did not
        arrive."""
        channel.tries += 1
        if not self._resumes and channel.tries == 1:
            return None
        place = str(self.run_dir.absolute())
        return find_mlflow_run(uri, experiment, "run_dir", place, self._since, self._former)

    def _begin(self, channel: Channel, params: dict[str, str], tags: dict[str, str]) -> None:
        logger = channel.logger
        if not channel.is_mlflow:
            if (
                self._resumes
                and hasattr(logger, "_kwargs")
                and starts_new_log(logger)
                and logger._kwargs.get("purge_step") is None
            ):
                # with this TensorBoard hides the rounds in files of earlier starts
                logger._kwargs["purge_step"] = 0
            with suppress(NotImplementedError):  # Fabric's own CSVLogger takes no hyper-parameters
                logger.log_hyperparams(params)
            return
        prepare()
        if logger._run_id is None:
            logger._run_id = self._continued(channel, logger._tracking_uri, logger._experiment_name)
            channel.resumes = logger._run_id
            logger.tags = {
                **redact_settings(logger.tags or {}),
                "run_dir": str(self.run_dir.absolute()),
            }
        run_id = make_run(logger, self._started)
        client = logger.experiment
        if run_id in (channel.resumes, self._resume_id):
            client.update_run(run_id, status="RUNNING")
            channel.known = logged_steps(client, run_id)
        log_settings(client, run_id, params, tags)
        mark_taken_back(client, self._former)

    def _failed(self, channel: Channel, error: BaseException) -> None:
        log.warning(
            "%s failed (%s); training goes on, every round is in %s, and it is tried again; "
            "make the store reachable and writable, set MLFLOW_TRACKING_URI, or write --trainer.logger false",
            channel.name, reason(error), self.run_dir / "metrics.csv",
        )  # fmt: skip

    def _recovered(self, channel: Channel) -> None:
        log.info("%s works again and gets the rounds that it lacks", channel.name)


def _name(logger: Logger | None) -> str:
    uri = default_uri() if logger is None else getattr(logger, "_tracking_uri", None)
    return f"MLflow at {redact(uri)}" if uri else type(logger).__name__


def _now() -> int:
    return int(1000 * time.time())


def _copy(channel: Channel, path: str, folder: str | None) -> None:
    channel.logger.experiment.log_artifact(channel.logger.run_id, path, folder)


def _copy_text(channel: Channel, name: str, text: Callable[[], str]) -> None:
    channel.logger.experiment.log_text(channel.logger.run_id, text(), name)


def starts_new_log(logger: Any) -> bool:
    """Return whether a logger begins a new log at each start, which then needs the earlier rounds
    too.

    CSVLogger and TensorBoardLogger do.
    """
    return any(cls.__name__ in ("CSVLogger", "TensorBoardLogger") for cls in type(logger).__mro__)


def as_params(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as texts with dotted names.

    The items of a list get numbers only if there are settings among them.

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
