"""A node's half of a secure sum: it keeps what its clients would have uploaded, and answers each
phase once.

Keys come from the operating system. Nothing but masked vectors leaves the node; what it needs of a
round is gone when the round has been unmasked, or with the process.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.aggregation.receiving import check_upload, decode_upload
from fl_lightning.aggregation.sum_form import SumForm
from fl_lightning.deploy.node.states import run_id
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.engines import ClientResult
from fl_lightning.engines.base import one_thread
from fl_lightning.errors import InputError
from fl_lightning.federation import Federation
from fl_lightning.privacy.secure.client import SecureClient
from fl_lightning.privacy.secure.complaints import UnopenedError
from fl_lightning.privacy.secure.primitives import ProtocolError
from fl_lightning.privacy.secure.settings import PHASES, SecureSum
from fl_lightning.support import disk
from fl_lightning.wire import Payload, PayloadError

log = logging.getLogger("fl_lightning")
MAX_RUNS = 4
"""Runs whose round a node keeps in memory; of more, the one that began its round first is
forgotten."""

Known = dict[str, dict[str, list[int]]]
"""What a node knows of a round: for each of its clients, by id, and each broadcast that the client
started from, by SHA-256, the ids of the clients whose vectors were unmasked in one sum with its
own."""


@dataclass
class KeptRound:
    """What a node keeps of one round until it is unmasked.

    Args:
        round: number of the round.
        settings: of the secure sum.
        cohort: clients of the round, as the server says.
        vectors: of each client that was trained, int64 ``[L]``; None for one whose upload was
            refused.
        starts: SHA-256 of the broadcast that each of them started from.
        clients: the clients' halves of the protocol, once it has begun.
        done: phases that were answered.
        once: whether a client's vector leaves once at most, as in a private round.
    """

    round: int
    settings: SecureSum
    cohort: int
    vectors: dict[int, Tensor | None] = field(default_factory=dict)
    starts: dict[int, str] = field(default_factory=dict)
    clients: dict[int, SecureClient] = field(default_factory=dict)
    done: int = 0
    once: bool = False

    def keep(
        self, fed: Federation, result: ClientResult, broadcast: bytes
    ) -> Sequence[tuple[str, int, int]]:
        """Check what a client would upload as the server of a plain sum does, and keep the vector
        that it will mask.

        Args:
            fed: the node's.
            result: of the client.
            broadcast: what it started from.

        Returns:
            The parts of the vector's form; none where the upload was refused.
        """
        method, client = fed.method, result.client
        self.starts[client.id] = sha256(broadcast).hexdigest()
        try:
            upload = decode_upload(method, result.upload, client, verified=True)
            check_upload(method, upload, client, self.vectors)
        except PayloadError as error:
            log.warning(
                "round %d: the upload of client %d is refused: %s", self.round, client.id, error
            )
            self.vectors[client.id] = None
            return ()
        with one_thread(fed.fabric.device):
            addends = fed.aggregation.addends(upload, client.id, self.round)
            form = SumForm.of(addends)
            self.vectors[client.id] = form.vector(addends, method.average, method.cohort)
        return form.parts


class SecureRounds:
    """The rounds of a node that are not unmasked yet, and on its disk what was unmasked.

    Args:
        folder: ``<folder>/<run>/round_<round>.json`` says for each client of the node and each
            broadcast that it started the round from in whose company its vector was unmasked. A
            server that repeats a round, in whichever run, gets the same sum once more, and no
            other: two sums that differ by one client are that client's vector. Of a private round
            the company is empty, and the client is there before its vector leaves; the round of
            another run has its own noise, and is accounted there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rounds: dict[str, KeptRound] = {}

    def begin(self, fed: Federation, settings: SecureSum, order: Message) -> KeptRound:
        """Return an empty round, in place of the one that the run had here.

        Args:
            fed: the node's, whose method is told how many clients are added up.
            settings: of the secure sum, as the node's own configuration has them.
            order: the message to train.

        Raises:
            InputError: the run has no id, or the cohort is one client.
        """
        run, round = run_id(order.header["run"]), int(order.header["round"])
        fed.method.cohort = cohort = int(order.header["cohort"])
        settings.check_cohort(cohort)
        self.rounds.pop(run, None)
        while len(self.rounds) >= MAX_RUNS:
            self.rounds.pop(next(iter(self.rounds)))
        once = fed.aggregation.privacy is not None
        self.rounds[run] = KeptRound(round, settings, cohort, once=once)
        return self.rounds[run]

    def answer(self, message: Message) -> tuple[dict[str, Any], list[bytes]]:
        """Return header and parts of the answer to the message of one phase.

        Raises:
            InputError: it is of another round, out of order or a second one, or of clients that are
                not in the round.
        """
        run, round, phase = (message.header.get(name) for name in ("run", "round", "phase"))
        kept = self.rounds.get(str(run))
        if kept is None or kept.round != round:
            raise InputError(
                f"phase {phase} of round {round}",
                f"this node keeps {f'round {kept.round}' if kept else 'no round'} of that run",
                "train first",
            )
        awaited = PHASES[kept.done] if kept.done < len(PHASES) else "none"
        if phase != awaited:
            raise InputError(
                f"phase {phase} of round {round}",
                f"each phase is answered once and in order, and the next one is {awaited}",
                "leave the round",
            )
        ids = [int(id) for id in message.header["clients"]]
        given = (
            dict(zip(ids, message.parts, strict=False))
            if phase != "keys"
            else dict.fromkeys(ids, b"")
        )
        possible = kept.vectors.keys() if phase == "keys" else kept.clients.keys()
        if len({*ids}) != len(ids) or len(given) != len(ids) or not {*ids} <= possible:
            raise InputError(
                f"phase {phase} of round {round} for clients {ids}",
                f"clients {sorted(possible)} are in it, with one message each",
                "leave the others out",
            )
        kept.done += 1
        if phase == "unmask":
            del self.rounds[str(run)]
            if not kept.once:  # else each client was noted before its vector left
                self._check_unmasked(str(run), kept, given)
        elif phase == "keys":
            kept.clients = {
                id: SecureClient(id, kept.settings, kept.cohort, os.urandom) for id in ids
            }
        answers = {}
        for id, part in given.items():
            try:
                answers[id] = self._answer(str(run), kept, str(phase), id, part)
            except (ProtocolError, PayloadError) as error:
                log.error("round %d: client %d leaves the secure sum: %s", kept.round, id, error)
        kept.clients = {id: client for id, client in kept.clients.items() if id in answers}
        header = {
            "kind": "phase",
            "run": run,
            "round": round,
            "phase": phase,
            "clients": [*answers],
        }
        return header, [*answers.values()]

    def _answer(self, run: str, kept: KeptRound, phase: str, id: int, message: bytes) -> bytes:
        """Return one client's message of a phase."""
        client = kept.clients[id]
        if phase == "keys":
            return client.keys()
        if phase == "shares":
            return client.shares(message)
        if phase == "unmask":
            return client.unmask(message)
        vector = kept.vectors.pop(id)
        if vector is None:
            raise ProtocolError(
                f"client {id} has no vector", "its upload was refused on its node", "leave it out"
            )
        try:
            client.take_shares(message)
        except UnopenedError as error:
            log.error("client %d leaves the secure sum: %s", id, error)
            return error.complaint
        if kept.once:
            self._note_masked(run, kept, id)
        return client.masked(vector)

    def _note_masked(self, run: str, kept: KeptRound, id: int) -> None:
        """Write that a client's vector is about to leave in a private round, and refuse a second
        one.

        The others that hold shares can have it unmasked without this node, so what counts is that
        it left.

        Raises:
            ProtocolError: it was in another sum of the round, which alone leaves.
        """
        known = self._known(run, kept.round)
        if str(id) in known:
            raise ProtocolError(
                f"a second sum of round {kept.round} over client {id}, with other noise",
                "a private round is unmasked once, and accounted once",
                "leave the round",
            )
        self._write(run, kept.round, {**known, str(id): {kept.starts[id]: []}})

    def _check_unmasked(self, run: str, kept: KeptRound, requests: Mapping[int, bytes]) -> None:
        """Write in whose company vectors are about to be unmasked, and refuse another company than
        before, in this run or another one.
        """
        known, path = self._known(run, kept.round), self._path(run, kept.round)
        found = [json.loads(each.read_text()) for each in self.folder.glob(f"*/{path.name}")]
        for id, request in requests.items():
            living = Payload.from_bytes(request).tensor("living").tolist()
            start = kept.starts[id]
            here = known.setdefault(str(id), {}).setdefault(start, living)
            others = [each.get(str(id), {}).get(start) or living for each in found]
            if any(company != living for company in [here, *others]):
                raise InputError(
                    f"a second sum of round {kept.round} over other clients",
                    "two sums that differ by one client are that client's vector",
                    "leave the round; in a new run another seed helps where weights are drawn",
                )
        self._write(run, kept.round, known)

    def _known(self, run: str, round: int) -> Known:
        path = self._path(run, round)
        return json.loads(path.read_text()) if path.exists() else {}

    def _write(self, run: str, round: int, known: Known) -> None:
        path = self._path(run, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(path, json.dumps(known).encode())

    def _path(self, run: str, round: int) -> Path:
        return self.folder / run / f"round_{round:06d}.json"
