"""What becomes of uploads where peers send them to each other."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from statistics import fmean

import torch

from fl_lightning.aggregation.base import Aggregation, Receipt, Round
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.aggregation.server import SHARE_UNITS, SummingServer
from fl_lightning.aggregation.sums import Addend, Sums, sums_of
from fl_lightning.client import Client
from fl_lightning.clock.timing import ANSWERED
from fl_lightning.topology.graphs import Graph, Mixing
from fl_lightning.topology.nodes import PUBLIC, Nodes, State, mean_of
from fl_lightning.wire import LedgerEntry, Payload

MASS = "mass"
"""The push-sum weight of a peer, float64 ``[1]``: 1 at first."""
MixingOf = Callable[[int, list[int]], Mixing]
"""Returns W among those peers that are there, for an averaging, counted from 0 over all rounds."""


class NodeAggregation(Aggregation, ABC):
    """Runs the server's half of a method at several nodes."""

    single = True
    nodes: Nodes

    @abstractmethod
    def node_of(self, client: int) -> int:
        """Return the node from which a client gets what it starts from, by its id."""

    @contextmanager
    def serving(self, client: Client) -> Iterator[None]:
        with self.nodes.at(self.nodes.of(self.node_of(client.id))):
            yield

    def add(
        self, uploads: Mapping[int, Payload], weights: Mapping[int, int], most: int | None = None
    ) -> Sums:
        """Return the exact sums over some uploads, each read with the state of the node that it
        started from.

        Args:
            uploads: by client.
            weights: of the clients to be added, integers.
            most: largest weight that there can be; None: the method's.
        """
        addends = [
            self._addends(uploads[id], id, weight, most) for id, weight in sorted(weights.items())
        ]
        sums = sums_of(addends, self.method.average, max(self.method.cohort, len(uploads)))
        sums.add_now()
        return sums

    def _addends(
        self, upload: Payload, client: int, weight: int, most: int | None
    ) -> dict[str, Addend]:
        method, before = self.method, self.method.most_examples
        method.most_examples = before if most is None else most
        try:
            with self.nodes.at(self.nodes.of(self.node_of(client))):
                return method.acted_on(upload, client, weight)
        finally:
            method.most_examples = before


