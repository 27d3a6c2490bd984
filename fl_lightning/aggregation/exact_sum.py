"""Sums of fixed-point integers. They do not depend on who added what in which order, so that one
process, many processes and clients behind masks come to the same result bit for bit.

A value x of a client with weight w in [0, 1] enters as the integer

    q = round_half_even(w x 2^F),     F = 62 - 20 - ceil(log2 cohort)

With |x| < 2^20 and at most ``cohort`` clients no sum leaves the range of int64.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch
from torch import Tensor

from fl_lightning.aggregation import compiled_sum
from fl_lightning.errors import MisuseError

MAX_MAGNITUDE = 2.0**20
"""No weight, statistic or step of a network that trains is as large. One such value in an average
would ruin it."""

SUM_BITS, MAGNITUDE_BITS = 62, 20
TINY = 2.0**-70
"""The square of a smaller value may be 0 in float32."""
FLOAT64_INTEGERS = 2.0**53
"""Integers up to here, and their sums, are exact in float64."""

BLOCK_VALUES = 2**15
"""Values that are added up at once: a quarter of a megabyte in float64, which stays in a core's
cache from client to client, and which torch does not divide among threads of its own."""
THREADED_VALUES = 2**18
"""From so many values on, blocks are dealt to threads: whoever adds them up, the integers are the
same."""
MAX_THREADS = 4

AddBlock: TypeAlias = Callable[[slice, "Tensor | None"], Tensor]
"""Returns the sums of the clients' integers of some columns, added to sums of others in int64, if
those are given."""


def fraction_bits(cohort: int) -> int:
    """Return F, the bits behind the binary point of a sum over at most ``cohort`` clients.

    >>> fraction_bits(1000), fraction_bits(1)
    (32, 42)
    """
    return SUM_BITS - MAGNITUDE_BITS - max(0, cohort - 1).bit_length()


def exact_mean(
    vectors: Sequence[Tensor], weights: Sequence[float], total: float, cohort: int
) -> Tensor:
    """Return sum w_k x_k / total in one go, float32 ``[P]``: the mean of an :class:`ExactSum` of
    the same vectors, bit for bit.

    Args:
        vectors, weights, cohort: as for :class:`ExactSum`.
        total: what the sum is divided by, the sum of w_k.

    Raises:
        MisuseError: as :meth:`ExactSum.add`.
    """
    mean = torch.empty_like(vectors[0], dtype=torch.float32)
    unit = 2.0 ** -fraction_bits(cohort)

    def fill(block: slice, add: AddBlock) -> None:
        compiled_sum.divide(add(block, None), unit, total, mean[block])

    _in_blocks(vectors, weights, cohort, fill)
    return mean


class ExactSum:
    """The sum over clients of w_k x_k for one vector of ``size`` values, added up in parts.

    Each client is rounded once, by at most half a unit of 2^-F, so the sum over K clients is off by
    at most K / 2 units; beyond that float64 rounds each weight and each product w x, by 2^-53 of
    itself each.

    Args:
        size: P, values of a client's vector.
        cohort: most clients that may be added.
    """

    def __init__(self, size: int, cohort: int) -> None:
        self.cohort = cohort
        self.integers = torch.zeros(size, dtype=torch.int64)
        self.count = 0

    @classmethod
    def of(cls, integers: Tensor, cohort: int, count: int = 0) -> ExactSum:
        """Return the sum of ``count`` clients that somebody else added up.

        Args:
            integers: the sum in units of 2^-F, int64 ``[P]``; it is used from here on.
        """
        exact = cls(0, cohort)
        exact.integers, exact.count = integers, count
        return exact

    def add(self, vectors: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Add one vector of each of several clients.

        Args:
            vectors: x_k, ``[size]``, each with values of less than 2^20.
            weights: w_k in [0, 1].

        Raises:
            MisuseError: more clients than ``cohort``, another size, or a value or weight out of
                range; the sum is of no use then.
        """
        self.count += len(vectors)
        _check_count(self.count, self.cohort)
        if any(vector.shape != self.integers.shape for vector in vectors):
            raise _shape_error([self.integers, *vectors])

        def onto(block: slice, add: AddBlock) -> None:
            add(block, self.integers[block])

        _in_blocks(vectors, weights, self.cohort, onto)

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
        mean = torch.empty(len(self.integers), dtype=torch.float32)
        compiled_sum.divide(self.integers, 2.0 ** -fraction_bits(self.cohort), total, mean)
        return mean


