"""The journal writes a run while it goes on: its directory, ``metadata.json`` and the loggers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers import Logger

from fl_lightning.config.settings import changed_settings, config_of, flatten
from fl_lightning.distributed import collectives
from fl_lightning.errors import InputError, RunStopped, error_reason, require
from fl_lightning.federation import Federation
from fl_lightning.run.clients import FILE as CLIENTS
from fl_lightning.run.directory import RunDirectory, to_json
from fl_lightning.run.log import RunLog
from fl_lightning.run.metadata import (
    continued_metadata,
    describe_run,
    is_tracked_elsewhere,
    milliseconds,
    now,
    round_times,
    tags_of,
    tracked_anew,
    tracked_since,
)
from fl_lightning.run.paths import short_path
from fl_lightning.run.progress import Progress
from fl_lightning.run.resume import Start, newest_round
from fl_lightning.run.taken_back import note_drawn_noise
from fl_lightning.support.redaction import redact_settings
from fl_lightning.tracking.loggers import Tracking, check_records
from fl_lightning.tracking.mlflow_store import Status

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fl_lightning")


class Journal:
    """The writer of one run's directory, ``metadata.json`` and trackers.

    :meth:`open` begins or continues the run, and :meth:`finish` marks it as complete. On ranks
    other than 0 the same calls write nothing.

    Args:
        start: the run that is continued, or a start without one.
        progress: the rounds that are done.
        config: text of ``config.yaml``.
        root, experiment, name: a new run goes to ``<root>/<experiment>/<name>``.
        logger: True for MLflow, False for none, or any Lightning loggers.

    Raises:
        InputError: a logger holds the record of another run.

    Attributes:
        run: the run's directory; a new run has one from :meth:`open` on.
        metadata: the content of ``metadata.json``.
        tracker: the run's loggers, from :meth:`open` on.
    """

    run: RunDirectory
    metadata: dict[str, Any]
    tracker: Tracking

    def __init__(
        self,
        start: Start,
        progress: Progress,
        config: str,
        root: Path,
        experiment: str,
        name: str,
        *,
        logger: bool | Logger | list[Logger],
    ) -> None:
        self.start, self.progress, self.config = start, progress, config
        self.root, self.experiment, self.name, self.logger = root, experiment, name, logger
        self.is_open = False
        check_records(logger, start.run)
        if start.run is not None:
            self.run = RunDirectory(start.run)

    def is_finished(self, max_rounds: int, stopped_early: str) -> bool:
        """Return whether the run that is to be continued is complete, and log that it is.

        Raises:
            InputError: it is finished, and without a checkpoint its rounds would be made anew.
        """
        done = self.progress.done.round
        if (
            self.start.run is None
            or self.run.read_json("metadata.json").get("status") != "finished"
        ):
            return False
        require(
            self.start.checkpoint is not None,
            f"the run {self.run.path}",
            "it is finished, and its checkpoints are gone: there is nothing to go on from",
            "leave it as it is, or start another with another --trainer.run_name",
        )
        if done < max_rounds and not stopped_early:
            return False
        why = "" if done >= max_rounds else f" (stopped early: {stopped_early})"
        log.info("%s is finished: %d rounds%s, nothing to do", self.run.path, done, why)
        return True

    @property
    def engine(self) -> str | None:
        """Name of the engine that the run was started with; None for a new run. Nodes train one
        client after another."""
        name = self.before.get("engine")
        return "sequential" if name == "remote" else name

    @property
    def before(self) -> dict[str, Any]:
        """The metadata of the run that is continued; empty for a new run."""
        return {} if self.start.run is None else self.run.read_json("metadata.json")

    @property
    def summary(self) -> dict[str, float]:
        """The ``final/*`` metrics of a complete run, with those that callbacks added at its end."""
        summary, at_end = self.progress.summary, self.progress.done.round == self.start.newest
        before = self.before if at_end else {}
        own = {name: before[name] for name in before if name.startswith("final/")}
        return {**own, **summary}

    def open(
        self,
        fed: Federation,
        engine: str,
        command_line: Sequence[str],
        tags: Mapping[str, str],
        log_file: RunLog,
    ) -> None:
        """Create the run, or lock it and take it back to the end of its last complete round.

        Args:
            fed: the federation that is trained.
            engine: name of the engine that trains it.
            command_line: the words of the command that started the run.
            tags: the user's own tags, by which the run can be found.
            log_file: the log, which is written to ``run.log`` in the run directory from here on.

        Raises:
            InputError: the folder cannot be written, or another process is writing the run.
        """
        collectives.barrier()  # every rank has read the files that rank 0 changes next
        self.metadata = {
            **describe_run(fed, engine, self.progress.identity, command_line),
            "tags": redact_settings(tags or {}),
        }
        if not fed.fabric.is_global_zero:
            self.run = RunDirectory(Path(collectives.from_rank_zero("")), writes=False)
        else:
            if self.start.run is None:
                self.run = self._create(fed)
            else:
                self._reopen(fed)
            collectives.from_rank_zero(str(self.run.path))
            log_file.write_to(self.run.path)
        since = tracked_since(self.metadata)
        self.tracker = Tracking(
            self.logger,
            experiment=self.experiment,
            run_name=self.run.path.name,
            run_dir=self.run.path,
            run_id=self.metadata["tracking_run_id"],
            resumes=self.start.run is not None,
            since=since / 1000
            if "tracked_since" in self.metadata
            else min(self.run.created, since / 1000),
            started=since,
            former=self.metadata.get("former_tracking_runs", ()),
            primary=fed.data.task.primary,
        )
        self.is_open = True

    def _create(self, fed: Federation) -> RunDirectory:
        files = {
            "config.yaml": self.config,
            "partition.json": to_json(fed.data.partition_summary()),
            "metadata.json": to_json(self.metadata),
        }
        try:
            return RunDirectory.create(
                self.root, self.experiment, self.name, files, only=self.start.new_name
            )
        except OSError as error:
            root = short_path(self.root)
            raise InputError(
                f"--trainer.default_root_dir {root}",
                f"no run can be created in {root / self.experiment} ({error_reason(error)})",
                "name a folder you may write to",
            ) from error

    def _reopen(self, fed: Federation) -> None:
        done, changed = self.progress.done, self.progress.changed
        self.run.lock()
        require(
            newest_round(self.run.path) == self.start.newest,
            f"--ckpt_path {self.run.path}",
            "another process has gone on with this run in the meantime",
            "give the command again",
        )
        log.info("continuing %s after round %d", short_path(self.run.path), done.round)
        self.metadata = continued_metadata(
            self.run.read_json("metadata.json"), self.metadata, done.round, changed=changed
        )
        if is_tracked_elsewhere(self.metadata, self.run.path):
            log.info(
                "%s is a copy of %s; it gets a record of its own",
                self.run.path,
                self.metadata["tracking_run_dir"],
            )
            self.metadata |= {"tracking_run_id": None, "tracking_run_dir": None}
        if self.progress.taken_back:
            # before the rounds go, which say that it is so
            self.note(**tracked_anew(self.metadata))
        note_drawn_noise(self.run.path, done.round, self.progress.there)
        self.run.rewind(done.round, done.tables, changed=changed)
        self._restore_partition(fed)
        self.progress.prune(self.run)  # the process may have been killed before it pruned
        if changed or changed_settings(config_of(self.run.path), flatten(self.progress.settings)):
            self.run.write("config.yaml", self.config)
        self.note()

    def _restore_partition(self, fed: Federation) -> None:
        """Write ``partition.json`` again where it is not that of the data and the seed."""
        text = to_json(fed.data.partition_summary())
        if self.run.read_json("partition.json") != json.loads(text):
            log.warning(
                "%s does not describe this run's partition; it is written again",
                self.run.path / "partition.json",
            )
            self.run.write("partition.json", text)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context in which an error of the file system stops the run with one line.

        Raises:
            RunStopped: the run directory cannot be written any more.
        """
        try:
            yield
        except OSError as error:
            raise RunStopped(
                f"{short_path(self.run.path)} cannot be written any more ({error})",
                "a run needs its directory and room in it",
                f"put that right, then continue with --ckpt_path {quote(str(short_path(self.run.path)))}",
            ) from error

    def track(self) -> None:
        """Start the trackers without waiting for them, and give them the rounds before this
        start."""
        tags = tags_of(self.metadata, self.run.path)
        self.tracker.start(params=self.progress.settings, tags=tags)
        if self.start.run is not None:
            self.tracker.catch_up(
                self.progress.history, round_times(self.metadata, self.progress.history)
            )
        self.tracker.log_artifact(self.run.path / "config.yaml")

    def log_round(self, metrics: Mapping[str, float], round: int) -> None:
        """Give the metrics of a round to the trackers."""
        self.tracker.log_metrics(metrics, step=round)
        self._note_tracker()

    def _note_tracker(self) -> None:
        """Note the id of the store's run as soon as it is known.

        The run of a process that is killed before that is found by its directory.
        """
        if self.tracker.run_id not in (None, self.metadata["tracking_run_id"]):
            self.note(
                tracking_run_id=self.tracker.run_id, tracking_run_dir=str(self.run.path.absolute())
            )

    def stop(self, status: Status) -> None:
        """Close the trackers of a run that ends early, and note when it ended."""
        stopped = now()
        missing = self.tracker.finish(status, {}, milliseconds(stopped))
        with suppress(OSError):  # a full disk or a missing directory has been reported already
            self.note(stopped=stopped, **self._tracked(missing))

    def _tracked(self, missing: Mapping[str, int]) -> dict[str, Any]:
        """Return the entries of ``metadata.json`` about the trackers at the end of a run."""
        run_id = self.tracker.run_id or self.metadata["tracking_run_id"]
        found = {
            "tracking_run_id": run_id,
            "tracking_run_dir": str(self.run.path.absolute()) if run_id else None,
        }
        return found | ({"untracked_rounds": dict(missing)} if missing else {})

    def note(self, **entries: Any) -> None:
        """Add entries to the metadata and write ``metadata.json``."""
        self.metadata |= entries
        self.run.write_json("metadata.json", self.metadata)

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""
        return self.run.path

    def log_figure(self, name: str, figure: Figure) -> None:
        """Save ``figures/<name>.png`` and ``.pdf`` and hand them to the loggers."""
        for path in self.run.save_figure(name, figure):
            self.tracker.log_artifact(path, "figures")

    def log_text(self, name: str, text: str) -> None:
        """Save ``figures/<name>`` and hand it to the loggers."""
        path = self.run.figure(name)
        self.run.write(f"figures/{path.name}", text)
        self.tracker.log_artifact(path, "figures")

    def finish(
        self,
        summary: Mapping[str, float],
        weights: str,
        *,
        clients: str = "",
        stopped_early: str = "",
        kept: bool = True,
    ) -> None:
        """Mark the run as complete and close its trackers.

        Every step can be done twice: ``finished`` is written last, and a run that is killed before
        that does the steps again when it is continued.

        Args:
            summary: the ``final/*`` metrics.
            weights: SHA-256 of the final weights.
            clients: the text of ``clients.csv``; empty where no client was validated.
            stopped_early: why the run has fewer rounds than ``max_rounds``; empty if it has not.
            kept: whether the run directory stays after this call.
        """
        rejected = int(sum(row["clients/rejected"] for row in self.progress.history))
        unused = sum(row["clients/trained"] == 0 for row in self.progress.history)
        finished = now()
        self.metadata.pop("stopped_early", None)
        end = {
            "status": "finished",
            "finished": finished,
            "weights_sha256": weights,
            "rejected_uploads": rejected,
            **({"rounds_without_uploads": unused} if unused else {}),
            **({"stopped_early": stopped_early} if stopped_early else {}),
            **summary,
        }
        self.tracker.log_text(
            "metadata.json", lambda: to_json(self.metadata | end | self._tracked({}))
        )
        if clients:
            self.run.write(CLIENTS, clients)
        for name in (
            "metrics.csv",
            "ledger.csv",
            "partition.json",
            *([CLIENTS] if clients else ()),
        ):
            self.tracker.log_artifact(self.run.path / name)
        missing = self.tracker.finish("FINISHED", summary, milliseconds(finished))
        self.note(**end, **self._tracked(missing))
        if kept:
            log.info("%s", self._closing_text(summary, end))

    def _closing_text(self, summary: Mapping[str, float], end: Mapping[str, Any]) -> str:
        megabytes = sum(row["comm/total_bytes"] for row in self.progress.history) / 1e6
        width, done = max([25, *map(len, summary)]) + 1, self.progress.done.round
        notes = (
            ("stopped_early", "stopped early", ""),
            ("rounds_without_uploads", "rounds without an upload", ", see ledger.csv and run.log"),
            ("rejected_uploads", "uploads rejected", ", see ledger.csv"),
        )
        lines = [
            f"finished: {done} round{'s' * (done > 1)}, {megabytes:.1f} MB over the wire",
            *(f"  {said:<26}{end[key]}{where}" for key, said, where in notes if end.get(key)),
            *(f"  {name:<{width}}{value:.4g}" for name, value in summary.items()),
            f"run directory  {short_path(self.run.path)}",
        ]
        if self.tracker.hint:
            lines.append(f"compare runs   {self.tracker.hint}")
        return "\n".join(lines)

    def close(self) -> None:
        """Unlock the run, so that another process may continue it."""
        if self.is_open or self.start.run is not None:
            self.run.unlock()
