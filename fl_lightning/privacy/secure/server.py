"""The server of a secure sum. It gets public keys, envelopes that it cannot open, masked vectors, and one
share of each client from each of its neighbours."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fl_lightning.privacy.secure.client import mask_sign, own_mask_key, stacked
from fl_lightning.privacy.secure.primitives import (
    KEY_BYTES,
    SEED_BYTES,
    TAG_BYTES,
    add_mask,
    agreed_key,
    agrees,
    combine,
    fingerprint,
    private_key,
    public_key,
)
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.wire import Payload, PayloadError

log = logging.getLogger("fl_lightning")

ENVELOPE_BYTES = 2 * SEED_BYTES + TAG_BYTES


class RoundVoid(Exception):
    """The round ends without a sum; the message says why."""


class SecureServer:
    """The server in one round. Of each phase it gets messages by the sender's id, and returns those for the
    next phase by the receiver's id.

    Args:
        settings: threshold and neighbours.
        ring: ids of the cohort in a random order.
        length: L, values of a vector, the same for all clients.

    Attributes:
        total: int64 ``[L]``, the sum modulo 2^64 of the masked vectors that arrived, until it is unmasked.
        living: ids of the clients whose vectors are in it.
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

    def pass_on_keys(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the public keys of its neighbours for each client that sent its own.

        Raises:
            RoundVoid: too few did.
        """
        shape = {"envelope": (KEY_BYTES,), "mask": (KEY_BYTES,)}
        for id, given in _readable(messages, lambda id: shape).items():
            keys = _bytes(given.tensor("envelope")), _bytes(given.tensor("mask"))
            if all(map(agrees, keys)):  # else its neighbours would have to leave
                self.public[id] = keys
            else:
                log.warning("secure sum: client %d drops out: a public key of low order", id)
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
            lambda id: {"fingerprint": (KEY_BYTES,), "envelopes": (len(self.graph[id]), ENVELOPE_BYTES)},
        )
        self._require_enough(readable, "dealt their shares")
        boxes: dict[int, dict[int, bytes]] = {id: {} for id in readable}
        for id, given in readable.items():
            self.fingerprints[id] = _bytes(given.tensor("fingerprint"))
            for other, envelope in zip(self.graph[id], given.tensor("envelopes").numpy(), strict=True):
                if other in boxes:
                    boxes[other][id] = envelope.tobytes()
        return {
            id: Payload({"ids": _ids(box), "envelopes": stacked([*box.values()], ENVELOPE_BYTES)}).to_bytes()
            for id, box in boxes.items()
        }

    def add_masked(self, id: int, message: bytes) -> None:
        """Add one masked vector.

        Raises:
            PayloadError: it is damaged, of another length, or of a client that dealt no shares.
        """
        given = _checked(message, {"masked": (self.length,)}, torch.int64)
        if id in self.living or id not in self.fingerprints:
            raise PayloadError(
                f"a masked vector of client {id}", "one of each that dealt shares counts", "send one"
            )
        self.total += given.tensor("masked")
        self.living.add(id)

    def unmask_requests(self) -> dict[int, bytes]:
        """Return, for each client whose vector arrived, whose shares of which secret it is to send.

        Raises:
            RoundVoid: too few vectors arrived.
        """
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
            RoundVoid: too few answered, or their shares give something else than what was advertised.
        """
        asked = {holder: [id for ids in self._asked(holder) for id in ids] for holder in messages}
        answers = _readable(messages, lambda holder: {"shares": (len(asked[holder]), SEED_BYTES)})
        self._require_enough(answers, "gave their shares")
        shares: dict[int, dict[int, bytes]] = {id: {} for id in self.fingerprints}
        for holder, given in answers.items():
            for id, share in zip(asked[holder], given.tensor("shares").numpy(), strict=True):
                shares[id][self._holders(id).index(holder)] = share.tobytes()
        total = self.total.numpy().view(np.uint64)
        for id in sorted(self.fingerprints):
            if id not in self.living and not self.living.intersection(self.graph[id]):
                continue  # nobody in the sum has a mask in common with it
            seed = self._reconstructed(id, shares[id])
            if id in self.living:
                add_mask(total, own_mask_key(seed), -1)
                continue
            key = private_key(seed)
            for other in self.living.intersection(self.graph[id]):
                add_mask(total, agreed_key(key, self.public[other][1], "mask"), -mask_sign(other, id))
        return self.total

    def _reconstructed(self, id: int, shares: Mapping[int, bytes]) -> bytes:
        """Return the seed of a client's own mask, or of its mask key where it dropped out."""
        if len(shares) < self.least_shares:
            raise RoundVoid(
                f"{len(shares)} of {len(self._holders(id))} shares of client {id} came back; "
                f"{self.least_shares} are needed"
            )
        seed = combine(dict(sorted(shares.items())[: self.least_shares]))
        right = (
            fingerprint(seed) == self.fingerprints[id]
            if id in self.living
            else public_key(private_key(seed)) == self.public[id][1]
        )
        if not right:
            raise RoundVoid(
                f"the shares of client {id} give another secret than the one it advertised: it, or one of "
                "those who hold them, sent wrong ones"
            )
        return seed

    def _asked(self, holder: int) -> tuple[list[int], list[int]]:
        """Return of whom a client is asked for a share: of its own and its neighbours' that live, and of
        neighbours that dropped out after they dealt shares."""
        sharers = [id for id in self._holders(holder) if id in self.fingerprints]
        return [id for id in sharers if id in self.living], [id for id in sharers if id not in self.living]

    def _holders(self, id: int) -> list[int]:
        return sorted([id, *self.graph[id]])

    def _require_enough(self, clients: Collection[int], what: str) -> None:
        if len(clients) < self.least_clients:
            raise RoundVoid(
                f"{len(clients)} of {len(self.ring)} clients {what}; {self.least_clients} are needed "
                f"(threshold {self.settings.threshold:g})"
            )


def _readable(
    messages: Mapping[int, bytes], shapes: Callable[[int], Mapping[str, tuple[int, ...]]]
) -> dict[int, Payload]:
    """Return the decoded messages by sender, in order of id; a sender whose message has another form than it
    must have drops out of the round."""
    read = {}
    for id, message in sorted(messages.items()):
        try:
            read[id] = _checked(message, shapes(id), torch.uint8)
        except PayloadError as error:
            log.warning("secure sum: client %d drops out: %s", id, error)
    return read


def _checked(message: bytes, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Payload:
    """Return a decoded message.

    Raises:
        PayloadError: it is damaged, or its entries have other shapes or another type.
    """
    given = Payload.from_bytes(message, limits={name: math.prod(shape) for name, shape in shapes.items()})
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
