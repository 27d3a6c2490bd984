"""The rounds that a run has done, and when its checkpoints are written and removed."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from fl_lightning.config.settings import flatten, is_number
from fl_lightning.errors import MisuseError, RunStopped
from fl_lightning.federation import Federation
from fl_lightning.hooks import RoundRecord
from fl_lightning.metrics import final_summary
from fl_lightning.run.directory import RunDirectory, read_json
from fl_lightning.run.resume import Start, check_same
from fl_lightning.run.snapshot import Snapshot, restore
from fl_lightning.run.tables import numbers
from fl_lightning.run.taken_back import made_otherwise
from fl_lightning.tasks import Task

log = logging.getLogger("fl_lightning")
CHECKPOINT_SHARE = 0.02
"""Share of a run's time that checkpoints may take where ``checkpoint_every`` is not given."""


class Progress:
    """The rounds of a run that are done, and its checkpoints.

    Args:
        settings: the configuration, nested and without secrets.
        identity: SHA-256 of what the results rest on beside the configuration, by name.
        task: names the metric that selects.
        every: rounds between checkpoints; 0 for one at the end only; None for as many as take
            :data:`CHECKPOINT_SHARE` of the time.
        keep: number of newest checkpoints that are kept beside the best one.

    Attributes:
        done: the run at the end of its last complete round.
        history: one row of metrics per round.
        saved: round of the newest checkpoint; 0 if there is none.
        changed: whether the run is continued with another configuration than before.
        there: rounds in the tables of the run that is continued.
        taken_back: whether some of them are made anew, and may be others than they were: with
            another configuration, code, engine or device, or in a deployment.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        identity: Mapping[str, Any],
        task: Task,
        *,
        every: int | None,
        keep: int,
    ) -> None:
        self.settings, self.identity, self.every, self.keep = settings, identity, every, keep
        self.task = task
        self.done = Snapshot()
        self.history: list[dict[str, float]] = []
        self.saved = 0
        self.there, self.taken_back = 0, False
        self.changed = False
        self._unsaved_best: Snapshot | None = None
        self._next_save = 0.0  # on the clock of time.monotonic

    @property
    def summary(self) -> dict[str, float]:
        """The ``final/*`` metrics of the rounds so far."""
        return final_summary(
            self.history,
            self.task.primary,
            higher_is_better=self.task.higher_is_better,
            is_share=self.task.primary in self.task.shares,
        )

    def restore(self, fed: Federation, start: Start, allow_changed: bool) -> None:
        """Bring the federation to the state in which the run is continued. No file is written.

        Raises:
            InputError: the run has another configuration and ``allow_changed`` is false, or it has
                another method or network.
        """
        if start.run is None:
            return
        self.changed = check_same(start, self.settings, self.identity, allow_changed)
        table = RunDirectory(start.run).tables["metrics"]
        self.there = table.rows_there
        if start.checkpoint is not None:
            self.done = restore(fed, start.checkpoint)
            start.checkpoint.tensors.clear()  # a rank need not keep the states of all clients
            self.saved = self.done.round
            self.history = numbers(table.until(self.done.tables["metrics"]))
        self.taken_back = self.there > len(self.history) and (
            self.changed
            or "deployment" in read_json(start.run / "metadata.json")
            or made_otherwise(
                start.run, self.done.round, flatten(self.settings), str(fed.fabric.device)
            )
        )
        if self.taken_back:
            log.warning(
                "rounds after %d are made anew in another way: metrics.csv will have these alone; "
                "in MLflow the run has a new record, and that of before a tag taken_back",
                self.done.round,
            )

    def add(self, fed: Federation, record: RoundRecord, run: RunDirectory) -> None:
        """Add a round that is done: append its rows to the tables, and save a checkpoint if one is
        due.

        Raises:
            TypeError: a method or a meter gave a metric that is not a number.
            MisuseError: one is called ``round``.
            OSError: the run directory cannot be written.
        """
        check_numbers(record)
        if "round" in record.metrics:
            rule = "it is the number of the round in metrics.csv"
            raise MisuseError("the metric round", rule, "write another name")
        row = {"round": record.round, **record.metrics}
        run.tables["metrics"].append([row])
        run.tables["ledger"].append([entry.row() for entry in fed.ledger.entries])
        fed.ledger.entries.clear()
        self.history.append(row)
        self.done = self.done.after(
            fed, record, {name: table.mark for name, table in run.tables.items()}
        )
        if self.done.best_round == record.round:
            self._unsaved_best = self.done
        if self._is_due():
            self.save(run)

    def check_learned(self, ended: str) -> None:
        """Refuse to finish a run that has learned nothing.

        Args:
            ended: why it ends early; empty: it does not.

        Raises:
            RunStopped: no round was run, or no upload of any round was averaged.
        """
        if not self.history:
            raise RunStopped(
                f"no round was run: {ended}",
                "a run that ends before its first round has learned nothing",
                "let the callback that ends it forget the fit before this one in on_check, or change its "
                "arguments",
            )
        if any(row["clients/trained"] for row in self.history):
            return
        # those that are late or offline are dropped too
        ends = ("rejected", "dropped", "late", "offline")
        sums = {end: int(sum(row.get(f"clients/{end}", 0) for row in self.history)) for end in ends}
        counts = ", ".join(f"{count} {end}" for end, count in sums.items())
        raise RunStopped(
            f"no upload of {len(self.history)} rounds was ever counted ({counts}), so nothing was learned",
            "ledger.csv in the run directory says what became of each upload, and run.log why uploads were "
            "rejected and rounds were void",
            "mend the cause and start the run anew",
        )

    def _is_due(self) -> bool:
        if self.every is None:
            return time.monotonic() >= self._next_save
        return self.every > 0 and self.done.round % self.every == 0

    def save(self, run: RunDirectory) -> None:
        """Write a checkpoint of the last complete round, and one of the best round if it has none
        yet.

        Older checkpoints are then removed.
        """
        if self.saved == self.done.round:
            return
        started = time.monotonic()
        for table in run.tables.values():
            table.sync()
        if self._unsaved_best and self._unsaved_best is not self.done:
            # first: were it left unwritten, nobody would know to write it
            self._unsaved_best.save(run, self.settings, self.identity)
        self.done.save(run, self.settings, self.identity)
        self.saved, self._unsaved_best = self.done.round, None
        self.prune(run)
        ended = time.monotonic()
        self._next_save = ended + (ended - started) / CHECKPOINT_SHARE

    def prune(self, run: RunDirectory) -> None:
        """Remove all checkpoints but the ``keep`` newest and the best one."""
        run.prune(self.keep, self.done.best_round)


def check_numbers(record: RoundRecord) -> None:
    """Refuse a metric that is not a number: files would have it as a text.

    Raises:
        TypeError: there is one.
    """
    odd = {name: value for name, value in record.metrics.items() if not is_number(value)}
    if odd:
        raise TypeError(
            f"metrics {odd} of round {record.round}; a metric of a method or a meter is a number; "
            "return int or float"
        )