def _in_blocks(
    vectors: Sequence[Tensor],
    weights: Sequence[float],
    cohort: int,
    use: Callable[[slice, AddBlock], None],
) -> None:
    """Call ``use`` with some columns at a time, and with what adds up the clients' integers
    there."""
    _check(vectors, weights, cohort)
    size = len(vectors[0])
    scales = [weight * 2.0 ** fraction_bits(cohort) for weight in weights]
    compiled = compiled_sum.adder(vectors, scales)
    blocks = [slice(begin, begin + BLOCK_VALUES) for begin in range(0, size, BLOCK_VALUES)]

    def add(block: slice, sums: Tensor | None) -> Tensor:
        done = None if compiled is None else compiled(block, sums)
        return add_block(vectors, scales, block, sums) if done is None else done

    def use_all(some: list[slice]) -> None:
        for block in some:
            use(block, add)

    threads = min(os.cpu_count() or 1, MAX_THREADS) if size >= THREADED_VALUES else 1
    if threads == 1:
        use_all(blocks)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(use_all, [blocks[first::threads] for first in range(threads)]))


def add_block(
    vectors: Sequence[Tensor], scales: Sequence[float], block: slice, sums: Tensor | None
) -> Tensor:
    """Return the sums of round(scale x) over the clients, integers ``[B]``: in float64 where it
    holds them, else in int64.

    Args:
        vectors: x of each client, ``[P]``.
        scales: one a client.
        block: the B columns that are added.
        sums: int64 ``[B]``, to which they are added; they are then returned.

    Raises:
        MisuseError: a value is too large, or no number.
    """
    parts = [vector[block] for vector in vectors]
    sizes = [_bound(part) for part in parts]
    bound = sum(scale * size + 1 for scale, size in zip(scales, sizes, strict=True))
    kind = torch.float64 if bound < FLOAT64_INTEGERS else torch.int64
    here = torch.empty(len(parts[0]), dtype=torch.float64)
    total = torch.zeros(len(parts[0]), dtype=kind)
    for part, scale in zip(parts, scales, strict=True):
        here.copy_(part).mul_(scale).round_()
        total.add_(here if kind is torch.float64 else here.to(torch.int64))
    return total if sums is None else sums.add_(total.to(torch.int64))


def _bound(part: Tensor) -> float:
    """Return a bound on the magnitudes in a block of at most ``BLOCK_VALUES``."""
    squares = float(part.dot(part)) if part.dtype == torch.float32 else math.inf
    if squares < (MAX_MAGNITUDE / 2) ** 2:
        # at most 2^15 roundings by 2^-24; squares below 2^-149 are 0
        return 1.01 * math.sqrt(squares) + TINY
    size = largest(part)
    if not size < MAX_MAGNITUDE:
        raise MisuseError(
            f"values up to {size:g}", f"they are below {MAX_MAGNITUDE:g}", "refuse such an upload"
        )
    return size


def _check(vectors: Sequence[Tensor], weights: Sequence[float], cohort: int) -> None:
    _check_count(len(vectors), cohort)
    if any(vector.shape != vectors[0].shape for vector in vectors):
        raise _shape_error(vectors)
    if not all(0 <= weight <= 1 for weight in weights):
        raise MisuseError(
            f"weights {min(weights):g} to {max(weights):g}",
            "they are in [0, 1]",
            "divide them by the largest that there can be",
        )


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
