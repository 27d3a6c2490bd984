"""How far a run is, and its checkpoints: when one is written, which are kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fl_lightning.errors import RunStopped
from fl_lightning.hooks import RoundRecord
from fl_lightning.loop import Federation
from fl_lightning.metrics import final_summary
from fl_lightning.run.directory import RunDirectory
from fl_lightning.run.resume import Start, check_same
from fl_lightning.run.snapshot import Snapshot, restore
from fl_lightning.run.tables import numbers

# a checkpoint waits until the rounds since the last one took so many times what that cost: 2 % of the run
PATIENCE = 50


class Progress:
    """The rounds that are done. Nothing of them is written before :meth:`add`.

    Args:
        settings: the configuration, nested, as it may be written.
        partition: hash of who holds which examples.
        every: rounds between checkpoints; 0: only the last one; None: as often as takes 2 % of the time.
        keep: number of newest checkpoints that are kept, beside the best one.

    Attributes:
        done: the run at the end of its last whole round.
        history: a row of metrics per round.
        saved: round of the newest checkpoint, 0 before any.
        changed: whether the run goes on with another configuration than before.
    """

    def __init__(self, settings: Mapping[str, Any], partition: str, *, every: int | None, keep: int) -> None:
        self.settings, self.partition, self.every, self.keep = settings, partition, every, keep
        self.done = Snapshot()
        self.history: list[dict[str, float]] = []
        self.saved = 0
        self.changed = False
        self._best: Snapshot | None = None  # until it is on disk
        self._next = 0.0

    @property
    def summary(self) -> dict[str, float]:
        """The ``final/*`` metrics."""
        return final_summary(self.history)

    def restore(self, fed: Federation, start: Start, allow_changed: bool) -> None:
        """Take the federation to where it is continued. Reads only.

        Raises:
            InputError: the run was of another configuration, which is not allowed, or of another method or
                network.
        """
        if start.run is None:
            return
        self.changed = check_same(start, self.settings, self.partition, allow_changed)
        if start.checkpoint is not None:
            self.done = restore(fed, start.checkpoint)
            self.saved = self.done.round
            self.history = numbers(
                RunDirectory(start.run).tables["metrics"].until(self.done.tables["metrics"])
            )

    def add(self, fed: Federation, record: RoundRecord, run: RunDirectory) -> None:
        """A round is done: its rows to the tables, then the snapshot that counts on them, then perhaps a
        checkpoint."""
        odd = {name: value for name, value in record.metrics.items() if not isinstance(value, (int, float))}
        if odd:
            raise TypeError(
                f"metrics {odd} of round {record.round}; a metric of a method or a meter is a "
                "number; return int or float"
            )
        row = {"round": record.round, **record.metrics}
        run.tables["metrics"].append([row])
        run.tables["ledger"].append([entry.row() for entry in fed.ledger.entries])
        fed.ledger.entries.clear()
        self.history.append(row)
        self.done = self.done.after(fed, record, {name: table.mark for name, table in run.tables.items()})
        if self.done.best_round == record.round:
            self._best = self.done
        if self._is_due():
            self.save(run)

    def require_counted(self) -> None:
        """Raises:
        RunStopped: no upload of the whole run was ever averaged, so that nothing was learned.
        """
        if any(row["clients/trained"] for row in self.history):
            return
        rejected, dropped = (
            int(sum(row[f"clients/{what}"] for row in self.history)) for what in ("rejected", "dropped")
        )
        raise RunStopped(
            f"no upload of {len(self.history)} rounds was ever counted ({rejected} rejected, {dropped} "
            "dropped), so nothing was learned",
            "run.log in the run directory says why uploads were rejected",
            "mend the cause and start the run anew",
        )

    def _is_due(self) -> bool:
        if self.every is None:
            return time.monotonic() >= self._next
        return self.every > 0 and self.done.round % self.every == 0

    def save(self, run: RunDirectory) -> None:
        """Write the last whole round, and the best one if that is another and not on disk yet; then remove
        what is too old."""
        if self.saved == self.done.round:
            return
        started = time.monotonic()
        for table in run.tables.values():
            table.sync()
        self.done.save(run, self.settings, self.partition)
        self.saved = self.done.round
        if self._best and self._best is not self.done:
            self._best.save(run, self.settings, self.partition)
        self._best = None
        self.prune(run)
        ended = time.monotonic()
        self._next = ended + PATIENCE * (ended - started)

    def prune(self, run: RunDirectory) -> None:
        """Remove the checkpoints that are too old."""
        run.prune(self.keep, self.done.best_round)
