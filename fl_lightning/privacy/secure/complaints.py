"""Complaints about envelopes that cannot be opened, and whom they convict.

Nobody but its receiver can look into an envelope, so one complaint does not say which of the two
lied. Several do: the fewest clients that explain all of them lied, where one set alone is the
smallest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from fl_lightning.privacy.secure.primitives import ProtocolError
from fl_lightning.wire import Payload

Complaint = tuple[int, int]
"""The client that complains, and the one that sealed the envelope."""


class UnopenedError(ProtocolError):
    """A client cannot open envelopes. It sends a complaint in place of its masked vector.

    Args:
        client: the client.
        dealers: those whose envelopes it cannot open.
    """

    def __init__(self, client: int, dealers: Sequence[int]) -> None:
        super().__init__(
            f"clients {', '.join(map(str, dealers))} dealt envelopes that client {client} cannot open",
            "a sender seals its envelope for its receiver",
            "leave the round",
        )
        self.complaint = Payload(
            {"unopened": torch.tensor(sorted(dealers), dtype=torch.int32)}
        ).to_bytes()


def convicted(complaints: Collection[Complaint]) -> set[int]:
    """Return the clients that lied: those in each of the smallest sets that have one client of
    every complaint. Of more than two liars nobody is convicted.

    >>> convicted([(1, 9), (2, 9)]), convicted([(1, 9)]), convicted([(9, 1), (9, 2), (3, 8)])
    ({9}, set(), {9})
    """
    if not complaints:
        return set()
    if single := _in_all(complaints):
        return single if len(single) == 1 else set()
    pairs = [
        {one, other}
        for one in next(iter(complaints))
        for other in _in_all([pair for pair in complaints if one not in pair])
    ]
    return set.intersection(*pairs) if pairs else set()


def _in_all(complaints: Collection[Complaint]) -> set[int]:
    return set.intersection(*map(set, complaints)) if complaints else set()
