"""What comes of the clients of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.aggregation.base import Receipt
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.client import Assignment


@dataclass
class Trained:
    """Clients that have trained.

    Args:
        cohort: what was asked of each client that started in this round.
        receipts: what came of each client whose upload is due, or who never began.
        uploads: those that count, by client id.
        examples: of each client that started and was sent the broadcast, how many its steps took,
            by id.
        started: receipts of the clients that started in this round, whose losses are this round's.
        staleness: of each upload that counts in an asynchronous round, the versions since its
            download.
        late: how many uploads came too late to be used.
        losses: what clients that trained have told of their losses, by id.
        offline: how many clients went offline before their upload had arrived.
    """

    cohort: list[Assignment] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    uploads: Uploads = field(default_factory=Uploads)
    examples: dict[int, int] = field(default_factory=dict)
    started: list[Receipt] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    late: int = 0
    offline: int = 0
    losses: dict[int, float] = field(default_factory=dict)


Train = Callable[[Sequence[int]], Trained]
"""Trains clients by id, from the server's present state."""
Draw = Callable[[Any, int, int], Sequence[int]]
"""Draws clients: of these ids, an array, how many, and in which draw of the round, counted from
0."""
