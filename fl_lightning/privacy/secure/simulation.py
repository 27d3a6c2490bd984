"""A round of the secure sum in one process, or in several: clients and server exchange nothing but
the bytes of payloads, which are counted by phase.

With several processes each of them computes the phases *keys*, *shares* and *unmask* of all
clients; masked vectors are made and added up where their client was trained, and the sums are added
over processes.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import process_time

from torch import Tensor

from fl_lightning import rng
from fl_lightning.distributed.collectives import gather_bytes, sum_over_ranks
from fl_lightning.privacy.secure.client import SecureClient
from fl_lightning.privacy.secure.complaints import UnopenedError
from fl_lightning.privacy.secure.primitives import ProtocolError
from fl_lightning.privacy.secure.server import RoundVoid, SecureServer
from fl_lightning.privacy.secure.settings import PHASES, SecureSum
from fl_lightning.wire import PayloadError

log = logging.getLogger("fl_lightning")


def lengths(messages: Mapping[int, bytes]) -> dict[int, int]:
    """Return the length of each message."""
    return {id: len(message) for id, message in messages.items()}


@dataclass
class Traffic:
    """Bytes and seconds of one round.

    Args:
        up: bytes that each client sent, by id.
        down: bytes that each client was sent, by id.
        phases: bytes in both directions by phase.
        seconds: CPU time of this process, of all clients and the server together, by phase.
    """

    up: Counter[int] = field(default_factory=Counter)
    down: Counter[int] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def sent(self, phase: str, lengths: Mapping[int, int]) -> None:
        """Count messages from clients to the server, by id."""
        self.up.update(lengths)
        self.phases[phase] += sum(lengths.values())

    def received(self, phase: str, lengths: Mapping[int, int]) -> None:
        """Count messages from the server to clients, by id."""
        self.down.update(lengths)
        self.phases[phase] += sum(lengths.values())

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = process_time()
        yield
        self.seconds[phase] = process_time() - started


@dataclass
class Outcome:
    """What came of a round.

    Args:
        total: int64 ``[L]``, the sum of the vectors of ``living``; None where the round is void.
        living: ids of the clients whose masked vectors arrived.
        rejected: ids of those whose masked messages were refused.
        named: ids of those whose shares were wrong.
        void: why there is no sum; empty where there is one.
        traffic: bytes and seconds.
    """

    total: Tensor | None = None
    living: set[int] = field(default_factory=set)
    rejected: set[int] = field(default_factory=set)
    named: set[int] = field(default_factory=set)
    void: str = ""
    traffic: Traffic = field(default_factory=Traffic)


def run_round(
    settings: SecureSum,
    *,
    seed: int,
    round: int,
    leaves_before: Mapping[int, str],
    length: int,
    vectors: Mapping[int, Callable[[], Tensor]],
    deliver: Callable[[int, bytes], bytes | None] = lambda id, message: message,
) -> Outcome:
    """Return the sum over the clients that stay.

    Args:
        settings: threshold and neighbours.
        seed: of the run, from whose streams all seeds of keys and masks come: reproducible, and no
            secrets.
        round: number of the round.
        leaves_before: ids of the cohort, each with the phase before which it drops out, or an empty
            text. A client that drops out is sent nothing any more.
        length: L, values of a vector.
        vectors: what makes the vector of each client of this process, int64 ``[L]``, by id.
        deliver: what becomes of a masked message on its way; None: it is lost.

    Raises:
        RankLost: a process died or did not answer in time.
    """
    outcome = Outcome()
    traffic = outcome.traffic
    cohort = sorted(leaves_before)
    ring = rng.stream(seed, "secure_ring", round).permutation(cohort).tolist()
    server = SecureServer(settings, ring, length)
    outcome.named = server.named

    def present(phase: str) -> list[int]:
        """Clients that have not left before this phase."""
        return [id for id in cohort if stays(leaves_before[id], phase)]

    def answers(
        phase: str, asked: Mapping[int, bytes], answer: Callable[[int], bytes]
    ) -> dict[int, bytes]:
        """Return what those that are present and agree answer to what the server sent them."""
        here = {id: asked[id] for id in present(phase) if id in asked}
        found = {}
        for id in here:
            try:
                found[id] = answer(id)
            except ProtocolError as error:
                log.warning("round %d: client %d leaves the secure sum: %s", round, id, error)
        traffic.sent(phase, lengths(found))
        return found

    try:
        with traffic.timed("keys"):
            clients = {
                id: SecureClient(
                    id, settings, len(cohort), rng.stream(seed, "secure_keys", round, id).bytes
                )
                for id in present("keys")
            }
            advertised = {id: client.keys() for id, client in clients.items()}
            traffic.sent("keys", lengths(advertised))
            lists = server.pass_on_keys(advertised)
            traffic.received(
                "keys", {id: len(lists[id]) for id in present("shares") if id in lists}
            )
        with traffic.timed("shares"):
            boxes = server.pass_on_shares(
                answers("shares", lists, lambda id: clients[id].shares(lists[id]))
            )
        with traffic.timed("masked"):
            _mask(server, clients, boxes, present("masked"), vectors, deliver, outcome, round)
        with traffic.timed("unmask"):
            requests = server.unmask_requests()
            traffic.received(
                "unmask", {id: len(requests[id]) for id in present("unmask") if id in requests}
            )
            outcome.total = server.unmask(
                answers("unmask", requests, lambda id: clients[id].unmask(requests[id]))
            )
    except RoundVoid as error:
        outcome.void = str(error)
    return outcome


def add_delivered(
    server: SecureServer, id: int, message: bytes | None, outcome: Outcome, round: int
) -> None:
    """Add a client's masked vector to the server's sum; one that is damaged is rejected.

    Args:
        server: the server's half of the round.
        id: of the client.
        message: what arrived of its masked vector; None: nothing.
        outcome: of the round, in which a rejection is noted.
        round: number of the round, for the log.
    """
    if message is None:
        return
    try:
        server.add_masked(id, message)
    except PayloadError as error:
        outcome.rejected.add(id)
        log.warning("round %d: masked vector of client %d rejected: %s", round, id, error)


def stays(leaves_before: str, phase: str) -> bool:
    """Return whether a client that leaves before one phase, or before none, is there in another."""
    return not leaves_before or PHASES.index(phase) < PHASES.index(leaves_before)


def _mask(
    server: SecureServer,
    clients: Mapping[int, SecureClient],
    boxes: Mapping[int, bytes],
    present: list[int],
    vectors: Mapping[int, Callable[[], Tensor]],
    deliver: Callable[[int, bytes], bytes | None],
    outcome: Outcome,
    round: int,
) -> None:
    """Let the clients of this process mask their vectors, and add up what all processes have of
    them."""
    here = {id: boxes[id] for id in present if id in boxes}
    outcome.traffic.received("shares", lengths(here))
    sizes: dict[int, int] = {}
    for id, box in here.items():
        try:
            clients[id].take_shares(box)
            if id not in vectors:
                continue  # another process has its vector
            message = clients[id].masked(vectors[id]())
        except UnopenedError as error:
            log.warning("round %d: client %d leaves the secure sum: %s", round, id, error)
            message = error.complaint
        except ProtocolError as error:
            log.warning("round %d: client %d leaves the secure sum: %s", round, id, error)
            continue
        if id in vectors:
            sizes[id] = len(message)
        add_delivered(server, id, deliver(id, message), outcome, round)
    report = {
        "sizes": list(sizes.items()),
        "living": list(server.living),
        "rejected": list(outcome.rejected),
    }
    for of_rank in map(json.loads, gather_bytes(json.dumps(report).encode())):
        server.living.update(of_rank["living"])
        outcome.rejected.update(of_rank["rejected"])
        outcome.traffic.sent("masked", dict(of_rank["sizes"]))
    outcome.living = server.living
    sum_over_ranks(server.total)
