"""What uploads add to the server's sums, and the means that the server makes of them.

A method whose server needs nothing but sums says what one upload adds (``Method.addends``) and what
the means become (``Method.next_state``). The sums are of integers
(:mod:`fl_lightning.aggregation.exact_sum`), so they do not depend on the order of uploads.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fl_lightning.aggregation.average import Average, GuidedAverage
from fl_lightning.aggregation.averages import RefinedMean, guided_average
from fl_lightning.aggregation.exact_sum import ExactSum, exact_mean
from fl_lightning.distributed.collectives import gather_bytes, sum_over_ranks, world_size
from fl_lightning.errors import MisuseError


@dataclass(frozen=True, slots=True)
class Addend:
    """What one upload adds to one sum: w x, with w = weight / most.

    Args:
        values: x, a vector ``[P]`` of values of less than 2^20.
        weight: an integer from 1 to ``most``, such as n_k.
        most: largest weight that a client may have, known before anybody has answered.
        start: what the round started from, ``[P]``, where the server's ``average`` decides what
            becomes of the clients' vectors; None where it is always the weighted mean.
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
        guides: the updates of trained values that ``average`` goes by, by the name of the sum.
    """

    empty: Callable[[int, int], ExactSum] = ExactSum
    """Makes a sum of so many values over so many clients at most, before any is added."""
    deviation: float = 0.0
    """Standard deviation of the noise on each value of a sum; 0 where sums are exact."""

    def __init__(
        self, average: Average, cohort: int, guides: Mapping[str, Tensor] | None = None
    ) -> None:
        self.average, self.cohort, self.guides = average, cohort, guides or {}
        self._parts: dict[str, Part] = {}
        self._averaged: dict[str, Tensor] = {}

    def add(self, name: str, addends: Sequence[Addend]) -> None:
        """Add what several uploads add to one sum. It can be called again with those of others,
        where the server's ``average`` is a weighted mean.

        Raises:
            MisuseError: the weights are in different units.
        """
        first, before = addends[0], self._parts.get(name)
        if any(addend.most != (before or first).most for addend in addends):
            raise MisuseError(
                f"addends {name!r} with different largest weights",
                "the weights of one sum have one unit",
                "give all the same most",
            )
        weights = [addend.weight for addend in addends]
        vectors = [addend.values for addend in addends]
        starts = [addend.start for addend in addends if addend.start is not None]
        if starts:
            if not self.average.is_sum:
                shares = [weight / sum(weights) for weight in weights]
                if isinstance(self.average, RefinedMean):
                    mean = Part(vectors, weights, first.most).mean(self.cohort)
                    found = self.average.refined(mean, vectors, shares)
                    self._averaged[name] = self.average.checked(found, mean)
                    return
                self._averaged[name] = self._average(name, vectors, shares, starts[0])
                return
            vectors = [self.average.bounded(*one) for one in zip(vectors, starts, strict=True)]
        part = Part(vectors, weights, first.most)
        self._parts[name] = part if before is None else self._plus(before, part)

    def _average(
        self, name: str, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor
    ) -> Tensor:
        average, guide = self.average, self.guides.get(name)
        if not (isinstance(average, GuidedAverage) and average.guide):
            return average.of(vectors, shares, start)
        if guide is None:
            raise MisuseError(
                f"addends {name!r} with a start, which starts() does not have",
                f"{type(average).__name__} goes by an update of each",
                "override starts, as addends is",
            )
        return guided_average(average, vectors, shares, start, guide)

    def add_merged(self, name: str, total: ExactSum, weight: int, most: int) -> None:
        """Add one sum over clients that was added up elsewhere.

        Args:
            name: of the sum.
            total: sum w x over the clients; it is used from here on.
            weight: the sum of their weights, in units of 1 / ``most``.
            most: largest weight of one client.
        """
        part, before = Part([], [weight], most, total), self._parts.get(name)
        self._parts[name] = part if before is None else self._plus(before, part)

    def merged(self) -> Iterator[tuple[str, ExactSum, int, int]]:
        """Yield what :meth:`add_merged` takes of each sum."""
        self.add_now()
        for name, part in self._parts.items():
            if part.merged is not None:
                yield name, part.merged, sum(part.weights), part.most

    def replace(self, name: str, mean: Tensor) -> None:
        """Take another vector, float32 ``[P]``, for the mean of a sum."""
        self._averaged[name] = mean

    def add_now(self) -> None:
        """Add up what has been given, where several readers follow: each would add it up anew."""
        for name, part in self._parts.items():
            if part.merged is None:
                self._parts[name] = Part([], [sum(part.weights)], part.most, self._exact_sum(part))

    def _exact_sum(self, part: Part) -> ExactSum:
        if part.merged is not None:
            return part.merged
        total = self.empty(part.size, self.cohort)
        total.add(part.vectors, part.shares)
        return total

    def _plus(self, part: Part, other: Part) -> Part:
        """Return a sum with that of other clients, added up; neither is of use then."""
        total = self._exact_sum(part)
        if other.merged is None:
            total.add(other.vectors, other.shares)
        else:
            total.merge(other.merged)
        return Part([], [*part.weights, *other.weights], part.most, total)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the sums."""
        yield from (*self._parts, *self._averaged)

    def mean(self, name: str) -> Tensor:
        """Return sum w x / sum w over the clients, or what the server's ``average`` makes of them;
        float32 ``[P]``.

        Raises:
            MisuseError: vectors of different sizes, or values out of range.
        """
        if name in self._averaged:
            return self._averaged[name]
        return self._parts[name].mean(self.cohort)

    def total(self, name: str) -> Tensor:
        """Return sum w x over the clients; float64 ``[P]``.

        Raises:
            MisuseError: as :meth:`mean`.
        """
        return self._exact_sum(self._parts[name]).total()

    def merge_ranks(self) -> None:
        """Add what the other processes of the run added to sums of the same names.

        Each process sends and receives about twice 8 bytes a value, however many clients there are.

        Raises:
            RankLost: a process died or did not answer in time.
        """
        if world_size() == 1:
            return
        forms = {
            name: [part.size, part.most, sum(part.weights)] for name, part in self._parts.items()
        }
        of_ranks = [json.loads(form) for form in gather_bytes(json.dumps(forms).encode())]
        for name in sorted({name for of_rank in of_ranks for name in of_rank}):
            found = [of_rank[name] for of_rank in of_ranks if name in of_rank]
            size, most = found[0][:2]
            part = self._parts.get(name) or Part([], [], most, ExactSum(size, self.cohort))
            total = self._exact_sum(part)
            total.integers = sum_over_ranks(total.integers)
            self._parts[name] = Part([], [sum(weight for *_, weight in found)], most, total)


