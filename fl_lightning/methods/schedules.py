"""Values that change over the rounds."""

from __future__ import annotations

import math
from typing import Annotated

from fl_lightning.config.constraints import within
from fl_lightning.config.recorded import Recorded

Rounds = Annotated[
    int,
    within(
        "[1, inf)",
        "it takes at least 1",
        "write rounds: 10",
        given="a schedule over {value} rounds",
    ),
]


class LinearSchedule(Recorded):
    """From ``start`` to ``end`` in equal steps over the first ``rounds`` rounds, then ``end``.

    Args:
        start: value in round 1.
        end: value from round ``rounds`` on.
        rounds: at least 1.

    >>> [LinearSchedule(0.0, 1.0, rounds=3)(r) for r in (1, 2, 3, 9)]
    [0.0, 0.5, 1.0, 1.0]
    """

    def __init__(self, start: float, end: float, rounds: Rounds) -> None:
        self.start, self.end, self.rounds = start, end, rounds

    def __repr__(self) -> str:
        return f"LinearSchedule({self.start}, {self.end}, {self.rounds})"

    def __call__(self, round: int) -> float:
        return self.start + (self.end - self.start) * _progress(round, self.rounds)


class CosineSchedule(Recorded):
    """From ``start`` to ``end`` along half a cosine over the first ``rounds`` rounds, then ``end``.

    Args:
        start: value in round 1.
        end: value from round ``rounds`` on.
        rounds: at least 1.
    """

    def __init__(self, start: float, end: float, rounds: Rounds) -> None:
        self.start, self.end, self.rounds = start, end, rounds

    def __repr__(self) -> str:
        return f"CosineSchedule({self.start}, {self.end}, {self.rounds})"

    def __call__(self, round: int) -> float:
        return (
            self.end
            + (self.start - self.end) * (1 + math.cos(math.pi * _progress(round, self.rounds))) / 2
        )


def at(value: float | LinearSchedule | CosineSchedule, round: int) -> float:
    """Return a number, or a schedule's value in this round."""
    return float(value) if isinstance(value, (int, float)) else value(round)


def ends(value: float | LinearSchedule | CosineSchedule) -> tuple[float, float]:
    """Return the values between which it stays: schedules are monotone."""
    if isinstance(value, (int, float)):
        return (float(value), float(value))
    return (value.start, value.end)


def _progress(round: int, rounds: int) -> float:
    return min(1.0, (round - 1) / (rounds - 1)) if rounds > 1 else 1.0
