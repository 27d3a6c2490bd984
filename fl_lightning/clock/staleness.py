"""How much an update counts that started from an earlier version of the model: Xie et al.,
FedAsync, 2019."""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Real
from typing import Annotated

from fl_lightning.config.constraints import at_least, within
from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import MisuseError

EXPONENT = within("[0, 30]", "an exponent is 0 to 30, beyond which nothing stale counts", 0.5)
SLOPE = within("[0, 1e9]", "a slope is 0 to 10^9, beyond which nothing stale counts", 10.0)


class Staleness(Recorded, ABC):
    """A weight in (0, 1] by the number of versions that the server has made since a client's
    download."""

    settings_shown = ("--trainer.rounds.staleness.{name} {value}",) * 2

    @abstractmethod
    def weight(self, versions: int) -> float:
        """Return the weight; 1 where ``versions`` is 0."""

    def checked(self, versions: int) -> float:
        """Return the weight.

        Raises:
            MisuseError: it is none.
        """
        weight = self.weight(versions)
        if not (isinstance(weight, Real) and (0 < weight <= 1 if versions else weight == 1)):
            raise MisuseError(
                f"{type(self).__name__}.weight({versions}), which returned {weight!r}",
                "a weight lies in (0, 1], and is 1 for an update that is not stale",
                "return such a number; max_staleness leaves updates out",
            )
        return float(weight)


class Constant(Staleness):
    """Every update counts alike."""

    def weight(self, versions: int) -> float:
        return 1.0


class Polynomial(Staleness):
    """(1 + d)^-exponent.

    Args:
        exponent: 0 to 30; 0.5 in FedAsync and in FedBuff (Nguyen et al., AISTATS 2022).

    >>> Polynomial(0.5).weight(0), Polynomial(0.5).weight(3)
    (1.0, 0.5)
    """

    def __init__(self, exponent: Annotated[float, EXPONENT] = 0.5) -> None:
        self.exponent = exponent

    def weight(self, versions: int) -> float:
        return float((1 + versions) ** -self.exponent)


class Hinge(Staleness):
    """1 up to ``free`` versions, and 1 / (1 + slope (d - free)) beyond.

    Args:
        slope: 0 to 10^9.
        free: versions that cost nothing, 0 or more.

    >>> Hinge().weight(4), Hinge().weight(5) == 1 / 11
    (1.0, True)
    """

    def __init__(
        self, slope: Annotated[float, SLOPE] = 10.0, free: Annotated[int, at_least(0)] = 4
    ) -> None:
        self.slope, self.free = slope, free

    def weight(self, versions: int) -> float:
        return 1.0 if versions <= self.free else 1 / (1 + self.slope * (versions - self.free))
