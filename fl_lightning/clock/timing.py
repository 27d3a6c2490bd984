"""The virtual time of a run: what its rounds last, and whose uploads they use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from fl_lightning.aggregation.base import Receipt
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.clock.asynchronous import Asynchronous, Flight, Flights
from fl_lightning.clock.clock import Clock
from fl_lightning.clock.devices import DeviceTable
from fl_lightning.clock.reach import Reach
from fl_lightning.clock.rounds import Ending, Rounds
from fl_lightning.clock.trained import Draw, Train, Trained
from fl_lightning.errors import require
from fl_lightning.hooks import Context, Meter, RoundRecord
from fl_lightning.rng import stream
from fl_lightning.wire import LedgerEntry

ANSWERED = ("trained", "rejected")


class Timing(Meter):
    """Clock and form of the rounds, and the virtual seconds that have passed, which checkpoints
    hold.

    Args:
        clock: how long clients take.
        rounds: who is used and when a round ends.

    Attributes:
        now: virtual seconds since the start of the run, at the end of its last round.
        staleness: of each upload that counted in the last round, if rounds are versions.
    """

    is_measured: bool = False
    """Whether time is that of this machine, in a deployment."""
    most_clients: int | None = None
    """Clients at work at most in a trial run; None: as many as the rounds have."""

    def __init__(self, clock: Clock, rounds: Rounds) -> None:
        self.clock, self.rounds, self.now = clock, rounds, 0.0
        self.ending, self.staleness = Ending(0.0, frozenset()), list[int]()
        self.began, self.answers, self.lead = 0.0, dict[int, float](), 0.0
        self.flights: Flights | None = Flights(rounds) if isinstance(rounds, Asynchronous) else None

    def on_check(self, context: Context) -> None:
        """Check the run, and forget what a fit before this one has left."""
        self.now, self.ending = 0.0, Ending(0.0, frozenset())
        self.num_clients = context.data.num_clients
        self.rounds.check(context)
        if isinstance(self.rounds, Asynchronous):
            self.flights = Flights(self.rounds.limited(self.most_clients))
        self.clock.reached.check(context.seed, context.data.active)
        if isinstance(self.clock.devices, DeviceTable):
            self.clock.devices.check([int(client) for client in context.data.active])

    @property
    def in_flight(self) -> set[int]:
        """The clients whose upload is on its way; every process of a run has all of these
        uploads."""
        return {flight.client for flight in self.flights.flying} if self.flights else set()

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now} | ({"flying": self.flights.as_json()} if self.flights else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now = float(state["now"])
        if self.flights is not None:
            self.flights.now = self.now
            self.flights.flying = [Flight(*parts) for parts in state.get("flying", [])]
            last = max((flight.client for flight in self.flights.flying), default=0)
            require(
                last < self.num_clients,
                f"--data.num_clients {self.num_clients}",
                f"client {last} of the run to be continued is at work",
                f"write {last + 1} or more",
            )

    def collect(self, context: Any, round: int, train: Train, draw: Draw) -> Trained:
        """Return what a round is made of; uploads that are late are lost.

        Args:
            context: the federation.
            round: its number, from 1.
            train, draw: train clients, and choose them.
        """
        reach = Reach(self.clock, context.seed)
        if self.flights is not None:
            seconds = partial(self.seconds, context.seed)
            return self.flights.collect(context, round, train, draw, seconds, reach)
        self.answers, self.lead = {}, 0.0
        there, self.began = reach.first_online(context.data.active, self.now)
        trained = train(draw(there, min(context.invited, len(there)), 0))
        planned = self._planned(context, round, trained)
        receipts, answered, valid, offline, gone = [], {}, set[int](), 0, list[float]()
        for receipt in trained.receipts:
            id, entry = receipt.client.id, receipt.entry
            if id in trained.examples:
                full = planned.get(id, entry)
                took = self.seconds(context.seed, trained.examples, full)
                if lost := reach.lost(full.timed(self.began, self.began + took)):
                    receipt, entry = replace(receipt, entry=lost, examples=0), lost
                    offline += 1
                    gone.append((lost.ended or 0.0) - self.began)
                elif entry.status in ANSWERED:
                    answered[id] = took
                else:
                    gone.append(took)
            valid |= {id} if entry.status == "trained" else set()
            receipts.append(receipt)
        self.ending = self.rounds.end(
            answered,
            valid,
            cohort=context.cohort_size,
            began=len(trained.examples),
            lot=lambda client: stream(context.seed, "clock/ties", round, client).random(),
        )
        if not answered and not self.ending.seconds:  # nobody is left to wait for
            self.ending = replace(self.ending, seconds=max([self.lead, *gone]))
        used = only_used(trained, receipts, self.ending.used)
        return replace(used, late=self.ending.late, offline=offline)

    def _planned(self, context: Any, round: int, trained: Trained) -> dict[int, LedgerEntry]:
        """Return the entries by which it is decided who goes offline too early, by client id, where
        somebody may: peers send more than one upload, and to whom does not wait until it is known
        who is there."""
        if self.clock.reached.is_always:
            return {}
        entries = [receipt.entry for receipt in trained.receipts]
        return {
            one.client: one for one in context.aggregation.planned(round, entries, trained.uploads)
        }

    def ask(self, context: Any, entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
        """Return the entries of clients that are asked for their loss at the start of the round,
        with times.

        The cohort begins when the last of them has answered, or has gone offline without an answer.

        Computing a loss takes as long as one pass over the client's examples.
        """
        reach, found = Reach(self.clock, context.seed), []
        for entry in entries:
            size = len(context.data.client(entry.client).train)
            took = self.seconds(context.seed, {entry.client: size}, entry)
            entry = entry.timed(self.began, self.began + took)
            if lost := reach.lost(entry):
                entry = replace(lost, status="asked", upload=0, wasted=0)
            found.append(entry)
        self.answers |= {e.client: (e.ended or 0.0) - self.began for e in found}
        self.lead = max(self.answers.values(), default=0.0)
        return found

    def end_round(
        self,
        context: Any,
        trained: Trained,
        entries: Sequence[LedgerEntry],
        record: RoundRecord,
        links: Sequence[LedgerEntry] = (),
    ) -> tuple[list[LedgerEntry], list[LedgerEntry]]:
        """Let the round's time pass, and return the ledger's entries with the time of each client,
        and those of links between servers with theirs, where these take any.

        Args:
            context: the federation.
            trained: what :meth:`collect` gave.
            entries: what the ledger has of its receipts.
            record: takes ``clock/*``, ``clients/late``, of asynchronous rounds
                ``clients/staleness``, and where clients come and go ``clients/offline`` and
                ``comm/wasted_download_bytes``.
            links: the ledger's entries of what is no client's.
        """
        before = begin = self.now
        self.staleness = trained.staleness
        if self.flights is None:
            begin = self.began
            entries = self._timed(context, trained, entries)
            links = self._with_edges(context, trained, entries, links)
            spans, slots = [(e.started, e.ended) for e in entries], len(trained.examples)
        else:
            self.now, slots = self.flights.now, self.flights.rounds.concurrency
            spans = [(entry.started, entry.ended) for entry in entries]
            spans += [(flight.started, flight.ended) for flight in self.flights.flying]
            record.metrics["clients/staleness"] = (
                fmean(trained.staleness) if trained.staleness else 0.0
            )
        length = self.now - begin
        ends = {e.client: min(e.ended - begin, length) for e in entries if e.ended is not None}
        waited = [
            min(self.lead, ends[id]) - min(self.answers[id], ends[id])
            for id in trained.examples
            if id in self.answers and id in ends
        ]
        worked = -sum(waited) + sum(
            max(min(end, self.now) - max(start, begin), 0.0)
            for start, end in spans
            if start is not None and end is not None
        )
        record.metrics |= {
            "clock/seconds": self.now,
            "clock/round_seconds": self.now - before,
            "clock/idle": round(max(1 - worked / (length * slots), 0.0), 12)
            if length and slots
            else 0.0,
            "clients/late": float(trained.late),
        }
        if not self.clock.reached.is_always:
            unused = sum(
                entry.download for entry in entries if entry.status in ("lost", "rejected")
            )
            record.metrics["clients/offline"] = float(trained.offline)
            record.metrics["comm/wasted_download_bytes"] = unused
        return [*entries], [*links]

    def _timed(
        self, context: Any, trained: Trained, entries: Sequence[LedgerEntry]
    ) -> list[LedgerEntry]:
        took = {
            e.client: self.seconds(context.seed, trained.examples, e)
            for e in entries
            if e.client in trained.examples and e.ended is None  # who went offline has its times
        }
        length = self.ending.seconds
        if not self.rounds.goes_by_clock:  # the bytes of masks are known by now
            length = max((took[id] for id in _answered(trained)), default=length)
        begin, self.now = self.began, self.began + length
        return [e.timed(begin, begin + took[e.client]) if e.client in took else e for e in entries]

    def _with_edges(
        self,
        context: Any,
        trained: Trained,
        entries: Sequence[LedgerEntry],
        links: Sequence[LedgerEntry],
    ) -> list[LedgerEntry]:
        """Return the entries of links with times, and let the round last until edge servers have
        the cloud's model. An edge sends its sum once the last of its clients has returned; the
        cloud waits for all."""
        line, way = self.clock.edges, context.aggregation
        sums = [link for link in links if link.status == "edge"]
        if line is None or not sums:
            return [*links]
        ready, answered = {link.client: self.began for link in sums}, _answered(trained)
        for entry in entries:
            if entry.client in answered and entry.ended is not None:
                edge = way.link_of(entry.client)
                ready[edge] = max(ready[edge], entry.ended)
        there = max(ready[link.client] + link.upload / line.up for link in sums)
        ends = {link.client: there + line.latency + link.download / line.down for link in sums}
        self.now = max(self.now, *ends.values())
        return [
            link.timed(ready[link.client], ends[link.client]) if link.client in ends else link
            for link in links
        ]

    def seconds(self, seed: int, examples: Mapping[int, int], entry: LedgerEntry) -> float:
        """Return how long a client took, of examples by id and its bytes; one that was asked for
        its loss has the model by then, and waits for the others' answers."""
        id, up = entry.client, entry.upload
        down = 0 if id in self.answers else entry.download
        took = self.clock.seconds(seed, entry.round, id, examples=examples[id], down=down, up=up)
        return took + self.lead if id in self.answers else took


def _answered(trained: Trained) -> list[int]:
    """Return the clients whose upload has arrived, whether it counts or not; under masks a receipt
    does not say who sends nothing."""
    gone = {one.client.id for one in trained.cohort if not one.returns}
    ids = [one.client.id for one in trained.receipts if one.entry.status in ANSWERED]
    return [id for id in ids if id not in gone]


def only_used(trained: Trained, receipts: Sequence[Receipt], used: Collection[int]) -> Trained:
    """Return what a round is made of where the uploads of some clients alone are used.

    Args:
        trained: what came of its clients.
        receipts: the same, as far as it is known by now.
        used: ids of the clients whose uploads count.
    """
    return replace(
        trained,
        receipts=[
            one
            if one.client.id in used or one.entry.status != "trained"
            else replace(one, entry=one.entry.unused(), examples=0)
            for one in receipts
        ],
        uploads=Uploads({id: upload for id, upload in trained.uploads.items() if id in used}),
    )
