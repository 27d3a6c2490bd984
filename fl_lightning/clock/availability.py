"""When clients can be reached: who is offline is not invited, and who goes offline before its
upload has arrived is lost.

``K`` clients. Times are virtual seconds since the start of the run. A client is online in half-open
intervals ``[start, end)``.
"""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from typing import Annotated, Any

import numpy as np

from fl_lightning.config.constraints import at_least, within
from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import MisuseError
from fl_lightning.rng import stream

MEAN = within("(0, inf)", "a mean time is above 0 seconds, and finite", 3600)
BISECTIONS, NEWTON_STEPS = 12, 6
"""Halvings of the time in which a client comes online, and steps of Newton's rule from there."""

LEAST_SLOPE = 1e-6
FEW = 8
"""Clients that are looked at by themselves, where others may have come or gone since all were
looked at."""

Spans = tuple[np.ndarray, np.ndarray]
"""Start and end of one time online of each client, float64 ``[K]``."""


class Availability(Recorded, ABC):
    """When each client is online: a pure function of the seed, the client and the time."""

    settings_shown = ("--trainer.clock.availability.{name} {value}",) * 2
    is_always: bool = False
    """Whether nobody is ever offline."""

    @abstractmethod
    def spans(self, seed: int, clients: np.ndarray, at: float) -> Spans:
        """Return of each client its first time online that ends after ``at``.

        A client is online at ``at`` where its span has begun by then. Times that touch are one. A
        client that is never online again has a span that starts at infinity.

        Args:
            seed: seed of the run.
            clients: ids, int64 ``[K]``.
            at: virtual seconds, 0 or more.
        """

    def span(self, seed: int, client: int, at: float) -> tuple[float, float]:
        """Return one client's first time online that ends after ``at``."""
        start, end = self.checked(seed, np.array([client]), at)
        return float(start[0]), float(end[0])

    def checked(self, seed: int, clients: np.ndarray, at: float) -> Spans:
        """Return what :meth:`spans` returns.

        Raises:
            MisuseError: it is no such pair of arrays.
        """
        if type(self).spans.__module__.startswith("fl_lightning."):
            return self.spans(seed, clients, at)
        found: Any = self.spans(seed, clients.copy(), at)
        is_pair = isinstance(found, tuple) and len(found) == 2
        if is_pair and all(isinstance(one, np.ndarray) for one in found):
            start, end = found
            is_right = start.shape == end.shape == clients.shape
            if is_right and {start.dtype.kind, end.dtype.kind} == {"f"}:
                still = (end > at) & ((start < end) | (start == np.inf))
                if bool(still.all()):
                    return start, end
        raise MisuseError(
            f"{type(self).__name__}.spans(at={at:g}), which returned {reprlib.repr(found)}",
            f"it returns starts and ends, two float64 arrays [{len(clients)}], of spans that begin "
            f"before they end, and end after {at:g}",
            "write np.inf as start and end of who never comes back",
        )

    def check(self, seed: int, clients: np.ndarray) -> None:
        """Refuse a federation that this does not fit."""

    @property
    def content_sha256(self) -> str:
        """SHA-256 of what is read from a file; empty where there is none."""
        return ""


class Always(Availability):
    """Nobody is ever offline."""

    is_always = True

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.is_always = vars(cls).get("is_always", cls.spans is Always.spans)

    def spans(self, seed: int, clients: np.ndarray, at: float) -> Spans:
        return np.zeros(len(clients)), np.full(len(clients), np.inf)


