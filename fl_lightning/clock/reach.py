"""Who can be reached when, and what becomes of a client that goes offline while it is at work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fl_lightning.clock.clock import Clock
from fl_lightning.errors import RunStopped
from fl_lightning.wire import LedgerEntry


@dataclass(frozen=True)
class Reach:
    """The availability of a run's clients.

    Args:
        clock: its settings.
        seed: of the run.
    """

    clock: Clock
    seed: int

    def online(self, clients: np.ndarray | Sequence[int], at: float) -> tuple[np.ndarray, float]:
        """Return which of these clients are online, and when the first of the others comes online: infinity
        if none does.

        Args:
            clients: ids.
            at: virtual seconds.
        """
        clients = np.asarray(clients)
        if self.clock.reached.is_always:
            return clients, math.inf
        start, _ = self.clock.reached.spans(self.seed, clients, at)
        there = start <= at
        return clients[there], float(start[~there].min(initial=math.inf))

    def first_online(self, clients: np.ndarray, at: float) -> tuple[np.ndarray, float]:
        """Return the clients that are online at the first instant at which one is, and that instant.

        Raises:
            RunStopped: there is none.
        """
        there, later = self.online(clients, at)
        if len(there):
            return there, at
        if math.isinf(later):
            name = type(self.clock.reached).__name__
            raise RunStopped(
                f"after {at:g} virtual seconds nobody is online any more",
                f"a round needs a client, and {name} has none that comes back",
                "take other devices, or fewer rounds",
            )
        return self.online(clients, later)[0], later

    def lost(self, entry: LedgerEntry) -> LedgerEntry | None:
        """Return the entry of a client that goes offline before its upload has arrived; None if it does not.

        Of its upload it has the bytes that had left by then.

        Args:
            entry: with the times at which it starts and would end.
        """
        begin, end = entry.started, entry.ended
        if self.clock.reached.is_always or begin is None or end is None:
            return None
        until = float(self.clock.reached.spans(self.seed, np.array([entry.client]), begin)[1][0])
        if end <= until:
            return None
        rate = self.clock.line(entry.client).up
        late = end - until
        unsent = entry.upload if math.isinf(rate) else math.ceil(min(rate * late, entry.upload))
        sent = entry.upload - unsent
        return replace(entry, status="lost", upload=sent, wasted=sent, ended=until)
