"""Allocation of bits to layers: FedMPQ's server rule, in integers.

Source: Chen & Vikalo, CVPR 2024, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from fl_lightning.errors import MisuseError

MAX_BITS = 8


def allocate_bits(
    sizes: Sequence[int], mean_bits: Sequence[int], delta: Sequence[int], budget: float
) -> list[int]:
    """Return the bits of each layer within a budget, by pruning and then growing.

    Prune: while ``sum(n * b) > budget * sum(n)``, the layer with the highest ``n * delta`` that has
    more than one bit loses one bit. Grow: in ascending order of ``n * delta``, each layer gains one
    bit at a time, up to 8, while the budget holds. Ties go to the lower index.

    Args:
        sizes: weights n_l of each layer.
        mean_bits: bits b_l of each layer before, 1 to 8; in FedMPQ the weighted mean over clients.
        delta: Delta_l, at least 1: one more than the mean number of bits that clients pruned.
        budget: mean bits per weight, at least 1.

    Raises:
        MisuseError: lengths differ, or a value is outside its range.

    >>> allocate_bits([432, 2304, 36864], [4, 4, 4], [1, 1, 1], budget=2)
    [8, 8, 1]
    """
    if not len(sizes) == len(mean_bits) == len(delta):
        raise MisuseError(
            f"{len(sizes)} sizes, {len(mean_bits)} mean_bits, {len(delta)} delta",
            "one of each per layer",
            "give equal lengths",
        )
    if not budget >= 1:
        raise MisuseError(
            f"a budget of {budget} bits",
            "a weight takes at least 1",
            f"give a budget from 1 to {MAX_BITS}",
        )
    if (
        any(not 1 <= b <= MAX_BITS for b in mean_bits)
        or any(n < 1 for n in sizes)
        or any(d < 1 for d in delta)
    ):
        raise MisuseError(
            f"bits {list(mean_bits)}, delta {list(delta)}",
            f"bits are 1 to {MAX_BITS}, sizes and delta at least 1",
            "correct them",
        )
    bits = list(mean_bits)
    used = sum(n * b for n, b in zip(sizes, bits, strict=True))
    limit = int(min(Fraction(str(budget)), Fraction(MAX_BITS)) * sum(sizes))
    ascending = sorted(range(len(sizes)), key=lambda layer: (sizes[layer] * delta[layer], layer))
    descending = sorted(range(len(sizes)), key=lambda layer: (-sizes[layer] * delta[layer], layer))
    for layer in descending:
        while used > limit and bits[layer] > 1:
            bits[layer] -= 1
            used -= sizes[layer]
    for layer in ascending:
        while bits[layer] < MAX_BITS and used + sizes[layer] <= limit:
            bits[layer] += 1
            used += sizes[layer]
    return bits


def average_bits(sizes: Sequence[int], bits: Sequence[int]) -> float:
    """Return the mean bits per weight; as in the paper, the sign is not counted."""
    return sum(n * b for n, b in zip(sizes, bits, strict=True)) / sum(sizes)