class Peers(NodeAggregation):
    """Every peer makes its next model of the uploads that reach it, its own among them.

    The first averaging of a round is of uploads, in the form that a server gets; further ones are
    of models in full precision.

    Args:
        method: the server's half, after ``build``.
        ids: clients that are peers.
        mixing: W, by position in ``ids``.
        averagings: in a round.
        push: whether W is column-stochastic, so that weights of push-sum travel.
    """

    graph: Graph | None = None
    """What gives W, where a graph does."""

    def __init__(
        self,
        method: SummingServer,
        ids: Sequence[int],
        mixing: MixingOf,
        *,
        averagings: int = 1,
        push: bool = False,
    ) -> None:
        super().__init__(method)
        self.ids, self.mixing, self.averagings, self.push = [*ids], mixing, averagings, push
        self.place = {id: position for position, id in enumerate(self.ids)}
        if method.reads_public:
            method.server[PUBLIC] = method.server["weights"]
        extra = {MASS: torch.ones(1, dtype=torch.float64)} if push else None
        self.nodes = Nodes(method, self.ids, "peer", extra)

    def node_of(self, client: int) -> int:
        return client

    def close(
        self, round: Round, uploads: Uploads, receipts: Sequence[Receipt]
    ) -> list[LedgerEntry]:
        entries, present = [receipt.entry for receipt in receipts], sorted(uploads)
        traffic = self._traffic(round.number, entries, present)
        if present and not self._average(round, uploads, entries, present):
            entries = [entry.unused() for entry in entries]
        round.metrics.update(traffic.metrics(len(self.ids)))
        round.metrics["consensus/distance"] = self.nodes.distance()
        if self.push:
            round.metrics["consensus/least_mass"] = min(self._masses().values())
        there = {entry.client for entry in entries}
        later = [
            LedgerEntry(round.number, id, "away", size) for id, size in sorted(traffic.down.items())
        ]
        round.links.extend(entry for entry in later if entry.client not in there)
        return [traffic.entry(entry) for entry in entries]

    def planned(
        self, round: int, entries: Sequence[LedgerEntry], uploads: Collection[int]
    ) -> list[LedgerEntry]:
        traffic = self._traffic(round, entries, sorted(uploads))
        return [traffic.entry(entry) for entry in entries]

    def _traffic(
        self, round: int, entries: Sequence[LedgerEntry], present: Sequence[int]
    ) -> Traffic:
        """Return the messages of a round.

        Who goes offline in mid-exchange, whose entry has times, is sent what the others send, since
        nobody knows that it will; it is heard by nobody.

        Args:
            round: its number.
            entries: what came of each peer that was asked; one of them has one message's bytes.
            present: ids of those whose upload counts.
        """
        traffic, first = Traffic(), (round - 1) * self.averagings
        gone = [entry.client for entry in entries if entry.ended is not None]
        heard = self._listeners(first, {*present, *gone}, [e.client for e in entries if e.upload])
        for entry in entries:
            if entry.client in gone:
                traffic.up[entry.client] = entry.upload
                continue
            size, arrives = self._size(entry), entry.status in ANSWERED
            for listener in heard.get(entry.client, ()):
                traffic.send(entry.client, listener, size, arrives=arrives)
        for averaging in range(first + 1, first + self.averagings):
            for listener, row in self._rows(averaging, {*present, *gone}).items():
                for sender in row.keys() - {listener, *gone}:
                    traffic.send(sender, listener, Payload(self.nodes.of(sender)).nbytes)
        return traffic

    def _size(self, entry: LedgerEntry) -> int:
        """Return the bytes of one message of a peer: its upload, and what else its readers need."""
        with self.nodes.at(self.nodes.of(entry.client)):
            beside = dict(self.method.beside_upload(entry.client))
        if self.push:
            beside[MASS] = self.nodes.get(entry.client, MASS)
        return entry.upload + Payload(beside).nbytes - Payload({}).nbytes if entry.upload else 0

    def _listeners(
        self, averaging: int, present: Collection[int], senders: Collection[int]
    ) -> dict[int, list[int]]:
        """Return who is sent the upload of each sender: those who are there and hear it. Where
        uploads are read with what their sender has sent before, who is away gets them once it is
        back."""
        there = set(self.ids) if self.method.reads_public else {*present}
        rows = self._rows(averaging, {*there, *senders})
        found: dict[int, list[int]] = {}
        for listener in sorted(there & rows.keys()):
            for sender in rows[listener].keys() & {*senders}:
                if sender != listener:
                    found.setdefault(sender, []).append(listener)
        return found

    def _rows(self, averaging: int, present: Collection[int]) -> dict[int, dict[int, Fraction]]:
        """Return W among the clients that are there, by id."""
        mixing = self.mixing(averaging, [self.place[id] for id in sorted(present)])
        return {self.ids[i]: {self.ids[j]: w for j, w in row.items()} for i, row in mixing.items()}

    def _average(
        self,
        round: Round,
        uploads: Mapping[int, Payload],
        entries: Sequence[LedgerEntry],
        present: Sequence[int],
    ) -> bool:
        """Make the next state of everybody who is there, and of the mean model, and return whether
        they are: all stay where one would not be finite, since what it passes on is not either."""
        method, nodes, first = self.method, self.nodes, (round.number - 1) * self.averagings
        states, sums = {}, dict[tuple[tuple[int, int], ...], Sums]()
        done: dict[tuple[object, ...], State] = {}
        rows, masses = self._rows(first, present), self._masses()
        for id in present:
            units = tuple(integers(rows[id], masses).items())
            if units not in sums:
                sums[units] = self.add(uploads, dict(units), max(weight for _, weight in units))
            state = nodes.of(id)
            same = units, *(tensor.data_ptr() for tensor in state.values())
            if same not in done:
                make = partial(method.next_state, sums[units])
                done[same], made = nodes.next(state, round.number, entries, make)
                if not made:
                    return False
            states[id] = dict(done[same])
        if method.reads_public:
            for id in present:
                with nodes.at(nodes.of(id)):
                    states[id][PUBLIC] = method.decode(uploads[id])
        # last, so that the method's metrics are of a server that got all uploads
        everybody = self.add(uploads, dict.fromkeys(present, 1), 1)
        mean, _ = nodes.next(
            nodes.mean(), round.number, entries, partial(method.next_state, everybody)
        )
        nodes.put(mean, states)
        self._pass_masses(rows, masses)
        for averaging in range(first + 1, first + self.averagings):
            self._average_models(averaging, present)
        masses = self._masses()
        weights = mean_of(
            [nodes.get(id, "weights") for id in self.ids], [masses[id] for id in self.ids]
        )
        nodes.put({"weights": weights}, {})
        return True

    def _average_models(self, averaging: int, present: Sequence[int]) -> None:
        nodes, masses = self.nodes, self._masses()
        rows, states = self._rows(averaging, present), {id: nodes.of(id) for id in present}
        made: dict[int, State] = {}
        for id, row in rows.items():
            shares = [float(weight) * masses[sender] for sender, weight in row.items()]
            made[id] = {
                name: mean_of([states[j][name] for j in row], shares) for name in nodes.names
            }
        nodes.put({}, made)
        self._pass_masses(rows, masses)

    def _masses(self) -> dict[int, float]:
        if not self.push:
            return dict.fromkeys(self.ids, 1.0)
        return {id: float(self.nodes.get(id, MASS)) for id in self.ids}

    def _pass_masses(
        self, rows: Mapping[int, Mapping[int, Fraction]], masses: Mapping[int, float]
    ) -> None:
        if self.push:
            after = {
                i: math.fsum(float(w) * masses[j] for j, w in row.items())
                for i, row in rows.items()
            }
            self.nodes.put(
                {}, {i: {MASS: torch.tensor([m], dtype=torch.float64)} for i, m in after.items()}
            )