class Diurnal(Availability):
    """Clients come and go, more of them at one time of the day than at another.

    The rule is this project's own, and is fitted to nothing. A client that is online goes offline
    at the rate 1 / ``online``. One that is offline at time t comes online at the rate

        (1 + amplitude sin(2 pi (t / day + zone))) / ``offline``

    where zone, in [0, 1), is the client's for the whole run: one of ``zones`` that are as far apart
    as each other, each as likely. At time 0 it is online with probability online / (online +
    offline). The expected share p of a zone's clients that are online therefore follows p' = rate
    (1 - p) - p / online.

    Args:
        online: mean seconds of a time online, above 0.
        offline: mean seconds of a time offline at the mean rate, above 0.
        amplitude: in [0, 1]; 0: every hour is alike.
        zones: number of time zones, at least 1; 1: all clients have their night together.
        day: seconds of a day, above 0.
    """

    def __init__(
        self,
        online: Annotated[float, MEAN] = 4 * 3600.0,
        offline: Annotated[float, MEAN] = 8 * 3600.0,
        amplitude: Annotated[float, within("[0, 1]", "a rate is never below 0", 0.8)] = 0.8,
        zones: Annotated[int, at_least(1)] = 24,
        day: Annotated[float, MEAN] = 86400.0,
    ) -> None:
        self.online, self.offline, self.day = online, offline, day
        self.amplitude, self.zones = amplitude, zones
        self._made: _Renewals | None = None

    def spans(self, seed: int, clients: np.ndarray, at: float) -> Spans:
        made, size = self._made, int(clients.max(initial=-1)) + 1
        if made is None or made.seed != seed or size > len(made.start) or at < made.at:
            made = self._made = _Renewals(
                self, seed, max(size, 0 if made is None else len(made.start))
            )
        made.advance(at, clients)
        return made.start[clients], made.end[clients]

    def span(self, seed: int, client: int, at: float) -> tuple[float, float]:
        made = self._made
        known = made is not None and made.seed == seed and client < len(made.end) and at >= made.at
        if made is not None and known and (end := made.end.item(client)) > at:
            return made.start.item(client), end
        return super().span(seed, client, at)

    def returns(self, zone: np.ndarray, left: np.ndarray, waits: np.ndarray) -> np.ndarray:
        """Return when clients that went offline come back: the integral of their rate from then on
        is ``waits``.

        Args:
            zone: of each client ``[K]``.
            left: seconds at which it went offline ``[K]``.
            waits: exponential variables of mean 1 ``[K]``.
        """
        turn, mean = 2 * math.pi / self.day, waits * self.offline
        phase, swing = turn * left + 2 * math.pi * zone, self.amplitude / turn
        low, high = np.maximum(mean - 2 * swing, 0.0), mean + 2 * swing
        for _ in range(BISECTIONS if self.amplitude else 0):
            middle = (low + high) / 2
            early = middle - swing * (np.cos(phase + turn * middle) - np.cos(phase)) < mean
            low, high = np.where(early, middle, low), np.where(early, high, middle)
        if not self.amplitude:
            return left + mean
        found = (low + high) / 2
        for _ in range(NEWTON_STEPS):
            angle = phase + turn * found
            missing = mean - found + swing * (np.cos(angle) - np.cos(phase))
            slope = np.maximum(1 + self.amplitude * np.sin(angle), LEAST_SLOPE)
            found = np.clip(found + missing / slope, low, high)
        return left + found


class _Renewals:
    """The times online of the clients 0 .. N - 1 that are the first to end after a time, which only
    advances; of some clients those of an earlier time.

    The n-th time online of all clients is drawn from one stream, client by client, so that a
    client's times do not depend on how many clients there are.
    """

    def __init__(self, law: Diurnal, seed: int, clients: int) -> None:
        self.law, self.seed, self.at, self.next_end, self.all_until = law, seed, 0.0, 0.0, 0.0
        first = stream(seed, "clock/diurnal").random((clients, 2))
        self.zone = np.floor(first[:, 0] * law.zones) / law.zones
        self.number = np.zeros(clients, np.int64)
        self._draws: dict[int, np.ndarray] = {}
        draws, there = self._drawn(0), first[:, 1] < law.online / (law.online + law.offline)
        self.start = np.where(there, 0.0, law.returns(self.zone, np.zeros(clients), draws[:, 0]))
        self.end = self.start + law.online * draws[:, 1]

    def advance(self, at: float, asked: np.ndarray) -> None:
        """Go on until every time online of the clients that are asked for ends after ``at``.

        Few are looked at by themselves: of 100 000 clients one comes or goes every few
        milliseconds, so all would have to be looked at for each of them. All go on when many are
        asked for, and from time to time, so that no draws are kept for long.

        Args:
            at: virtual seconds, not before those of an earlier call.
            asked: ids.
        """
        self.at = at
        if at < self.next_end:
            return
        few = len(asked) <= FEW and at < self.all_until
        while (
            past := asked[self.end[asked] <= at] if few else np.flatnonzero(self.end <= at)
        ).size:
            self.number[past] += 1
            for number in np.unique(self.number[past]):
                who = past[self.number[past] == number]
                draws = self._drawn(int(number))[who]
                self.start[who] = self.law.returns(self.zone[who], self.end[who], draws[:, 0])
                self.end[who] = self.start[who] + self.law.online * draws[:, 1]
        if few:
            return
        self.next_end, self.all_until = float(self.end.min(initial=np.inf)), at + self.law.online
        for number in [one for one in self._draws if one < self.number.min(initial=0)]:
            del self._draws[number]

    def _drawn(self, number: int) -> np.ndarray:
        """Return exponential variables ``[N, 2]`` for the waiting and the length of a time
        online."""
        if number not in self._draws:
            draws = stream(self.seed, "clock/diurnal", round=number + 1)
            self._draws[number] = draws.standard_exponential((len(self.number), 2))
        return self._draws[number]
