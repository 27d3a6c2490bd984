"""The one vector of integers that a client masks, and the sums that a server makes of the total."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation.average import Average
from fl_lightning.aggregation.exact_sum import ExactSum, fraction_bits
from fl_lightning.aggregation.server import SummingServer
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.client import Client
from fl_lightning.errors import MisuseError


@dataclass(frozen=True)
class SumForm:
    """What everybody knows of the vectors that are added: the sums in order, with size and unit of
    each.

    Args:
        parts: name, number of values and largest weight of each sum, in order of name.
    """

    parts: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def of(cls, addends: Mapping[str, Addend]) -> SumForm:
        """Return the form of one client's addends, which is that of all clients."""
        return cls(
            tuple(
                (name, len(addend.values), addend.most) for name, addend in sorted(addends.items())
            )
        )

    @classmethod
    def from_json(cls, parts: Iterable[Sequence[Any]]) -> SumForm:
        """Return the form that somebody else named.

        Raises:
            TypeError, ValueError: it is none.
        """
        found = tuple((str(name), int(size), int(most)) for name, size, most in parts)
        names = {name for name, *_ in found}
        if len(names) < len(found) or any(size < 0 or most < 1 for _, size, most in found):
            raise ValueError(f"no vector has the form {found}")
        return cls(found)

    @property
    def length(self) -> int:
        """Integers of a vector: those of all sums, and one weight for each sum."""
        return sum(size for _, size, _ in self.parts) + len(self.parts)

    def vector(self, addends: Mapping[str, Addend], average: Average, cohort: int) -> Tensor:
        """Return what one client adds to all sums and to their total weights, int64 ``[length]``.

        Raises:
            MisuseError: the addends have another form.
        """
        if SumForm.of(addends) != self:
            raise MisuseError(
                f"addends {SumForm.of(addends).parts} where others have {self.parts}",
                "masked vectors are added value by value, so all clients send one form",
                "give the same names, sizes and largest weights, or give the reason in refuses['secure_sum']",
            )
        integers = integers_of(addends, average, cohort)
        weights = torch.tensor([addends[name].weight for name, *_ in self.parts])
        return torch.cat([*(integers[name] for name, *_ in self.parts), weights])

    def sums(self, total: Tensor, average: Average, cohort: int) -> Sums:
        """Return the server's sums of the clients' vectors added up, int64 ``[length]``."""
        sums = Sums(average, cohort)
        for name, most, integers, weight in self._pieces(total):
            sums.add_merged(name, ExactSum.of(integers, cohort), weight, most)
        return sums

    def _pieces(self, total: Tensor) -> Iterator[tuple[str, int, Tensor, int]]:
        """Yield of each sum its name, largest weight of a client, integers and total weight."""
        *pieces, weights = total.split([*(size for _, size, _ in self.parts), len(self.parts)])
        for (name, _, most), integers, weight in zip(
            self.parts, pieces, weights.tolist(), strict=True
        ):
            yield name, most, integers, weight

    def impossible(
        self,
        total: Tensor,
        method: SummingServer,
        clients: Sequence[Client],
        largest_sum: Callable[[str, int], float] | None = None,
    ) -> str:
        """Return why a sum is none that clients can make which keep to the rules; empty where it is
        one.

        A client that adds integers at will, or whose masks do not cancel, makes such a sum with
        near certainty. One that stays within what its round could make is not seen.

        Args:
            total: int64 ``[length]``.
            method: with the server's state that the round started from.
            clients: those whose vectors were added up.
            largest_sum: the largest magnitude of a value of a sum, by its name, over so many
                clients that weigh 1; None: values are within ``method.largest_value`` times the
                weight of their client.
        """
        count, unit = len(clients), 2.0 ** -fraction_bits(method.cohort)
        examples = {client.id: method.client_weights.of(client) for client in clients}
        for name, most, integers, weight in self._pieces(total):
            least = largest = count
            if largest_sum is None:
                each = [method.weight_bounds(name, most, id, n) for id, n in examples.items()]
                least, largest = sum(low for low, _ in each), sum(high for _, high in each)
            if not least <= weight <= largest:
                weigh = f"{count} clients weigh {least} to {largest} together"
                return f"in {name!r} {weigh}, and it says {weight}"
            bound = (
                largest_sum(name, count)
                if largest_sum
                else weight / most * method.largest_value(name)
            )
            found = max(map(abs, map(int, torch.aminmax(integers)))) if len(integers) else 0
            if found > bound / unit + count / 2:  # rounding takes half a unit of each client
                return (
                    f"in {name!r} values of {count} clients add up to {bound:.4g} at most, and one is "
                    f"{found * unit:.4g} away from 0"
                )
        return ""


def integers_of(addends: Mapping[str, Addend], average: Average, cohort: int) -> dict[str, Tensor]:
    """Return the integers that one client adds to each sum, before they are masked: q =
    round_half_even(w x 2^F), int64 ``[P]`` by name.

    Added up over clients, in any order, they are the integers of :class:`Sums` of the same addends.
    They leave room for ``cohort`` clients: no sum wraps around.

    Args:
        addends: what the client's upload adds, by name.
        average: the server's rule, which must be a weighted mean; a client bounds its own vector by
            it.
        cohort: most clients that may be added, which fixes F.

    Raises:
        MisuseError: the average is no weighted mean, or values or weights are out of range.
    """
    integers = {}
    for name, addend in addends.items():
        vector = addend.values
        if addend.start is not None:
            if not average.is_sum:
                raise MisuseError(
                    f"integers of a {type(average).__name__}",
                    "it needs the single vectors",
                    "average with WeightedMean or NormClipping",
                )
            vector = average.bounded(vector, addend.start)
        exact = ExactSum(len(vector), cohort)
        exact.add([vector], [addend.weight / addend.most])
        integers[name] = exact.integers
    return integers
