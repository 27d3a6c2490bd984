"""What uploads add to the server's sums, and the means that the server makes of them.

A method whose server needs nothing but sums says what one upload adds (``Method.addends``) and what the
means become (``Method.next_state``). The sums are of integers (:mod:`fl_lightning.privacy.exact_sum`), so
they do not depend on the order of uploads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fl_lightning.errors import MisuseError
from fl_lightning.methods.averaging import Average
from fl_lightning.privacy import ExactSum, exact_mean


@dataclass(frozen=True, slots=True)
class Addend:
    """What one upload adds to one sum: w x, with w = weight / most.

    Args:
        values: x, a vector ``[P]`` of values of less than 2^20.
        weight: an integer from 1 to ``most``, such as n_k.
        most: largest weight that a client may have, known before anybody has answered.
        start: what the round started from, ``[P]``, where the server's ``average`` decides what becomes of
            the clients' vectors; None where it is always the weighted mean.
    """

    values: Tensor
    weight: int = 1
    most: int = 1
    start: Tensor | None = None


class Sums:
    """Sums by name over the clients of a round.

    Args:
        average: the server's rule for addends that have a ``start``.
        cohort: most clients that may be added.
    """

    def __init__(self, average: Average, cohort: int) -> None:
        self.average, self.cohort = average, cohort
        self._vectors: dict[str, list[Tensor]] = {}
        self._weights: dict[str, list[int]] = {}
        self._most: dict[str, int] = {}
        self._averaged: dict[str, Tensor] = {}

    def add(self, name: str, addends: Sequence[Addend]) -> None:
        """Add what several uploads add to one sum.

        Raises:
            MisuseError: the weights are in different units.
        """
        first = addends[0]
        if any(addend.most != first.most for addend in addends):
            raise MisuseError(
                f"addends {name!r} with different largest weights",
                "the weights of one sum have one unit",
                "give all the same most",
            )
        weights = [addend.weight for addend in addends]
        vectors = [addend.values for addend in addends]
        if first.start is not None:
            if not self.average.is_sum:
                shares = [weight / sum(weights) for weight in weights]
                self._averaged[name] = self.average(vectors, shares, first.start)
                return
            vectors = [self.average.bounded(vector, first.start) for vector in vectors]
        self._vectors[name], self._weights[name], self._most[name] = vectors, weights, first.most

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the sums."""
        yield from (*self._vectors, *self._averaged)

    def mean(self, name: str) -> Tensor:
        """Return sum w x / sum w over the clients, or what the server's ``average`` makes of them; float32
        ``[P]``.

        Raises:
            MisuseError: vectors of different sizes, or values out of range.
        """
        if name in self._averaged:
            return self._averaged[name]
        weights, most = self._weights[name], self._most[name]
        shares = [weight / most for weight in weights]
        return exact_mean(self._vectors[name], shares, sum(weights) / most, self.cohort)

    def total(self, name: str) -> Tensor:
        """Return sum w x over the clients; float64 ``[P]``.

        Raises:
            MisuseError: as :meth:`mean`.
        """
        vectors, weights = self._vectors[name], self._weights[name]
        exact = ExactSum(len(vectors[0]), self.cohort)
        exact.add(vectors, [weight / self._most[name] for weight in weights])
        return exact.total()


def sums_of(addends: Sequence[Mapping[str, Addend]], average: Average, cohort: int) -> Sums:
    """Return the sums of what uploads add."""
    sums, by_name = Sums(average, cohort), defaultdict(list)
    for each in addends:
        for name, addend in each.items():
            by_name[name].append(addend)
    for name, of_one in by_name.items():
        sums.add(name, of_one)
    return sums
