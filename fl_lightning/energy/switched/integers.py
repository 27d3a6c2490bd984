"""Linear layers in integers: int8 inputs times int8 weights, added up in int32.

    x ~ s_x q_x,  s_x = max |x| / 127 of a token;    W ~ s_w q_w,  s_w = max |w| / 127 of an output
    y = s_x s_w (q_x q_w^T) + bias

Both are symmetric: zero is zero. A token has its own scale, so its result does not depend on other
tokens.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST = 127
SMALLEST = 2.0**-110
"""A magnitude whose scale is still an ordinary float32."""
MOST_INPUTS = (2**31 - 1) // LARGEST**2
"""Inputs of a layer, 133 144, whose products fit into int32 whatever the values."""
EXACT_FLOAT32 = 2**24 // LARGEST**2
"""Inputs, 1 040, whose products add up exactly in float32, in whatever order."""
CUDA_MULTIPLE = 8
"""On CUDA the sizes of ``torch._int_mm`` are multiples of 8, and there are more than 16 rows."""
CUDA_ROWS = 24


class Int8Rows(NamedTuple):
    """A matrix in int8 with a scale for each row.

    Args:
        values: int8 ``[n, in]``, from -127 to 127.
        scales: float32 ``[n, 1]``: a row is about its values times its scale.
    """

    values: Tensor
    scales: Tensor


def quantised_rows(matrix: Tensor) -> Int8Rows:
    """Return a float matrix ``[n, in]`` in int8, each row by its largest magnitude; halves go to
    even.

    The result carries no gradient. The scale of a row of zeros is the least one, ``SMALLEST /
    127``.

    >>> quantised_rows(torch.tensor([[254.0, -2.0, 3.0], [0.0, 0.0, 0.0]])).values.tolist()
    [[127, -1, 2], [0, 0, 0]]
    """
    matrix = matrix.detach().to(torch.float32)
    scales = matrix.abs().amax(1, keepdim=True).clamp_min_(SMALLEST).div_(LARGEST)
    return Int8Rows((matrix / scales).round_().to(torch.int8), scales)


def integer_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left right^T``, int32 ``[n, out]``, exactly.

    It is ``torch._int_mm``; on CUDA with zeros added to sizes that its kernel does not take. Where
    torch has no such kernel, or one without vector instructions (processors without AVX-512, where
    it takes thirty times as long), floats compute it, which are exact too.

    Args:
        left: int8 ``[n, in]``, of at most ``MOST_INPUTS`` inputs.
        right: int8 ``[out, in]``.
    """
    rows, outputs = len(left), len(right)
    if rows == 0:
        return left.new_zeros(0, outputs, dtype=torch.int32)
    if left.is_cuda:
        columns = -left.shape[1] % CUDA_MULTIPLE
        left = F.pad(left, (0, columns, 0, max(CUDA_ROWS - rows, -rows % CUDA_MULTIPLE)))
        right = F.pad(right, (0, columns, 0, -outputs % CUDA_MULTIPLE))
    elif not _has_int8_instructions():
        return _exact_product(left, right)
    try:
        found = torch._int_mm(left, right.t())
    except (AttributeError, RuntimeError):  # an old torch, or a device or shape without a kernel
        found = _exact_product(left, right)
    return found[:rows, :outputs]


@cache
def _has_int8_instructions() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _exact_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left right^T``, int32, of floats that hold each partial sum exactly."""
    exact = left.device.type == "cpu" and left.shape[1] <= EXACT_FLOAT32
    wide = torch.float32 if exact else torch.float64
    with torch.autocast(left.device.type, enabled=False):
        return (left.to(wide) @ right.to(wide).t()).to(torch.int32)


def integer_linear(x: Tensor, weight: Int8Rows, bias: Tensor | None) -> Tensor:
    """Return the outputs of a linear layer in integers, float32 ``[n, out]``, without a gradient.

    Args:
        x: inputs, ``[n, in]``.
        weight: of ``quantised_rows``, ``[out, in]``.
        bias: ``[out]``, or None.
    """
    inputs = quantised_rows(x)
    found = integer_product(inputs.values, weight.values) * inputs.scales * weight.scales[:, 0]
    return found if bias is None else found + bias.detach()
