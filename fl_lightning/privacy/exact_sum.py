"""Sums of fixed-point integers. They do not depend on who added what in which order, so that one process,
many processes and clients behind masks come to the same result bit for bit.

A value x of a client with weight w in [0, 1] enters as the integer

    q = round_half_even(w x 2^F),     F = 62 - 20 - ceil(log2 cohort)

With |x| < 2^20 and at most ``cohort`` clients no sum leaves the range of int64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def exact_mean(vectors: Sequence[Tensor], weights: Sequence[float], total: float, cohort: int) -> Tensor:
    """Return sum w_k x_k / total in one go, float32 ``[P]``: the mean of an :class:`ExactSum` of the same
    vectors, bit for bit.

    Args:
        vectors, weights, cohort: as for :class:`ExactSum`.
        total: what the sum is divided by, the sum of w_k.

    Raises:
        MisuseError: as :meth:`ExactSum.add`.
    """
    mean = torch.empty_like(vectors[0], dtype=torch.float32)
    for block, integers in _block_sums(vectors, weights, cohort):
        mean[block] = integers.to(torch.float64).mul_(2.0 ** -fraction_bits(cohort)).div_(total)
    return mean


class ExactSum:
    """The sum over clients of w_k x_k for one vector of ``size`` values, added up in parts.

    Each client is rounded once, by at most half a unit of 2^-F, so the sum over K clients is off by at most
    K / 2 units; beyond that float64 rounds each product w x by 2^-53 of itself.

    Args:
        size: P, values of a client's vector.
        cohort: most clients that may be added.
    """

    def __init__(self, size: int, cohort: int) -> None:
        self.cohort = cohort
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
        _check_count(self.count, self.cohort)
        if any(vector.shape != self.integers.shape for vector in vectors):
            raise _shape_error([self.integers, *vectors])
        for block, integers in _block_sums(vectors, weights, self.cohort):
            self.integers[block] += integers.to(torch.int64)

    def merge(self, other: ExactSum) -> None:
        """Add what somebody else added up, for the same cohort.

        Raises:
            MisuseError: more clients than ``cohort`` together.
        """
        self.count += other.count
        _check_count(self.count, self.cohort)
        self.integers += other.integers

    def total(self) -> Tensor:
        """Return the sum, float64 ``[size]``."""
        return self.integers.to(torch.float64).mul_(2.0 ** -fraction_bits(self.cohort))

    def mean(self, total: float) -> Tensor:
        """Return the sum divided by ``total``, the sum of w_k; float32 ``[size]``."""
        return self.total().div_(total).to(torch.float32)


def _block_sums(
    vectors: Sequence[Tensor], weights: Sequence[float], cohort: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the sums of some columns at a time: integers, in float64 where it holds them, else in int64."""
    sizes = _checked_sizes(vectors, weights, cohort)
    scales = [weight * 2.0 ** fraction_bits(cohort) for weight in weights]
    bound = sum(scale * size + 1 for scale, size in zip(scales, sizes, strict=True))
    kind = torch.float64 if bound < FLOAT64_INTEGERS else torch.int64
    size = len(vectors[0])
    rounded = torch.empty(min(size, BLOCK_VALUES), dtype=torch.float64)
    for begin in range(0, size, BLOCK_VALUES):
        block = slice(begin, begin + BLOCK_VALUES)
        here = rounded[: size - begin]
        total = torch.zeros(len(here), dtype=kind)
        for vector, scale in zip(vectors, scales, strict=True):
            here.copy_(vector[block]).mul_(scale).round_()
            total.add_(here if kind is torch.float64 else here.to(torch.int64))
        yield block, total


def _checked_sizes(vectors: Sequence[Tensor], weights: Sequence[float], cohort: int) -> list[float]:
    """Return the largest magnitude of each vector, once all is in range."""
    _check_count(len(vectors), cohort)
    if any(vector.shape != vectors[0].shape for vector in vectors):
        raise _shape_error(vectors)
    if not all(0 <= weight <= 1 for weight in weights):
        raise MisuseError(
            f"weights {min(weights):g} to {max(weights):g}",
            "they are in [0, 1]",
            "divide them by the largest that there can be",
        )
    sizes = [largest(vector) for vector in vectors]
    for size in sizes:
        if not size < MAX_MAGNITUDE:
            raise MisuseError(
                f"values up to {size:g}", f"they are below {MAX_MAGNITUDE:g}", "refuse such an upload"
            )
    return sizes


def _check_count(count: int, cohort: int) -> None:
    if count > cohort:
        raise MisuseError(
            f"{count} clients in a sum over {cohort}",
            "the room for carries is fixed before",
            "give the size of the cohort",
        )


def _shape_error(vectors: Sequence[Tensor]) -> MisuseError:
    return MisuseError(
        f"vectors of shapes {sorted({tuple(v.shape) for v in vectors})}",
        "a sum is taken of one shape",
        "pad or split them",
    )


def largest(vector: Tensor) -> float:
    """Return the largest magnitude in a vector; NaN where it holds one, 0 where it is empty."""
    if not vector.numel():
        return 0.0
    least, most = torch.aminmax(vector)
    return max(-float(least), float(most)) if bool(least == least) else float("nan")
