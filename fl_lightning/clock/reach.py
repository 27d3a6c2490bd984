"""Who can be reached when, and what becomes of a client that goes offline while it is at work."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from fl_lightning.clock.clock import Clock
from fl_lightning.clock.trained import Draw
from fl_lightning.errors import MisuseError, RunStopped
from fl_lightning.wire import LedgerEntry

MANY, FEW, TRIES = 1000, 4, 32
"""How up to ``FEW`` online clients are found among more than ``MANY``: at most ``TRIES`` clients
are drawn and asked whether they are online, one by one, before the availability of all is
computed."""


@dataclass
class Pool:
    """The clients of a federation without some of them, as a sequence of ids that is not made.

    Few ids are looked for one by one, in lists: after each arrival a client is drawn and left out,
    and one call of NumPy's would cost more than both.

    Args:
        clients: sorted ids.
        missing: places in ``clients`` of those that are left out, sorted.
    """

    clients: np.ndarray
    missing: list[int] = field(default_factory=list)

    def leave_out(self, some: Collection[int]) -> Pool:
        """Leave out more clients, which it has or not, and return it."""
        if len(some) > FEW:
            others = np.array(sorted(some), np.int64)
            places = np.minimum(np.searchsorted(self.clients, others), len(self.clients) - 1)
            gone = places[self.clients[places] == others].tolist()
            self.missing = sorted({*self.missing, *gone})
            return self
        clients, missing, last = self.clients, self.missing, len(self.clients) - 1
        for id in some:
            # most federations have the clients 0, 1, ...; a search would touch memory that no cache
            # has
            is_at_id = 0 <= id <= last and clients.item(id) == id
            place = id if is_at_id else min(int(clients.searchsorted(id)), last)
            at = bisect_left(missing, place)
            if clients.item(place) == id and missing[at : at + 1] != [place]:
                missing.insert(at, place)
        return self

    def without(self, some: Collection[int]) -> Pool:
        """Return the same without more clients, which it has or not."""
        return Pool(self.clients, [*self.missing]).leave_out(some)

    def __len__(self) -> int:
        return len(self.clients) - len(self.missing)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Return the ids at some places of the sequence."""
        missing = self.missing
        if np.size(places) > FEW or not np.ndim(places):
            # ids that are left, below each
            before = np.array(missing, np.int64) - np.arange(len(missing))
            return self.clients[places + np.searchsorted(before, places, side="right")]
        numbers = range(len(missing))
        return self.clients[
            [
                place + bisect_right(numbers, place, key=lambda number: missing[number] - number)
                for place in places.tolist()
            ]
        ]

    @property
    def ids(self) -> np.ndarray:
        """All ids."""
        return np.delete(self.clients, self.missing)


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
        """Return which of these clients are online, and when the first of the others comes online:
        infinity if none does.

        Args:
            clients: ids.
            at: virtual seconds.
        """
        clients = np.asarray(clients)
        if self.clock.reached.is_always:
            return clients, math.inf
        start, _ = self.clock.reached.checked(self.seed, clients, at)
        there = start <= at
        return clients[there], float(start[~there].min(initial=math.inf))

    def draw_online(
        self, pool: Pool, count: int, at: float, draw: Draw, number: int
    ) -> tuple[list[int], int, float]:
        """Draw clients that are online, the number of the next draw, and when the next of the
        others comes online, as far as that is asked for: nobody was found, or fewer than ``count``.

        Few of many clients are drawn one by one until they are online, which has the same law as a
        draw among those that are, and looks at few.

        Args:
            pool: the free clients.
            count: how many are wanted.
            at: virtual seconds.
            draw: draws clients.
            number: of the next draw in this round.
        """
        if self.clock.reached.is_always:
            count = min(count, len(pool))
            if count:
                return (list(draw(pool, count, number)), number + 1, math.inf)
            return ([], number, math.inf)
        found, span = list[int](), partial(self.clock.reached.span, self.seed)
        for _ in range(TRIES if len(pool) > MANY and count <= FEW else 0):
            (one,) = draw(pool, 1, number)
            number += 1
            if one not in found and span(one, at)[0] <= at:
                found.append(int(one))
            if len(found) == count:
                return found, number, math.inf
        there, later = self.online(pool.without({*found}).ids, at)
        if wanted := min(count - len(found), len(there)):
            found += draw(there, wanted, number)
            number += 1
        return found, number, later

    def first_online(self, clients: np.ndarray, at: float) -> tuple[np.ndarray, float]:
        """Return the clients that are online at the first instant at which one is, and that
        instant.

        Raises:
            RunStopped: there is none.
            MisuseError: a class of one's own says that one is, and then that it is not.
        """
        there, later = self.online(clients, at)
        if len(there):
            return there, at
        name = type(self.clock.reached).__name__
        if math.isinf(later):
            raise RunStopped(
                f"after {at:g} virtual seconds nobody is online any more",
                f"a round needs a client, and {name} has none that comes back",
                "take another availability, other devices, or fewer rounds",
            )
        there, _ = self.online(clients, later)
        if len(there):
            return there, later
        raise MisuseError(
            f"{name}.spans(at={later:g}), by which nobody is online",
            f"at {at:g} it said that one comes online then, and it is a function of its arguments",
            "return the same times whenever they are asked for",
        )

    def lost(self, entry: LedgerEntry) -> LedgerEntry | None:
        """Return the entry of a client that goes offline before its upload has arrived; None if it
        does not.

        Of its upload it has the bytes that had left by then.

        Args:
            entry: with the times at which it starts and would end.
        """
        begin, end = entry.started, entry.ended
        if begin is None or end is None:
            return None
        until = self.until(entry.client, begin)
        if end <= until:
            return None
        rate = self.clock.line(entry.client).up
        late = end - until
        unsent = entry.upload if math.isinf(rate) else math.ceil(min(rate * late, entry.upload))
        sent = entry.upload - unsent
        return replace(entry, status="lost", upload=sent, wasted=sent, ended=until)

    def until(self, client: int, at: float) -> float:
        """Return when a client that is online at ``at`` goes offline."""
        if self.clock.reached.is_always:
            return math.inf
        return self.clock.reached.span(self.seed, client, at)[1]
