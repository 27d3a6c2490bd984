"""The clip of one client's whole message, and how far a client can then move a sum of integers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDING_SHARE = 2.0**-40
"""Share of a norm by which float64 may compute it too small; the error of a sum of squares is below
it."""


def clip_together(
    vectors: Sequence[Tensor], clip_norm: float, bits: int
) -> tuple[list[Tensor], float]:
    """Clip one message, which several vectors make up: m <- m min(1, C / ||m||), with one norm over
    all of them. A clip for each tensor would bound the message by sqrt(number of tensors) C only.

    What comes back are multiples of 2^-bits, the integers of a sum divided by 2^bits. Rounding can
    lengthen a message of P values by sqrt(P) / 2 units, so a message longer than C less that much
    is clipped to it: the *integers* have a norm of at most 2^bits C. Adding or removing one client
    thus moves an exact sum by at most C, and replacing one by at most 2 C.

    Args:
        vectors: float or integer tensors ``[P_i]``.
        clip_norm: C.
        bits: F, the bits behind the binary point.

    Returns:
        The vectors, float64 ``[P_i]``, and the norm of the message before the clip. A message whose
        norm is not finite becomes zeros.
    """
    exact = [vector.to(torch.float64) for vector in vectors]
    norm = math.sqrt(math.fsum(float(vector.square().sum()) for vector in exact))
    if not math.isfinite(norm):
        return [torch.zeros_like(vector) for vector in exact], math.inf
    most = max(0.0, clip_norm * (1 - ROUNDING_SHARE) - rounding_length(sum(map(len, exact)), bits))
    factor = 1.0 if norm <= most else most / norm
    unit = 2.0**-bits
    return [(vector * (factor / unit)).round_().mul_(unit) for vector in exact], norm


def rounding_length(size: int, bits: int) -> float:
    """Return by how much rounding to multiples of 2^-bits can lengthen a vector of ``size``
    values."""
    return math.sqrt(size) * 2.0 ** -(bits + 1)
