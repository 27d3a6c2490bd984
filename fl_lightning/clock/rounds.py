"""Rounds: how many clients are invited, which of those that return are used, and when the round
ends.

Whatever returns at the same time is in the order of the clients' ids, and never in that of
processes.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fl_lightning.config.constraints import at_least, within
from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import require


@dataclass(frozen=True)
class Ending:
    """How a round ends.

    Args:
        seconds: its length.
        used: ids of the clients whose uploads count.
        late: how many uploads came too late to be used.
    """

    seconds: float
    used: frozenset[int]
    late: int = 0


class Rounds(Recorded, ABC):
    """The form of a round."""

    settings_shown = ("--trainer.rounds.{name} {value}",) * 2
    goes_by_clock: bool = False
    """Whether virtual time decides whose uploads are used, and when."""
    has_versions: bool = False
    """Whether a round is a version of the model, and clients start at any time."""
    fewest: int = 1  # uploads that a round needs

    def invited(self, cohort: int) -> int:
        """Return how many clients are asked where ``cohort`` are wanted."""
        return cohort

    def exchanges(self, cohort: int) -> int:
        """Return with how many clients a round exchanges messages, where there are enough."""
        return self.invited(cohort)

    def patience(self, cohort: int) -> tuple[float, float]:
        """Return the seconds after which, and the number of uploads at which, a round on real
        machines is over, whoever is still at work.

        Args:
            cohort: how many are wanted.
        """
        return math.inf, math.inf

    def check(self, context: Any) -> None:
        """Refuse a run that cannot have such rounds.

        Args:
            context: the federation.
        """

    def end(
        self,
        answered: Mapping[int, float],
        valid: Collection[int],
        *,
        cohort: int,
        began: int,
        lot: Callable[[int], float] = float,
    ) -> Ending:
        """Return how a round ends.

        Args:
            answered: seconds after its start at which each upload is there, by client id.
            valid: ids of those of them that are not rejected.
            cohort: how many are wanted.
            began: how many clients were sent the broadcast, those included whose upload is lost.
            lot: draws a client's number of the round, for rounds that break ties by it.
        """
        return Ending(max(answered.values(), default=0.0), frozenset(valid))


class Synchronous(Rounds):
    """The server waits for everybody that returns."""


class OverSelection(Rounds):
    """More clients are asked than are wanted, and the first that return are used (Bonawitz et al.,
    SysML 2019). What the others send is wasted, and what they keep stays as it was.

    Args:
        factor: clients that are asked by clients that are wanted, rounded up, at least 1; 1 is
            :class:`Synchronous`.
        ties: of uploads that return at the same time the first are those of the smallest ``id``, on
            equal devices in every round; or it is ``drawn``, anew in every round.
    """

    goes_by_clock = True

    def __init__(
        self,
        factor: Annotated[
            float,
            within(
                "[1, 1e6]",
                "no fewer are asked than are wanted, and not a million times as many",
                1.3,
            ),
        ] = 1.3,
        ties: Literal["id", "drawn"] = "id",
    ) -> None:
        self.factor, self.ties = factor, ties

    def invited(self, cohort: int) -> int:
        return math.ceil(self.factor * cohort - 1e-9)

    def patience(self, cohort: int) -> tuple[float, float]:
        return math.inf, cohort

    def end(
        self,
        answered: Mapping[int, float],
        valid: Collection[int],
        *,
        cohort: int,
        began: int,
        lot: Callable[[int], float] = float,
    ) -> Ending:
        rank = lot if self.ties == "drawn" else float
        first = sorted(valid, key=lambda client: (answered[client], rank(client), client))[:cohort]
        if len(first) < cohort:
            return super().end(answered, valid, cohort=cohort, began=began)
        return Ending(answered[first[-1]], frozenset(first), len(valid) - cohort)


class Deadline(Rounds):
    """Uploads that return after the deadline are not used. The round ends with the last upload, or
    at the deadline where one is late or lost. One in which too few return changes nothing and lasts
    until the deadline.

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

    @property
    def fewest(self) -> int:  # type: ignore[override]
        return self.least

    def patience(self, cohort: int) -> tuple[float, float]:
        return self.seconds, math.inf

    def check(self, context: Any) -> None:
        """Refuse rounds that are void whoever returns."""
        require(
            self.least <= context.invited,
            f"--trainer.rounds.least {self.least}",
            f"{context.invited} clients are asked in a round",
            f"write {context.invited} or less",
        )

    def end(
        self,
        answered: Mapping[int, float],
        valid: Collection[int],
        *,
        cohort: int,
        began: int,
        lot: Callable[[int], float] = float,
    ) -> Ending:
        there = {client: at for client, at in answered.items() if at <= self.seconds}
        used = frozenset(there) & frozenset(valid)
        late = sum(answered[one] > self.seconds for one in valid)
        waits = len(there) < began or len(used) < self.least
        last = super().end(there, used, cohort=cohort, began=began).seconds
        length = self.seconds if waits and math.isfinite(self.seconds) else last
        return Ending(length, used if len(used) >= self.least else frozenset(), late)
