"""What server and clients of Fed-VEMoE send each other.

Down: which slots have an expert (K bits), pi of those, the number of rejecters of the last round,
and the rows of the shared adapter and of each expert; where clients remember rows, only those that
have moved since, and which these are (K bits). Up: which experts were trained (K bits), their
shares, their rows, two votes, and the own adapter of a client that seeds an expert. A row is an
adapter and its router, ``[P + d]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.methods.experts.slots import Slots
from fl_lightning.wire import Axis, Codes, Limit, OptionalShape, Payload, PayloadError

Rows = Mapping[int, Tensor]
"""Rows ``[P + d]`` by slot."""


@dataclass(frozen=True)
class Received:
    """What a client is sent.

    Args:
        active: which slots have an expert, bool ``[K + 1]``.
        prior: pi, float64 ``[K + 1]``.
        rejecters: clients that rejected all experts in the last round.
        rows: of slot 0, where there is a shared adapter, and of the active slots.
    """

    active: Tensor
    prior: Tensor
    rejecters: float
    rows: Rows


@dataclass(frozen=True)
class Trained:
    """What a client sends.

    Args:
        shares: of the slots that it trained; 1 for slot 0.
        rows: of the same slots.
        rejects: whether its own adapter is better than every expert.
        own: its own adapter ``[P]``, where it seeds an expert.
    """

    shares: Mapping[int, float]
    rows: Rows
    rejects: bool = False
    own: Tensor | None = None


@dataclass(frozen=True)
class ExpertWire:
    """The form of the messages of one federation.

    Args:
        size: P.
        features: d.
        slots: K.
        seats: experts that a client trains at most.
        shared: whether there is a shared adapter.
        oblivious: whether a client always sends all slots.
        with_own: whether clients have an adapter of their own.
    """

    size: int
    features: int
    slots: int
    seats: int
    shared: bool
    oblivious: bool
    with_own: bool

    def broadcast(self, slots: Slots, moved: Tensor | None = None) -> Payload:
        """Return what a client is sent.

        Args:
            slots: the server's.
            moved: slots whose rows the client does not remember, bool ``[K + 1]``; None: it
                remembers none.
        """
        rows = slots.active if moved is None else slots.active & moved
        which = {} if moved is None else {"moved": Codes(rows[1:].to(torch.int32), bits=1)}
        rows = rows.clone()
        rows[0] = self.shared
        return Payload(
            {
                "active": Codes(slots.active[1:].to(torch.int32), bits=1),
                "prior": slots.prior[slots.active].float(),
                "rejecters": slots.rejecters.float().reshape(1),
                **which,
                "experts": torch.cat([slots.experts[rows], slots.routers[rows]], dim=1),
            }
        )

    def received(self, message: Payload, remembered: Tensor | None = None) -> Received:
        """Return what a broadcast says.

        Args:
            message: of the server.
            remembered: rows of all slots as the client last knew them, ``[K + 1, P + d]``; None: it
                has none.
        """
        active = _slot_bits(message, "active")
        prior = torch.zeros(self.slots + 1, dtype=torch.float64)
        prior[active] = message.tensor("prior").double()
        sent = _slot_bits(message, "moved") if "moved" in message else active
        slots = [*self._first, *torch.nonzero(sent).flatten().tolist()]
        rows = dict(zip(slots, message.tensor("experts"), strict=True))
        if remembered is not None:
            rows |= {
                slot: remembered[slot] for slot in torch.nonzero(active & ~sent).flatten().tolist()
            }
        return Received(active, prior, float(message.tensor("rejecters")), rows)

    def upload(self, trained: Trained) -> dict[str, Tensor | Codes]:
        """Return the entries of an upload."""
        if self.slots == 0:
            return {"rows": trained.rows[0].unsqueeze(0)}
        shares = torch.tensor([trained.shares.get(slot, 0.0) for slot in range(1, self.slots + 1)])
        empty = torch.zeros(self.size + self.features)
        rows = [trained.rows.get(slot, empty) for slot in self.sent(sorted({*trained.rows} - {0}))]
        votes = torch.tensor([trained.rejects, trained.own is not None], dtype=torch.int32)
        entries: dict[str, Tensor | Codes] = {
            "slots": Codes((shares > 0).to(torch.int32), bits=1),
            "shares": shares if self.oblivious else shares[shares > 0],
            "rows": torch.stack(rows),
            "votes": Codes(votes, bits=1),
        }
        if trained.own is not None:
            entries["own"] = trained.own
        elif self.oblivious and self.with_own:
            entries["own"] = torch.zeros(self.size)
        return entries

    @property
    def _first(self) -> list[int]:
        return [0] if self.shared else []

    def sent(self, mine: list[int]) -> list[int]:
        """Return the slots whose rows a client sends that trained the experts of ``mine``."""
        return [*self._first, *(range(1, self.slots + 1) if self.oblivious else mine)]

    def limits(self) -> dict[str, Limit]:
        """Return the shape of each entry of an upload, ``examples`` left out."""
        width, shared = self.size + self.features, int(self.shared)
        if self.slots == 0:
            return {"rows": (1, width)}
        experts: Axis = self.slots if self.oblivious else range(1, self.seats + 1)
        rows: Axis = (
            self.slots + shared if self.oblivious else range(1 + shared, self.seats + shared + 1)
        )
        shapes: dict[str, Limit] = {
            "slots": (self.slots,),
            "shares": (experts,),
            "rows": (rows, width),
        }
        if self.with_own:
            shapes["own"] = (self.size,) if self.oblivious else OptionalShape((self.size,))
        return {**shapes, "votes": (2,)}

    def trained(self, upload: Payload, active: Tensor) -> Trained:
        """Return what an upload says.

        Args:
            upload: of one client.
            active: which slots have an expert, bool ``[K + 1]``.

        Raises:
            PayloadError: the entries do not fit each other or this federation.
        """
        shares = {0: 1.0} if self.shared else {}
        rejects = seeds = False
        if self.slots:
            shares |= self._shares(upload, active)
            rejects, seeds = map(bool, upload.codes("votes").values.tolist())
        sent, rows = self.sent(sorted({*shares} - {0})), upload.tensor("rows")
        wanted = (len(sent), self.size + self.features)
        if tuple(rows.shape) != wanted:
            raise PayloadError(
                f"rows of shape {tuple(rows.shape)}",
                f"this client sends {wanted}",
                "use one network on both sides",
            )
        own = upload.tensor("own") if seeds else None
        found = {slot: row for slot, row in zip(sent, rows, strict=True) if slot in shares}
        return Trained(shares, found, rejects, own)

    def _shares(self, upload: Payload, active: Tensor) -> dict[int, float]:
        mine = upload.codes("slots").values.bool()
        if bool((mine & ~active[1:]).any()):
            raise PayloadError(
                f"experts {torch.nonzero(mine).flatten().add(1).tolist()}",
                f"this federation has {torch.nonzero(active).flatten().tolist()}",
                "train experts that were sent",
            )
        shares = upload.tensor("shares")
        if self.oblivious and shares.shape == mine.shape:
            shares = shares[mine]
        fits = shares.shape == (int(mine.sum()),) and 0 < len(shares) <= self.seats
        if not (
            fits and bool(((shares > 0) & (shares <= 1)).all()) and float(shares.sum()) < 1.001
        ):
            raise PayloadError(
                f"shares {shares.tolist()} of {int(mine.sum())} experts",
                f"1 to {self.seats} experts have shares above 0 that add up to 1",
                "send one share for each expert that was trained",
            )
        slots = torch.nonzero(mine).flatten().add(1).tolist()
        return dict(zip(slots, shares.tolist(), strict=True))


def _slot_bits(message: Payload, name: str) -> Tensor:
    """Return the slots that an entry of K bits names, bool ``[K + 1]``."""
    return torch.cat([torch.zeros(1), message.codes(name).values.reshape(-1)]).bool()
