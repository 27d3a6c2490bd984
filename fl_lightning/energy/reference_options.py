"""What the calibration measures: a linear layer of one shape, computed in each of the three options.

*high* is the base with its adapter in float32. *off* is the base alone (scope ``adapter``) or nothing at
all (scope ``model``, where the block's residual connection skips it). *int8* is dynamic W8A8 of base plus
adapter: weights rounded to int8 per output channel, activations per token, products summed up in int32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.energy.costs import SCOPES
from fl_lightning.errors import require_choice

INT8_LIMIT = 127
MIN_INT8_ROWS = 17
"""``torch._int_mm`` takes no fewer rows on CUDA; a smaller step is padded with zero rows."""
INT8_MULTIPLE = 8
"""On CUDA, ``torch._int_mm`` takes widths that are multiples of this."""


class LinearShape(NamedTuple):
    """The shape of an adapted linear layer.

    Args:
        inputs: features of its input.
        outputs: features of its output.
        rank: r of its adapter.
    """

    inputs: int
    outputs: int
    rank: int


def linear_options(
    shape: LinearShape,
    scope: str = "adapter",
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> Mapping[str, Callable[[Tensor], Tensor]]:
    """Return a function for each option, which maps inputs ``[n, in]`` to outputs ``[n, out]``.

    Args:
        shape: the layer's shape; its weights are random.
        scope: ``adapter`` or ``model``, what *off* leaves out.
        generator: what the weights are drawn from, on the CPU; None: torch's current generator.
        device: where the layer is computed.

    Raises:
        InputError: the scope is none of the two.
    """
    require_choice(scope, SCOPES, "--scope")
    base, down, up = (
        torch.randn(size, generator=generator).mul_(size[1] ** -0.5).to(device)
        for size in ((shape.outputs, shape.inputs), (shape.rank, shape.inputs), (shape.outputs, shape.rank))
    )
    narrow, scale = quantized_rows(base + up @ down)
    columns = narrow.t()

    def high(x: Tensor) -> Tensor:
        return F.linear(x, base) + F.linear(F.linear(x, down), up)

    def int8(x: Tensor) -> Tensor:
        return int8_product(x, columns, scale)

    def off(x: Tensor) -> Tensor:
        return F.linear(x, base) if scope == "adapter" else x.new_zeros(len(x), shape.outputs)

    return {"off": off, "int8": int8, "high": high}


def quantized_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to int8, symmetric around zero.

    Args:
        weight: ``[rows, columns]``, float.

    Returns:
        codes int8 ``[rows, columns]`` and scales ``[rows, 1]``; codes times scales is near ``weight``.
    """
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / INT8_LIMIT
    return (weight / scale).round().to(torch.int8), scale


def int8_product(x: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
    """Return ``x W^T`` of activations rounded per token and weights rounded per output channel.

    Args:
        x: activations ``[n, in]``, float.
        columns: codes of the weights, int8 ``[in, out]``.
        scale: scales of the output channels, ``[out, 1]``.
    """
    codes, token_scale = quantized_rows(x)
    rows = len(codes)
    if x.is_cuda and rows < MIN_INT8_ROWS:
        codes = F.pad(codes, (0, 0, 0, MIN_INT8_ROWS - rows))
    sums = torch._int_mm(codes, columns)[:rows]
    return sums.to(x.dtype) * token_scale * scale.t()
