"""Rounds of a deployment that go by the time that passes: who has answered in it, and how long it was."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from fl_lightning.clock import Clock, Rounds, SameDevice, Timing
from fl_lightning.clock.timing import ANSWERED, only_used
from fl_lightning.clock.trained import Draw, Train, Trained
from fl_lightning.hooks import Context, RoundRecord
from fl_lightning.rng import stream
from fl_lightning.support import disk
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.wire import LedgerEntry

now = time.monotonic
"""Seconds of a clock that is never set back."""
LEAST_SECONDS = 1e-3
"""That messages are taken to be on their way at least."""


class WallTiming(Timing):
    """Measured time in the place of virtual time: the same forms of rounds, metrics and columns.

    Seconds of a round are those from its first order to its end, as the server sees them; seconds since the
    start of the run are their sum. They are measured, so that they differ between two equal runs, and so do
    the uploads that are in time.

    Args:
        rounds: who is used and when a round ends.

    What a client's first round has taken is kept, where its node had no other client in that round:
    ``devices.csv`` in the run directory is a table for ``trainer.clock.devices``, by which a simulation has
    about the seconds of this deployment. A node says how long it has computed; the rest is taken for its
    line's, which has one rate for both directions.

    Attributes:
        arrived: seconds of the round at which each upload was there, by client id.
        silent: ids of clients that were asked and whose node has not answered by the end of the round.
        length: seconds of the round.
        devices: what was measured, by client id: seconds of an example, and bytes per second.
    """

    is_measured = True

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(Clock(devices=SameDevice()), rounds)
        self.arrived, self.silent, self.length = dict[int, float](), set[int](), 0.0
        self.devices, self._computed = dict[int, tuple[float, float]](), dict[int, float]()
        self._start = 0.0

    def on_check(self, context: Context) -> None:
        super().on_check(context)
        self.devices = {}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"devices": {str(id): [*one] for id, one in self.devices.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        found = state.get("devices", {}).items()
        self.devices = {int(id): (seconds, rate) for id, (seconds, rate) in found}

    def begin(self) -> None:
        """Begin a round: its first order is sent now."""
        self._forget()
        self._start = now()

    def note(self, clients: Collection[int], computed: float | None) -> None:
        """Note that the uploads of a node's clients are there.

        Args:
            clients: their ids.
            computed: seconds that the node has computed for its only client; None: it had others too.
        """
        self.arrived |= dict.fromkeys(clients, now() - self._start)
        if computed is not None:
            self._computed |= dict.fromkeys(clients, computed)

    def _forget(self) -> None:
        self.arrived, self.silent, self.length, self._computed = {}, set(), 0.0, {}

    def close(self, silent: Collection[int]) -> None:
        """End the round, without those whose node has not answered."""
        self.silent, self.length = {*silent}, now() - self._start

    def collect(self, context: Any, round: int, train: Train, draw: Draw) -> Trained:
        """Return what a round is made of. Late uploads are lost, whether they are here by now or not."""
        self._forget()
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
        self,
        context: Any,
        trained: Trained,
        entries: Sequence[LedgerEntry],
        record: RoundRecord,
        links: Sequence[LedgerEntry] = (),
    ) -> tuple[list[LedgerEntry], list[LedgerEntry]]:
        begin, self.now = self.now, self.now + self.length
        self._measure(context, trained, entries)
        record.metrics |= {
            "clock/seconds": self.now,
            "clock/round_seconds": self.length,
            "clock/idle": self._idle(),
            "clients/late": float(trained.late),
        }
        timed = [
            one.timed(begin, begin + self.arrived[one.client]) if one.client in self.arrived else one
            for one in entries
        ]
        return timed, [*links]

    def _measure(self, context: Any, trained: Trained, entries: Sequence[LedgerEntry]) -> None:
        """Note what clients took that are measured for the first time, and write the table."""
        new = [one for one in entries if one.client in self._computed and one.client not in self.devices]
        for one in new:
            computed = self._computed[one.client]
            on_its_way = max(self.arrived[one.client] - computed, LEAST_SECONDS)
            seconds = computed / max(trained.examples.get(one.client, 0), 1)
            self.devices[one.client] = seconds, (one.download + one.upload) / on_its_way
        if new:
            rows = [
                f"{id},{one:.6g},{rate:.6g},{rate:.6g}" for id, (one, rate) in sorted(self.devices.items())
            ]
            table = "\n".join(["client,seconds_per_example,down,up", *rows, ""])
            disk.replace(context.run_dir / "devices.csv", table.encode())

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
