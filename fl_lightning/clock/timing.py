"""The virtual time of a run: what its rounds last, and whose uploads they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fl_lightning.aggregation.base import Receipt
from fl_lightning.clock.clock import Clock
from fl_lightning.clock.devices import DeviceTable
from fl_lightning.clock.rounds import Ending, Rounds
from fl_lightning.hooks import Context, Meter, RoundRecord
from fl_lightning.wire import LedgerEntry


class Timing(Meter):
    """Clock and form of the rounds, and the virtual seconds that have passed, which checkpoints hold.

    Args:
        clock: how long clients take.
        rounds: who is used and when a round ends.

    Attributes:
        now: virtual seconds since the start of the run, at the end of its last round.
    """

    def __init__(self, clock: Clock, rounds: Rounds) -> None:
        self.clock, self.rounds, self.now = clock, rounds, 0.0
        self.ending: Ending | None = None
        self.late = 0

    def on_check(self, context: Context) -> None:
        if isinstance(self.clock.devices, DeviceTable):
            self.clock.devices.check([int(client) for client in context.data.active])

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now = float(state["now"])

    def leave_out(
        self, seed: int, cohort: int, examples: Mapping[int, int], receipts: Sequence[Receipt]
    ) -> list[Receipt]:
        """Return the receipts of a round, those of late clients as lost.

        Args:
            seed: seed of the run.
            cohort: how many clients are wanted.
            examples: of each client that was sent the broadcast, the examples that its steps took, by id.
            receipts: one for each client that was asked.
        """
        self.ending, self.late = None, 0
        if not self.rounds.leaves_out:
            return list(receipts)
        returned = {
            receipt.client.id: self._seconds(seed, examples, receipt.entry)
            for receipt in receipts
            if receipt.entry.status == "trained"
        }
        self.ending = self.rounds.end(returned, cohort=cohort, began=len(examples))
        late = returned.keys() - self.ending.used
        self.late = len(late)
        return [
            replace(receipt, entry=receipt.entry.unused(), examples=0)
            if receipt.client.id in late
            else receipt
            for receipt in receipts
        ]

    def end_round(
        self,
        seed: int,
        cohort: int,
        examples: Mapping[int, int],
        entries: Sequence[LedgerEntry],
        record: RoundRecord,
    ) -> list[LedgerEntry]:
        """Let the round's time pass, and return the ledger's entries with the time of each client.

        Args:
            entries: what the ledger has of the clients that were asked.
            record: takes ``clock/*`` and ``clients/late``.
            seed, cohort, examples: as :meth:`leave_out` takes them.
        """
        took = {e.client: self._seconds(seed, examples, e) for e in entries if e.client in examples}
        if self.ending is None:
            back = {e.client: took[e.client] for e in entries if e.status in ("trained", "rejected")}
            self.ending = self.rounds.end(back, cohort=cohort, began=len(took))
        length, begin = self.ending.seconds, self.now
        self.now += length
        waited = sum(length - min(seconds, length) for seconds in took.values())
        record.metrics |= {
            "clock/seconds": self.now,
            "clock/round_seconds": length,
            "clock/idle": waited / (length * len(took)) if length and took else 0.0,
            "clients/late": float(self.late),
        }
        return [
            replace(e, started=begin, ended=begin + took[e.client]) if e.client in took else e
            for e in entries
        ]

    def _seconds(self, seed: int, examples: Mapping[int, int], entry: LedgerEntry) -> float:
        id, down, up = entry.client, entry.download, entry.upload
        return self.clock.seconds(seed, entry.round, id, examples=examples[id], down=down, up=up)