def integers(row: Mapping[int, Fraction], masses: Mapping[int, float]) -> dict[int, int]:
    """Return what a peer takes of each sender's model, W_ij m_j, as integers in one unit: the
    smallest ones in the same proportions, or where those are above 2^30, in units of 2^-30 of the
    largest.

    >>> integers({3: Fraction(1, 2), 5: Fraction(1, 3), 7: Fraction(1, 6)}, dict.fromkeys((3, 5, 7), 1.0))
    {3: 3, 5: 2, 7: 1}
    """
    parts = {id: weight * Fraction(masses[id]) for id, weight in sorted(row.items())}
    unit = math.lcm(*(part.denominator for part in parts.values()))
    whole = {id: int(part * unit) for id, part in parts.items()}
    common = math.gcd(*whole.values())
    if max(whole.values()) <= SHARE_UNITS * common:
        return {id: value // common for id, value in whole.items()}
    largest = max(parts.values())
    return {id: max(1, round(part / largest * SHARE_UNITS)) for id, part in parts.items()}


@dataclass
class Traffic:
    """The bytes of a round between nodes."""

    up: Counter[int] = field(default_factory=Counter)
    down: Counter[int] = field(default_factory=Counter)
    links: Counter[tuple[int, int]] = field(default_factory=Counter)

    def send(self, sender: int, receiver: int, size: int, *, arrives: bool = True) -> None:
        """Count a message."""
        self.up[sender] += size
        self.links[sender, receiver] += size
        if arrives:
            self.down[receiver] += size

    def entry(self, entry: LedgerEntry) -> LedgerEntry:
        """Return the ledger's entry of a peer: all that it has sent and received."""
        up = self.up[entry.client]
        wasted = 0 if entry.status == "trained" else up  # all of what left before one went offline
        return replace(entry, download=self.down[entry.client], upload=up, wasted=wasted)

    def metrics(self, peers: int) -> dict[str, float]:
        """Return the bytes of a peer, up and down, and of a link that was used, on average."""
        both = sum(self.up.values()) + sum(self.down.values())
        used = [size for size in self.links.values() if size]
        return {
            "comm/bytes_per_peer": both / peers,
            "comm/bytes_per_link": fmean(used) if used else 0.0,
        }
