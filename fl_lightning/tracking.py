"""Loggers that can fail without the training noticing.

The default is MLflow in ``sqlite:///mlflow.db`` (or ``MLFLOW_TRACKING_URI``); any Lightning logger can stand in its place.
Artifacts go where the logger takes them (MLflow). A logger that raises, or does not answer, is reported once and left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.loggers import Logger
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning.mlflow_store import (
    CALL_LIMIT,
    SQLITE,
    START_LIMIT,
    Status,
    default_uri,
    find_run,
    is_mlflow,
    last_steps,
    log_settings,
    open_run,
    prepare,
    reason,
    within,
)
from fl_lightning.redaction import redact

log = logging.getLogger("fl_lightning")


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
        """Open the stores and record ``params`` (nested; flattened with dots) and ``tags``."""
        flat, marks = as_params(params), {key: str(value) for key, value in tags.items()}
        if self._wants_default:
            uri = default_uri()
            made = self._guarded(f"MLflow at {redact(uri)}", lambda: self._open_default(uri), START_LIMIT)
            self.loggers += [made] if made is not None else []
        for logger in list(self.loggers):
            self._call(logger, self._begin, logger, flat, marks, limit=START_LIMIT)

    def catch_up(self, history: Sequence[Mapping[str, float]]) -> None:
        """Give MLflow the rounds that it lacks: it may have been told less than the run's own files when the run was killed."""
        for row in history:
            self._step = int(row["round"])
            for logger in list(self.loggers):
                if is_mlflow(logger) and self._step > self._logged_until:
                    self._call(logger, logger.log_metrics, {k: v for k, v in row.items() if k != "round"}, self._step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """The metrics of round ``step``: one call per logger, which for MLflow is one transaction of a few milliseconds."""
        self._step = step
        for logger in list(self.loggers):
            if not (is_mlflow(logger) and step <= self._logged_until):
                self._call(logger, logger.log_metrics, dict(metrics), step)

    def log_artifact(self, path: Path | str, folder: str | None = None) -> None:
        """Copy a file to the loggers that keep files, into ``folder``."""
        for logger in list(self.loggers):
            if is_mlflow(logger):
                self._call(logger, lambda it: it.experiment.log_artifact(it.run_id, str(path), folder), logger)

    def log_text(self, name: str, text: str) -> None:
        """As :meth:`log_artifact`, for a file that is not there yet."""
        for logger in list(self.loggers):
            if is_mlflow(logger):
                self._call(logger, lambda it: it.experiment.log_text(it.run_id, text, name), logger)

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        """Record ``summary`` at the last step and close the run."""
        for logger in list(self.loggers):
            if summary and not (is_mlflow(logger) and self._summarised_at >= self._step):
                self._call(logger, logger.log_metrics, dict(summary), self._step)
            ended = status if is_mlflow(logger) else {"FINISHED": "success", "FAILED": "failed", "KILLED": "aborted"}[status]
            self._call(logger, logger.finalize, ended)

    def _open_default(self, uri: str) -> Logger:
        tags = {"run_dir": str(self.run_dir.absolute())}
        if self._since is not None and self._resume_id is None:
            self._resume_id = find_run(uri, self.experiment, "run_dir", tags["run_dir"], self._since)
        return open_run(uri, self.experiment, self.run_name, self._resume_id, tags)

    def _begin(self, logger: Any, params: dict[str, str], tags: dict[str, str]) -> None:
        if not is_mlflow(logger):
            with suppress(NotImplementedError):  # Fabric's own CSVLogger has no place for them
                logger.log_hyperparams(params)
            return
        prepare()
        logger._run_id = logger._run_id or self._resume_id
        client, run_id = logger.experiment, logger.run_id
        known: dict[str, str] = {}
        if self._resume_id == run_id:
            client.update_run(run_id, status="RUNNING")
            known = client.get_run(run_id).data.params
            self._logged_until, self._summarised_at = last_steps(client, run_id)
        log_settings(client, run_id, params, tags, known)

    def _call(self, logger: Logger, function: Callable[..., Any], *args: Any, limit: float | None = None) -> None:
        uri = getattr(logger, "_tracking_uri", None)
        name = f"MLflow at {redact(uri)}" if uri else type(logger).__name__
        failed = object()
        if self._guarded(name, lambda: function(*args), limit or CALL_LIMIT, otherwise=failed) is failed:
            self.loggers.remove(logger)

    def _guarded(self, name: str, function: Callable[[], Any], limit: float, otherwise: Any = None) -> Any:
        """The function's result; ``otherwise``, and a warning, when it raises or takes more than ``limit`` seconds."""
        try:
            return within(limit, function)
        except Exception as error:
            log.warning(
                "%s failed (%s); training goes on without it and every round is in %s; "
                "make the store reachable and writable, set MLFLOW_TRACKING_URI, or write --trainer.logger false",
                name, reason(error), self.run_dir / "metrics.csv",
            )  # fmt: skip
            return otherwise


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
