"""One quantised model for every bit budget: narrower allocations are trained beside a client's own.

Each local step takes the smallest allocation, two at random, and the client's own, which teaches
them: the sandwich rule and the distillation in place of US-Nets (Yu and Huang, ICCV 2019, arXiv
1903.05134), with bit-widths in place of widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from fl_lightning.methods.losses import distillation
from fl_lightning.tasks import ClassRows

RANDOM_ALLOCATIONS = 2


def narrower(bits: Sequence[int], noise: np.random.Generator) -> list[list[int]]:
    """Return the allocations that are trained beside one: 1 bit in each layer, and some whose
    layers are uniform from 1 to the bits that they have.

    Args:
        bits: of each layer.
        noise: what is drawn from.
    """
    drawn = ([int(noise.integers(1, n + 1)) for n in bits] for _ in range(RANDOM_ALLOCATIONS))
    return [[1] * len(bits), *drawn]


def narrower_loss(
    own: ClassRows,
    allocations: Sequence[Sequence[int]],
    rows_at: Callable[[Sequence[int]], ClassRows],
) -> Tensor:
    """Return the sum of KL(own || narrower) over allocations, a scalar; the teacher has no gradient
    from it.

    Args:
        own: logits of the client's own allocation.
        allocations: bits of each layer, one list for each.
        rows_at: returns the logits at an allocation.
    """
    teacher, total = own.logits.detach(), own.logits.new_zeros(())
    for bits in allocations:
        total = total + distillation(rows_at(bits), teacher, temperature=1.0)
    return total
