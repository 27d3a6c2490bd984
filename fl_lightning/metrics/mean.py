"""A mean that can go on growing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean as its total and its weight, so that means of parts add up to the mean of the
    whole.

    >>> (Mean(3.0, 2) + Mean(1.0, 2)).value
    1.0

    Args:
        total: sum of the values, each times its weight.
        weight: sum of the weights, such as a number of examples.
    """

    total: float = 0.0
    weight: float = 0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        """The mean.

        Raises:
            ZeroDivisionError: nothing was counted.
        """
        return self.total / self.weight