@dataclass(frozen=True, slots=True)
class Part:
    """One sum: what this process has of it, and what all have once they are merged."""

    vectors: list[Tensor]
    weights: list[int]
    most: int
    merged: ExactSum | None = None

    @property
    def size(self) -> int:
        return len(self.vectors[0] if self.merged is None else self.merged.integers)

    @property
    def shares(self) -> list[float]:
        return [weight / self.most for weight in self.weights]

    @property
    def total_weight(self) -> float:
        return sum(self.weights) / self.most

    def mean(self, cohort: int) -> Tensor:
        if self.merged is not None:
            return self.merged.mean(self.total_weight)
        return exact_mean(self.vectors, self.shares, self.total_weight, cohort)


def sums_of(
    addends: Sequence[Mapping[str, Addend]],
    average: Average,
    cohort: int,
    guides: Mapping[str, Tensor] | None = None,
) -> Sums:
    """Return the sums of what uploads add."""
    sums = Sums(average, cohort, guides)
    add_all(sums, addends)
    return sums


def add_all(sums: Sums, addends: Sequence[Mapping[str, Addend]]) -> None:
    """Add what uploads add, by name of the sum."""
    by_name = defaultdict(list)
    for each in addends:
        for name, addend in each.items():
            by_name[name].append(addend)
    for name, of_one in by_name.items():
        sums.add(name, of_one)
