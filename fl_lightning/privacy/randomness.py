"""Where the noise and the cohorts of a private run come from: in a simulation from streams of the
run's seed, so that it can be repeated; in a deployment from operating systems, so that nobody can
compute them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import SystemRandom

import numpy as np

UNIT_BITS = 53
"""Bits of a value of [0, 1), as many as float64 holds."""


class SystemGenerator:
    """Those of the draws of ``numpy.random.Generator`` that private and secret sums need, from the
    operating system's randomness, which is made for keys. NumPy's own generators are not: their
    draws tell their state.

    Args:
        read: returns so many random bytes.
    """

    def __init__(self, read: Callable[[int], bytes] = os.urandom) -> None:
        self._read = read

    def random(self, size: int) -> np.ndarray:
        """Return uniform values of [0, 1), multiples of 2^-53; float64 ``[size]``."""
        return (self._integers(size) >> np.uint64(64 - UNIT_BITS)) * 2.0**-UNIT_BITS

    def standard_normal(self, size: int) -> np.ndarray:
        """Return draws of N(0, 1) by the method of Box and Muller; float64 ``[size]``.

        None is further than 9.4 from 0: of a Gaussian that has a probability of 5e-21.
        """
        half = (size + 1) // 2
        radius, angle = np.sqrt(2 * self._exponential(half)), 2 * np.pi * self.random(half)
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]

    def geometric(self, p: float, size: int) -> np.ndarray:
        """Return draws of P(x) = p (1 - p)^(x - 1) for x = 1, 2, ..., by inversion; int64
        ``[size]``."""
        drawn = np.ceil(self._exponential(size) / -np.log1p(-p))
        return np.maximum(drawn, 1).astype(np.int64)

    def choice(
        self, values: int | Sequence[int] | np.ndarray, size: int, *, replace: bool, shuffle: bool
    ) -> np.ndarray:
        """Return some of the values, each set of so many with the same probability.

        Args:
            values: or a number n: 0 to n - 1.
            replace: must be false, as no value is drawn twice.
            shuffle: whether their order is random too; it is in any case.
        """
        assert not replace
        values = range(values) if isinstance(values, int) else values
        return np.asarray(values)[SystemRandom().sample(range(len(values)), size)]

    def permutation(self, values: Sequence[int]) -> np.ndarray:
        """Return the values in an order of which each has the same probability, int64."""
        return self.choice(values, len(values), replace=False, shuffle=True)

    def _exponential(self, size: int) -> np.ndarray:
        """Return -ln u for u uniform in (0, 1], a multiple of 2^-64; float64 ``[size]``."""
        return -np.log((self._integers(size).astype(np.float64) + 1) * 2.0**-64)

    def _integers(self, size: int) -> np.ndarray:
        return np.frombuffer(self._read(8 * size), dtype="<u8")


Generator = np.random.Generator | SystemGenerator

Randomness = Callable[[int, str, int, int], Generator]
"""Returns a generator for a seed, purpose, round and client, as :func:`fl_lightning.rng.stream`
does."""


def from_system(seed: int, purpose: str, round: int, client: int) -> SystemGenerator:
    """Return a generator that follows from none of these, and draws what it has never drawn."""
    return SystemGenerator()
