"""A client of a secure sum. It alone holds its vector, its seeds and its private keys."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fl_lightning.privacy.secure.complaints import UnopenedError
from fl_lightning.privacy.secure.primitives import (
    SEED_BYTES,
    ProtocolError,
    add_mask,
    agreed_key,
    derived_key,
    fingerprint,
    open_envelope,
    private_key,
    public_key,
    seal,
    split,
)
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.wire import Payload


class SecureClient:
    """One client in one round: it answers the server's message of each phase with one of its own.

    Args:
        id: the client.
        settings: of the secure sum.
        cohort: clients of the round.
        random_bytes: gives as many random bytes as it is asked for: ``os.urandom``, or a stream of
            a simulation.
    """

    def __init__(
        self, id: int, settings: SecureSum, cohort: int, random_bytes: Callable[[int], bytes]
    ) -> None:
        self.id, self.most_neighbours = id, settings.degree(cohort)
        self.least_shares = settings.least_shares(cohort)
        """t, the shares that reconstruct a secret."""
        self.own_seed, self.mask_seed = random_bytes(SEED_BYTES), random_bytes(SEED_BYTES)
        self.envelope_key = private_key(random_bytes(SEED_BYTES))
        self.mask_key = private_key(self.mask_seed)
        self.neighbours: dict[int, bytes] = {}
        """Public envelope key of each neighbour."""
        self.masks: dict[int, bytes] = {}
        """The key of the mask that this client has in common with each neighbour."""
        self.sharers: list[int] = []
        """Neighbours that dealt their shares: those that masks are exchanged with."""
        self.held: dict[int, tuple[bytes, bytes]] = {}
        """The shares of secrets that this client holds, by the client whose secrets they are,
        itself among them: a share of the seed of that client's own mask, and one of the seed of its
        mask key."""
        self.answered = False

    def keys(self) -> bytes:
        """Return the message of phase *keys*: two public keys."""
        return Payload(
            {
                "envelope": _row(public_key(self.envelope_key)),
                "mask": _row(public_key(self.mask_key)),
            }
        ).to_bytes()

    def shares(self, message: bytes) -> bytes:
        """Return the message of phase *shares*: one envelope for each neighbour.

        Args:
            message: the neighbours' public keys.

        Raises:
            ProtocolError: there are too few neighbours to reconstruct anything, more than the
                cohort has, or this client is among them; a key is of low order, or two neighbours
                have one mask key, whose masks cancel.
        """
        given = Payload.from_bytes(message)
        ids = given.tensor("ids").tolist()
        self.neighbours = dict(zip(ids, _rows(given.tensor("envelope")), strict=True))
        self.masks = {
            id: agreed_key(self.mask_key, public, "mask")
            for id, public in zip(ids, _rows(given.tensor("mask")), strict=True)
        }
        if len(ids) > self.most_neighbours or len({*self.masks.values()}) < len(ids):
            raise ProtocolError(
                f"neighbours {ids} of client {self.id}",
                f"it has at most {self.most_neighbours} neighbours, each with a mask key of its own",
                "leave the round",
            )
        if self.id in self.neighbours or len(self.neighbours) + 1 < self.least_shares:
            raise ProtocolError(
                f"neighbours {ids} of client {self.id}",
                f"{self.least_shares} clients reconstruct a secret, this one among them",
                "leave the round",
            )
        holders = sorted([self.id, *self.neighbours])
        dealt = [
            split(seed, self.least_shares, len(holders)) for seed in (self.own_seed, self.mask_seed)
        ]
        for_holder = dict(zip(holders, zip(*dealt, strict=True), strict=True))
        self.held = {self.id: for_holder[self.id]}
        envelopes = [
            seal(self._envelope_key(id, self.id, id), b"".join(for_holder[id]))
            for id in sorted(self.neighbours)
        ]
        return Payload(
            {"fingerprint": _row(fingerprint(self.own_seed)), "envelopes": stacked(envelopes)}
        ).to_bytes()

    def take_shares(self, message: bytes) -> None:
        """Keep the shares that the neighbours dealt.

        Args:
            message: the envelopes of those neighbours that dealt shares.

        Raises:
            UnopenedError: envelopes cannot be opened.
            ProtocolError: there are too few of them.
        """
        given = Payload.from_bytes(message)
        self.sharers = given.tensor("ids").tolist()
        envelopes = _rows(given.tensor("envelopes"))
        if (
            len({*self.sharers}) + 1 < self.least_shares
            or not {*self.sharers} <= self.neighbours.keys()
        ):
            raise ProtocolError(
                f"envelopes of {self.sharers} for client {self.id}",
                f"at least {self.least_shares - 1} of its neighbours deal shares",
                "leave the round",
            )
        unopened = []
        for id, envelope in zip(self.sharers, envelopes, strict=True):
            try:
                shares = open_envelope(self._envelope_key(id, id, self.id), envelope)
            except ProtocolError:
                unopened.append(id)
            else:
                self.held[id] = shares[:SEED_BYTES], shares[SEED_BYTES:]
        if unopened:
            raise UnopenedError(self.id, unopened)

    def masked(self, vector: Tensor) -> bytes:
        """Return the message of phase *masked*: the vector with all masks added, modulo 2^64.

        Args:
            vector: int64 ``[L]``, which is not changed.
        """
        masked = vector.numpy().view(np.uint64).copy()
        add_mask(masked, own_mask_key(self.own_seed))
        for id in self.sharers:
            add_mask(masked, self.masks[id], mask_sign(self.id, id))
        return Payload({"masked": torch.from_numpy(masked.view(np.int64))}).to_bytes()

    def unmask(self, message: bytes) -> bytes:
        """Return the message of phase *unmask*: a share of one secret of each client that it is
        asked for.

        Args:
            message: whose vectors arrived (``living``) and who dropped out after dealing shares.

        Raises:
            ProtocolError: the server asks twice, for both secrets of one client, for this client's
                mask key, or for so many mask keys that fewer than t clients would be left in the
                sum.
        """
        given = Payload.from_bytes(message)
        living, dropped = given.tensor("living").tolist(), given.tensor("dropped").tolist()
        asked = [*living, *dropped]
        honest = len({*asked}) == len(asked) and {*asked} == self.held.keys() and self.id in living
        if self.answered or not honest or len(living) < self.least_shares:
            raise ProtocolError(
                f"a request to client {self.id} for secrets of living {living} and dropped {dropped}",
                f"it gives one share of each neighbour, once, while {self.least_shares} of them live",
                "leave the round",
            )
        self.answered = True
        shares = [self.held[id][0] for id in living] + [self.held[id][1] for id in dropped]
        return Payload({"shares": stacked(shares)}).to_bytes()

    def _envelope_key(self, neighbour: int, sender: int, receiver: int) -> bytes:
        return agreed_key(
            self.envelope_key, self.neighbours[neighbour], f"envelope {sender} {receiver}"
        )


def own_mask_key(seed: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return derived_key(seed, "own mask")


def mask_sign(client: int, neighbour: int) -> int:
    """Return the sign with which a client adds the mask that it shares with a neighbour."""
    return 1 if client < neighbour else -1


def stacked(rows: list[bytes], width: int = 0) -> Tensor:
    """Return equally long byte strings as uint8 ``[count, width]``."""
    return torch.tensor(bytearray(b"".join(rows)), dtype=torch.uint8).view(
        len(rows), -1 if rows else width
    )


def _row(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _rows(tensor: Tensor) -> list[bytes]:
    """Return the rows of uint8 ``[count, width]`` as bytes."""
    return [row.tobytes() for row in tensor.numpy()]
