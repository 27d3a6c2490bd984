"""Sums of fixed-point integers. They do not depend on who added what in which order, so that one process,
many processes and clients behind masks come to the same result bit for bit.

A value x of a client with weight w in [0, 1] enters as the integer

    q = round_half_even(w x 2^F),     F = 62 - 20 - ceil(log2 cohort)

With |x| < 2^20 and at most ``cohort`` clients no sum leaves the range of int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.errors import MisuseError

MAX_MAGNITUDE = 2.0**20
"""No weight, statistic or step of a network that trains is as large. One such value in an average would ruin
it."""

SUM_BITS, MAGNITUDE_BITS = 62, 20
FLOAT64_INTEGERS = 2.0**53
"""Integers up to here, and their sums, are exact in float64."""

BLOCK_VALUES = 2**16
"""Values that are added up at once: half a megabyte in float64, which stays in a core's cache from client to
client."""


def fraction_bits(cohort: int) -> int:
    """Return F, the bits behind the binary point of a sum over at most ``cohort`` clients.

    >>> fraction_bits(1000), fraction_bits(1)
    (32, 42)
    """
    return SUM_BITS - MAGNITUDE_BITS - max(0, cohort - 1).bit_length()


class ExactSum:
    """The sum over clients of w_k x_k for one vector of ``size`` values.

    Each client is rounded once, by at most half a unit of 2^-F, so the sum over K clients is off by at most
    K / 2 units.

    Args:
        size: P, values of a client's vector.
        cohort: most clients that may be added.
    """

    def __init__(self, size: int, cohort: int) -> None:
        self.cohort, self.bits = cohort, fraction_bits(cohort)
        self.integers = torch.zeros(size, dtype=torch.int64)
        self.count = 0

    def add(self, vectors: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Add one vector of each of several clients.

        Args:
            vectors: x_k, ``[size]``, each with values of less than 2^20.
            weights: w_k in [0, 1].

        Raises:
            MisuseError: more clients than ``cohort``, another size, or a value or weight out of range.
        """
        self.count += len(vectors)
        if self.count > self.cohort:
            raise MisuseError(
                f"{self.count} clients in a sum over {self.cohort}",
                "the room for carries is fixed before",
                "give the size of the cohort",
            )
        if any(vector.shape != self.integers.shape for vector in vectors):
            raise MisuseError(
                f"vectors of shapes {sorted({tuple(v.shape) for v in vectors})} in a sum of "
                f"{list(self.integers.shape)}",
                "a sum is taken of one shape",
                "pad or split them",
            )
        sizes = [largest(vector) for vector in vectors]
        if not all(size < MAX_MAGNITUDE for size in sizes):
            raise MisuseError(
                f"values up to {max(sizes):g}", f"they are below {MAX_MAGNITUDE:g}", "refuse such an upload"
            )
        if not all(0 <= weight <= 1 for weight in weights):
            raise MisuseError(
                f"weights {min(weights):g} to {max(weights):g}",
                "they are in [0, 1]",
                "divide them by the largest that there can be",
            )
        scales = [weight * 2.0**self.bits for weight in weights]
        bound = sum(scale * size + 1 for scale, size in zip(scales, sizes, strict=True))
        for begin in range(0, len(self.integers), BLOCK_VALUES):
            block = slice(begin, begin + BLOCK_VALUES)
            pieces = [vector[block] for vector in vectors]
            self.integers[block] += _sum_of_floats(pieces, scales, exact=bound < FLOAT64_INTEGERS)

    def merge(self, other: ExactSum) -> None:
        """Add what somebody else added up, for the same cohort."""
        self.count += other.count
        self.integers += other.integers

    def total(self) -> Tensor:
        """Return the sum, float64 ``[size]``."""
        return self.integers.to(torch.float64).mul_(2.0**-self.bits)

    def mean(self, weight: float) -> Tensor:
        """Return the sum divided by ``weight``, the sum of w_k; float32 ``[size]``."""
        return self.total().div_(weight).to(torch.float32)


def _sum_of_floats(pieces: Sequence[Tensor], scales: Sequence[float], *, exact: bool) -> Tensor:
    """Return the sum of round_half_even(scale x), int64.

    Args:
        exact: no sum leaves the integers of float64, which are added up faster.
    """
    rounded = torch.empty(len(pieces[0]), dtype=torch.float64)
    total = torch.zeros(len(rounded), dtype=torch.float64 if exact else torch.int64)
    for piece, scale in zip(pieces, scales, strict=True):
        rounded.copy_(piece).mul_(scale).round_()
        total.add_(rounded if exact else rounded.to(torch.int64))
    return total.to(torch.int64)


def largest(vector: Tensor) -> float:
    """Return the largest magnitude in a vector; NaN where it holds one, 0 where it is empty."""
    if not vector.numel():
        return 0.0
    least, most = torch.aminmax(vector)
    return max(-float(least), float(most)) if bool(least == least) else float("nan")
