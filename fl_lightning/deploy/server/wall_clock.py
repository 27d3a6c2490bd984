"""Rounds of a deployment that go by the time that passes: who has answered in it, and how long it
was."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from fl_lightning.clock import Clock, Rounds, SameDevice, Timing
from fl_lightning.clock.timing import ANSWERED, only_used
from fl_lightning.clock.trained import Draw, Train, Trained
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.hooks import Context, RoundRecord
from fl_lightning.rng import stream
from fl_lightning.support import disk
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.wire import LedgerEntry

now = time.monotonic
"""Seconds of a clock that is never set back."""
LEAST_SECONDS = 1e-3
"""That messages are taken to be on their way at least."""
EMPTY_PROBES = 3
"""Empty orders by which latencies are measured, the median of which counts: nodes look for work,
and the server for answers, every tenth of a second, and a node that has waited for long the first
time later."""
MOST_PROBE_BYTES, MOST_PROBE_SECONDS = 2**18, 20.0
"""Size of the order by which rates down are measured, at most, and how long its answer is waited
for."""

Exchange = Callable[[Mapping[str, bytes], float], Iterable[tuple[str, Message]]]
"""Sends orders to nodes and yields node and answer, within so many seconds."""


@dataclass(frozen=True)
class Measured:
    """A client's device and line.

    Args:
        seconds: of an example.
        down, up: bytes per second.
        latency: seconds of a round beside computing and bytes.
    """

    seconds: float
    down: float
    up: float
    latency: float = 0.0

    @classmethod
    def of(
        cls, entry: LedgerEntry, examples: int, took: float, computed: float, line: Probe | None
    ) -> Measured:
        """Return what a first round says, whose parts are its length.

        Args:
            entry: with the round's bytes.
            examples: of the client's local steps.
            took: seconds until its upload was there.
            computed: seconds that its node says it computed.
            line: what empty and full orders took; None: one rate for both directions, and no
                latency.
        """
        seconds, on_its_way = computed / max(examples, 1), max(took - computed, LEAST_SECONDS)
        if line is not None:
            down = line.seconds * entry.download / line.bytes
            up = on_its_way - line.latency - down
            if min(down, up) >= LEAST_SECONDS:
                return cls(seconds, entry.download / down, entry.upload / up, line.latency)
        rate = (entry.download + entry.upload) / on_its_way
        return cls(seconds, rate, rate)


class Probe(NamedTuple):
    """Seconds of an empty order and its answer, and how many more an order of so many bytes
    takes."""

    latency: float
    seconds: float
    bytes: int


class WallTiming(Timing):
    """Measured time in the place of virtual time: the same forms of rounds, metrics and columns.

    Seconds of a round are those from its first order to its end, as the server sees them; seconds
    since the start of the run are their sum. They are measured, so that they differ between two
    equal runs, and so do the uploads that are in time.

    Args:
        rounds: who is used and when a round ends.

    What a client's first round has taken is kept, where its node had no other client in that round:
    ``devices.csv`` in the run directory is a table for ``trainer.clock.devices``, by which a
    simulation has about the seconds of this deployment. A node says how long it has computed.
    Before that round it has answered empty orders, whose seconds are its latency, and one as large
    as the round's, which gives its rate down; what is left of the round is its upload's.

    Attributes:
        arrived: seconds of the round at which each upload was there, by client id.
        silent: ids of clients that were asked and whose node has not answered by the end of the
            round.
        length: seconds of the round.
        devices: what was measured, by client id.
        lines: what orders before its first round took, by client id.
    """

    is_measured = True

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(Clock(devices=SameDevice()), rounds)
        self.arrived, self.silent, self.length = dict[int, float](), set[int](), 0.0
        self.devices, self._computed = dict[int, Measured](), dict[int, float]()
        self.lines = dict[int, Probe]()
        self._start = 0.0

    def on_check(self, context: Context) -> None:
        super().on_check(context)
        self.devices, self.lines = {}, {}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "devices": {str(id): astuple(one) for id, one in self.devices.items()}
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.devices = {}
        for id, (seconds, down, *more) in state.get("devices", {}).items():
            up, latency = more or (down, 0.0)  # earlier runs measured one rate and no latency
            self.devices[int(id)] = Measured(seconds, down, up, latency)

    def measure_lines(
        self, orders: Mapping[str, tuple[int, bytes]], exchange: Exchange, seconds: float
    ) -> None:
        """Measure the lines of clients whose first round begins.

        Args:
            orders: client and order of each node that has one client in the round.
            exchange: reaches the nodes.
            seconds: that an answer is waited for at most.
        """
        new = {node: (id, order) for node, (id, order) in orders.items() if id not in self.devices}
        took: dict[str, list[float]] = {node: [] for node in new}
        for probe in range(EMPTY_PROBES + 1):
            # a node that was silent once is left alone
            asked = [node for node, times in took.items() if len(times) == probe]
            sizes = {node: min(len(new[node][1]), MOST_PROBE_BYTES) for node in asked}
            parts = {
                node: bytes(size if probe == EMPTY_PROBES else 0) for node, size in sizes.items()
            }
            sent = {
                node: Message({"kind": "echo"}, (part,)).to_bytes() for node, part in parts.items()
            }
            began = now()
            for node, _ in exchange(sent, min(seconds, MOST_PROBE_SECONDS)) if sent else ():
                took[node].append(now() - began)
        for node, times in took.items():
            if len(times) > EMPTY_PROBES:
                latency = median(times[:EMPTY_PROBES])
                self.lines[new[node][0]] = Probe(latency, times[-1] - latency, sizes[node])

    def begin(self) -> None:
        """Begin a round: its first order is sent now."""
        self._forget()
        self._start = now()

    def note(self, clients: Collection[int], computed: float | None) -> None:
        """Note that the uploads of a node's clients are there.

        Args:
            clients: their ids.
            computed: seconds that the node has computed for its only client; None: it had others
                too.
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
        """Return what a round is made of. Late uploads are lost, whether they are here by now or
        not."""
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
            replace(one, entry=replace(one.entry, status="lost"))
            if one.client.id in self.silent
            else one
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
            one.timed(begin, begin + self.arrived[one.client])
            if one.client in self.arrived
            else one
            for one in entries
        ]
        return timed, [*links]

    def _measure(self, context: Any, trained: Trained, entries: Sequence[LedgerEntry]) -> None:
        """Note what clients took that are measured for the first time, and write the table."""
        new = [
            one
            for one in entries
            if one.client in self._computed and one.client not in self.devices
        ]
        for one in new:
            id = one.client
            times = self.arrived[id], self._computed[id], self.lines.pop(id, None)
            self.devices[id] = Measured.of(one, trained.examples.get(id, 0), *times)
        if new:
            rows = [
                f"{id},{one.seconds:.6g},{one.down:.6g},{one.up:.6g},{one.latency:.6g}"
                for id, one in sorted(self.devices.items())
            ]
            table = "\n".join(["client,seconds_per_example,down,up,latency", *rows, ""])
            disk.replace(context.run_dir / "devices.csv", table.encode())

    def _idle(self) -> float:
        """Return the share of the round in which those that were asked had answered already."""
        asked = len(self.arrived) + len(self.silent)
        waited = sum(max(self.length - at, 0.0) for at in self.arrived.values())
        return waited / (asked * self.length) if asked and self.length else 0.0


def measure_time(trainer: FederatedTrainer) -> None:
    """Have rounds that go by a clock go by the time that passes, where clients are on nodes."""
    parts = trainer.parts
    if parts.timing is None and parts.rounds.goes_by_clock:
        parts.timing = WallTiming(parts.rounds)
        trainer.callbacks.append(parts.timing)
