"""Rounds: how many clients are invited, which of those that return are used, and when the round ends.

Whatever returns at the same time is in the order of the clients' ids, and never in that of processes.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fl_lightning.config.constraints import at_least, within
from fl_lightning.config.recorded import Recorded


@dataclass(frozen=True)
class Ending:
    """How a round ends.

    Args:
        seconds: its length.
        used: ids of the clients whose uploads count.
    """

    seconds: float
    used: frozenset[int]


class Rounds(Recorded, ABC):
    """The form of a round."""

    settings_shown = ("--trainer.rounds.{name} {value}",) * 2
    goes_by_clock: bool = False
    """Whether virtual time decides whose uploads are used, and when."""

    def invited(self, cohort: int) -> int:
        """Return how many clients are asked where ``cohort`` are wanted."""
        return cohort

    def end(self, returned: Mapping[int, float], *, cohort: int, began: int) -> Ending:
        """Return how a round ends.

        Args:
            returned: seconds after its start at which each upload that counts is there, by client id.
            cohort: how many are wanted.
            began: how many clients were sent the broadcast, those included whose upload is lost.
        """
        return Ending(max(returned.values(), default=0.0), frozenset(returned))


class Synchronous(Rounds):
    """The server waits for everybody that returns."""


class OverSelection(Rounds):
    """More clients are asked than are wanted, and the first that return are used (Bonawitz et al., SysML
    2019). What the others send is wasted, and what they keep stays as it was.

    Args:
        factor: clients that are asked by clients that are wanted, rounded up, at least 1; 1 is
            :class:`Synchronous`.
    """

    goes_by_clock = True

    def __init__(
        self, factor: Annotated[float, within("[1, inf)", "no fewer are asked than are wanted", 1.3)] = 1.3
    ) -> None:
        self.factor = factor

    def invited(self, cohort: int) -> int:
        return math.ceil(self.factor * cohort - 1e-9)

    def end(self, returned: Mapping[int, float], *, cohort: int, began: int) -> Ending:
        first = sorted(returned, key=lambda client: (returned[client], client))[:cohort]
        return super().end({client: returned[client] for client in first}, cohort=cohort, began=began)


class Deadline(Rounds):
    """Uploads that return after the deadline are not used. The round ends with the last upload, or at the
    deadline where one is late or lost. One in which too few return changes nothing and lasts until the
    deadline.

    Args:
        seconds: after the start of the round, above 0; infinity is :class:`Synchronous`.
        least: fewest uploads that make a round, at least 1.
    """

    goes_by_clock = True

    def __init__(
        self,
        seconds: Annotated[float, within("(0, inf]", "a deadline is above 0 seconds", 60.0)],
        least: Annotated[int, at_least(1)] = 1,
    ) -> None:
        self.seconds, self.least = seconds, least

    def end(self, returned: Mapping[int, float], *, cohort: int, began: int) -> Ending:
        used = {client: at for client, at in returned.items() if at <= self.seconds}
        last = super().end(used, cohort=cohort, began=began)
        waits = len(used) < max(began, self.least) and math.isfinite(self.seconds)
        enough = len(used) >= self.least
        return Ending(self.seconds if waits else last.seconds, last.used if enough else frozenset())
