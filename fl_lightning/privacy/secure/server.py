"""The server of a secure sum. It gets public keys, envelopes that it cannot open, masked vectors,
and one share of each client from each of its neighbours."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice

import numpy as np
import torch
from torch import Tensor

from fl_lightning.privacy.secure.client import mask_sign, own_mask_key, stacked
from fl_lightning.privacy.secure.complaints import Complaint, convicted
from fl_lightning.privacy.secure.primitives import (
    KEY_BYTES,
    SEED_BYTES,
    TAG_BYTES,
    ProtocolError,
    add_mask,
    agreed_key,
    combine,
    fingerprint,
    point_of,
    private_key,
    public_key,
)
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.wire import Payload, PayloadError

log = logging.getLogger("fl_lightning")

ENVELOPE_BYTES = 2 * SEED_BYTES + TAG_BYTES
MAX_SUBSETS = 64
"""Sets of shares that are tried where one gives another secret than the advertised one, beyond
those that leave out any single share."""
MAX_LIARS = 2
"""Clients that are named in one round since no shares give their secrets. Of more it is likelier
that several holders lied, and nobody is named."""


class RoundVoid(Exception):
    """The round ends without a sum; the message says why."""


class SecureServer:
    """The server in one round. Of each phase it gets messages by the sender's id, and returns those
    for the next phase by the receiver's id.

    Args:
        settings: threshold and neighbours.
        ring: ids of the cohort in a random order.
        length: L, values of a vector, the same for all clients.

    Attributes:
        total: int64 ``[L]``, the sum modulo 2^64 of the masked vectors that arrived, until it is
            unmasked.
        living: ids of the clients whose vectors are in it.
        named: ids of clients that sent wrong shares, as far as one liar alone cannot have made it
            seem so: a client whose secret no shares give, one whose shares of two or more clients'
            secrets do not fit, and one that sealed envelopes which several clients cannot open. Of
            a single share that does not fit, its dealer and its holder blame each other.
    """

    def __init__(self, settings: SecureSum, ring: Sequence[int], length: int) -> None:
        self.settings, self.ring, self.length = settings, ring, length
        self.least_clients = settings.least_clients(len(ring))
        self.least_shares = settings.least_shares(len(ring))
        self.total = torch.zeros(length, dtype=torch.int64)
        self.living: set[int] = set()
        self.public: dict[int, tuple[bytes, bytes]] = {}
        self.graph: dict[int, list[int]] = {}
        self.fingerprints: dict[int, bytes] = {}
        self.named: set[int] = set()
        self.misfits: dict[int, set[int]] = {}
        """Clients for whose secrets a holder gave a share that does not fit, by holder."""
        self.complaints: set[Complaint] = set()
        self.suspects: set[int] = set()
        """Holders whose next share is used last and looked at."""

    def pass_on_keys(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the public keys of its neighbours for each client that sent its own. Clients that
        sent one key drop out, and so does one whose key gives no secret: neighbours would have to
        leave.

        Raises:
            RoundVoid: too few did.
        """
        shape = {"envelope": (KEY_BYTES,), "mask": (KEY_BYTES,)}
        senders: dict[bytes, list[int]] = {}
        for id, given in _readable(messages, lambda id: shape).items():
            keys = _bytes(given.tensor("envelope")), _bytes(given.tensor("mask"))
            try:
                points = {*map(point_of, keys)}
            except ProtocolError as error:
                log.warning("secure sum: client %d drops out: %s", id, error)
                continue
            self.public[id] = keys
            for point in points:
                senders.setdefault(point, []).append(id)
        for ids in senders.values():
            if len(ids) > 1:  # who has copied it is not known
                both = ", ".join(map(str, ids))
                log.warning("secure sum: clients %s drop out: they sent one public key", both)
                self.public = {id: keys for id, keys in self.public.items() if id not in ids}
        self._require_enough(self.public, "sent their keys")
        self.graph = self.settings.graph([id for id in self.ring if id in self.public])
        return {
            id: Payload(
                {
                    "ids": _ids(neighbours),
                    "envelope": stacked([self.public[other][0] for other in neighbours], KEY_BYTES),
                    "mask": stacked([self.public[other][1] for other in neighbours], KEY_BYTES),
                }
            ).to_bytes()
            for id, neighbours in self.graph.items()
        }

    def pass_on_shares(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the envelopes for each client that dealt its own shares.

        Raises:
            RoundVoid: too few did.
        """
        readable = _readable(
            messages,
            lambda id: {
                "fingerprint": (KEY_BYTES,),
                "envelopes": (len(self.graph[id]), ENVELOPE_BYTES),
            },
        )
        self._require_enough(readable, "dealt their shares")
        boxes: dict[int, dict[int, bytes]] = {id: {} for id in readable}
        for id, given in readable.items():
            self.fingerprints[id] = _bytes(given.tensor("fingerprint"))
            for other, envelope in zip(
                self.graph[id], given.tensor("envelopes").numpy(), strict=True
            ):
                if other in boxes:
                    boxes[other][id] = envelope.tobytes()
        return {
            id: Payload(
                {"ids": _ids(box), "envelopes": stacked([*box.values()], ENVELOPE_BYTES)}
            ).to_bytes()
            for id, box in boxes.items()
        }

    def add_masked(self, id: int, message: bytes) -> None:
        """Add one masked vector, or note whose envelopes its client cannot open.

        Raises:
            PayloadError: it is damaged, of another length, or of a client that dealt no shares.
        """
        if dealers := self._unopened(id, message):
            self.complaints |= {(id, dealer) for dealer in dealers}
            return
        given = _checked(message, {"masked": (self.length,)}, torch.int64)
        if id in self.living or id not in self.fingerprints:
            raise PayloadError(
                f"a masked vector of client {id}",
                "one of each that dealt shares counts",
                "send one",
            )
        self.total += given.tensor("masked")
        self.living.add(id)

    def _unopened(self, id: int, message: bytes) -> set[int]:
        """Return whose envelopes a client complains of; nobody where its message is another one."""
        dealers = [other for other in self.graph.get(id, ()) if other in self.fingerprints]
        if (
            id not in self.fingerprints
            or len(message) > Payload({"unopened": _ids(dealers)}).nbytes
        ):
            return set()  # and a long message is not decoded twice
        try:
            limits = {"unopened": (range(1, len(dealers) + 1),)}
            found = {*Payload.from_bytes(message, limits=limits).tensor("unopened").tolist()}
        except PayloadError:
            return set()
        return found if found <= {*dealers} else set()

    def _name_by_complaints(self) -> None:
        """Name the clients that complaints convict."""
        for id in sorted(liars := convicted(self.complaints)):
            others = sorted(
                {other for pair in self.complaints if id in pair for other in pair} - {id}
            )
            log.warning(
                "secure sum: client %d is named: envelopes between it and clients %s cannot be opened",
                id, ", ".join(map(str, others)),
            )  # fmt: skip
        self.named |= liars
        for id, dealer in sorted(pair for pair in self.complaints if not liars.intersection(pair)):
            log.warning(
                "secure sum: client %d cannot open the envelope that client %d sealed: one of the two lies",
                id, dealer,
            )  # fmt: skip

    def unmask_requests(self) -> dict[int, bytes]:
        """Return, for each client whose vector arrived, whose shares of which secret it is to send.

        Raises:
            RoundVoid: too few vectors arrived.
        """
        self._name_by_complaints()
        self._require_enough(self.living, "sent their vector")
        requests = {}
        for id in sorted(self.living):
            living, dropped = self._asked(id)
            requests[id] = Payload({"living": _ids(living), "dropped": _ids(dropped)}).to_bytes()
        return requests

    def unmask(self, messages: Mapping[int, bytes]) -> Tensor:
        """Return the sum of the living clients' vectors, int64 ``[L]``.

        Args:
            messages: the answers to :meth:`unmask_requests`.

        Raises:
            RoundVoid: too few answered, or no shares of a client give what it advertised.
        """
        asked = {holder: [id for ids in self._asked(holder) for id in ids] for holder in messages}
        answers = _readable(messages, lambda holder: {"shares": (len(asked[holder]), SEED_BYTES)})
        self._require_enough(answers, "gave their shares")
        shares: dict[int, dict[int, bytes]] = {id: {} for id in self.fingerprints}
        for holder, given in answers.items():
            for id, share in zip(asked[holder], given.tensor("shares").numpy(), strict=True):
                shares[id][self._holders(id).index(holder)] = share.tobytes()
        total = self.total.numpy().view(np.uint64)
        unknown: list[int] = []
        for id in sorted(self.fingerprints):
            if id not in self.living and not self.living.intersection(self.graph[id]):
                continue  # nobody in the sum has a mask in common with it
            seed = self._reconstructed(id, shares[id])
            if seed is None:
                unknown.append(id)
                if len(unknown) > MAX_LIARS:
                    break
            elif id in self.living:
                add_mask(total, own_mask_key(seed), -1)
            else:
                key = private_key(seed)
                for other in self.living.intersection(self.graph[id]):
                    add_mask(
                        total, agreed_key(key, self.public[other][1], "mask"), -mask_sign(other, id)
                    )
        if unknown:
            raise RoundVoid(self._blame(unknown, {id: len(shares[id]) for id in unknown}))
        return self.total

    def _reconstructed(self, id: int, shares: Mapping[int, bytes]) -> bytes | None:
        """Return the seed of a client's own mask, or of its mask key where it dropped out; None
        where no shares that were tried give what it advertised.
        """
        holders = self._holders(id)
        if len(shares) < self.least_shares:
            raise RoundVoid(
                f"{len(shares)} of {len(holders)} shares of client {id} came back; "
                f"{self.least_shares} are needed"
            )
        order = sorted(shares, key=lambda place: (holders[place] in self.suspects, place))
        for chosen in subsets(order, self.least_shares):
            seed = combine({place: shares[place] for place in chosen})
            if self._is_advertised(id, seed):
                break
        else:
            return None
        searched = [*chosen] != order[: self.least_shares]
        for place in order:
            holder = holders[place]
            if place in chosen:
                self.suspects.discard(holder)
            elif searched or holder in self.suspects - self.named:
                others = {other: shares[other] for other in chosen[1:]}
                self._note(holder, id, fits=combine({**others, place: shares[place]}) == seed)
        return seed

    def _is_advertised(self, id: int, seed: bytes) -> bool:
        if id in self.living:
            return fingerprint(seed) == self.fingerprints[id]
        return public_key(private_key(seed)) == self.public[id][1]

    def _blame(self, unknown: Sequence[int], given: Mapping[int, int]) -> str:
        """Return why secrets cannot be reconstructed, and name their clients where it is they who
        lied: of shares more than are needed, one holder's wrong ones would have been found.

        Args:
            unknown: the clients whose secrets they are, ``MAX_LIARS`` + 1 at most.
            given: how many shares of each secret came back.
        """
        whose = f"client{'s'[: len(unknown) > 1]} {', '.join(map(str, unknown))}"
        wrong = f"the shares of {whose} give another secret than the one it advertised"
        if len(unknown) > MAX_LIARS or min(given.values()) == self.least_shares:
            return f"{wrong}: it, or some of those who hold them, sent wrong ones"
        self.named.update(unknown)
        return f"{wrong}, whichever of them are taken: {whose} named"

    def _note(self, holder: int, id: int, fits: bool) -> None:
        """Note whether a holder's share of a client's secret fits the others."""
        if fits:
            self.suspects.discard(holder)
            return
        self.suspects.add(holder)
        known = self.misfits.setdefault(holder, set())
        known.add(id)
        if len(known) == 1:
            log.warning(
                "secure sum: the share of client %d's secret that client %d gave does not fit: one of the "
                "two sent a wrong one",
                id, holder,
            )  # fmt: skip
        elif holder not in self.named:
            self.named.add(holder)
            log.warning(
                "secure sum: client %d is named: its shares of the secrets of clients %s do not fit",
                holder, ", ".join(map(str, sorted(known))),
            )  # fmt: skip

    def _asked(self, holder: int) -> tuple[list[int], list[int]]:
        """Return of whom a client is asked for a share: of its own and its neighbours' that live,
        and of neighbours that dropped out after they dealt shares."""
        sharers = [id for id in self._holders(holder) if id in self.fingerprints]
        return [id for id in sharers if id in self.living], [
            id for id in sharers if id not in self.living
        ]

    def _holders(self, id: int) -> list[int]:
        return sorted([id, *self.graph[id]])

    def _require_enough(self, clients: Collection[int], what: str) -> None:
        if len(clients) < self.least_clients:
            raise RoundVoid(
                f"{len(clients)} of {len(self.ring)} clients {what}; {self.least_clients} are needed "
                f"(threshold {self.settings.threshold:g})"
            )


def subsets(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield ``size`` of these at a time: first those in front, then others, until all wrong ones
    have been left out together, if they are few.

    With n of them and s = n - size to spare, any single one is left out after ceil(n / s) sets:
    whole blocks of s are left out in turn. Of w at once, w blocks of s / w each, ``MAX_SUBSETS`` in
    all.

    >>> [*subsets([1, 2, 3, 4], 2)][:3]
    [[1, 2], [3, 4], [1, 2]]
    """
    spare = len(order) - size

    def without(blocks_left_out: int) -> Iterator[Sequence[int]]:
        width = spare // blocks_left_out
        blocks = [order[at : at + width] for at in range(0, len(order), width)]
        for some in combinations(blocks, blocks_left_out):
            left_out = {*chain.from_iterable(some)}
            yield [one for one in order if one not in left_out][:size]

    yield order[:size]
    if spare:
        yield from without(1)
    yield from islice(chain.from_iterable(map(without, range(2, spare + 1))), MAX_SUBSETS)


def _readable(
    messages: Mapping[int, bytes], shapes: Callable[[int], Mapping[str, tuple[int, ...]]]
) -> dict[int, Payload]:
    """Return the decoded messages by sender, in order of id; a sender whose message has another
    form than it must have drops out of the round."""
    read = {}
    for id, message in sorted(messages.items()):
        try:
            read[id] = _checked(message, shapes(id), torch.uint8)
        except PayloadError as error:
            log.warning("secure sum: client %d drops out: %s", id, error)
    return read


def _checked(message: bytes, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Payload:
    """Return a decoded message."""
    given = Payload.from_bytes(
        message, limits={name: math.prod(shape) for name, shape in shapes.items()}
    )
    for name, shape in shapes.items():
        tensor = given.tensor(name)
        if tensor.shape != shape or tensor.dtype != dtype:
            raise PayloadError(
                f"entry {name!r} {tuple(tensor.shape)} in {tensor.dtype}",
                f"it is {shape} in {dtype} for every client",
                "send that",
            )
    return given


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _ids(ids: Collection[int]) -> Tensor:
    return torch.tensor(sorted(ids), dtype=torch.int32)
