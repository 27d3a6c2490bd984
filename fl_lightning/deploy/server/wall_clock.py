"""Rounds of a deployment that go by the time that passes: who has answered in it, and how long it was."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from fl_lightning.clock import Clock, Rounds, SameDevice, Timing
from fl_lightning.clock.timing import ANSWERED, only_used
from fl_lightning.clock.trained import Draw, Train, Trained
from fl_lightning.hooks import RoundRecord
from fl_lightning.rng import stream
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.wire import LedgerEntry

now = time.monotonic
"""Seconds of a clock that is never set back."""


class WallTiming(Timing):
    """Measured time in the place of virtual time: the same forms of rounds, metrics and columns.

    Seconds of a round are those from its first order to its end, as the server sees them; seconds since the
    start of the run are their sum. They are measured, so that they differ between two equal runs, and so do
    the uploads that are in time.

    Args:
        rounds: who is used and when a round ends.

    Attributes:
        arrived: seconds of the round at which each upload was there, by client id.
        silent: ids of clients that were asked and whose node has not answered by the end of the round.
        length: seconds of the round.
    """

    is_measured = True

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(Clock(devices=SameDevice()), rounds)
        self.arrived, self.silent, self.length = dict[int, float](), set[int](), 0.0
        self._start = 0.0

    def begin(self) -> None:
        """Begin a round: its first order is sent now."""
        self.arrived, self.silent, self.length, self._start = {}, set(), 0.0, now()

    def note(self, client: int) -> None:
        """Note that a client's upload is there."""
        self.arrived[client] = now() - self._start

    def close(self, silent: Collection[int]) -> None:
        """End the round, without those whose node has not answered."""
        self.silent, self.length = {*silent}, now() - self._start

    def collect(self, context: Any, round: int, train: Train, draw: Draw) -> Trained:
        """Return what a round is made of. Late uploads are lost, whether they are here by now or not."""
        self.arrived, self.silent, self.length = {}, set(), 0.0
        trained = train(draw(context.data.active, context.invited, 0))
        answered = {
            one.client.id: self.arrived[one.client.id]
            for one in trained.receipts
            if one.entry.status in ANSWERED and one.client.id in self.arrived
        }
        valid = {one.client.id for one in trained.receipts if one.entry.status == "trained"}
        self.ending = self.rounds.end(
            answered,
            valid,
            cohort=context.cohort_size,
            began=len(self.arrived) + len(self.silent),
            lot=lambda client: stream(context.seed, "clock/ties", round, client).random(),
        )
        receipts = [
            replace(one, entry=replace(one.entry, status="lost")) if one.client.id in self.silent else one
            for one in trained.receipts
        ]
        late = self.ending.late + len(self.silent)
        return replace(only_used(trained, receipts, self.ending.used), late=late)

    def end_round(
        self, context: Any, trained: Trained, entries: Sequence[LedgerEntry], record: RoundRecord
    ) -> list[LedgerEntry]:
        begin, self.now = self.now, self.now + self.length
        record.metrics |= {
            "clock/seconds": self.now,
            "clock/round_seconds": self.length,
            "clock/idle": self._idle(),
            "clients/late": float(trained.late),
        }
        return [
            replace(one, started=begin, ended=begin + self.arrived[one.client])
            if one.client in self.arrived
            else one
            for one in entries
        ]

    def _idle(self) -> float:
        """Return the share of the round in which those that were asked had answered already."""
        asked = len(self.arrived) + len(self.silent)
        waited = sum(max(self.length - at, 0.0) for at in self.arrived.values())
        return waited / (asked * self.length) if asked and self.length else 0.0


def measure_time(trainer: FederatedTrainer) -> None:
    """Have rounds that go by a clock go by the time that passes, where clients are on nodes."""
    if trainer.timing is None and trainer.rounds.goes_by_clock:
        trainer.timing = WallTiming(trainer.rounds)
        trainer.callbacks.append(trainer.timing)
