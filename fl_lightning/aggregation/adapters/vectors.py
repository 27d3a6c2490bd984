"""Vectors of a layout's values, and the factors of adapters in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation.adapters.algebra import Pair
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE
from fl_lightning.models.adapters.low_rank import FactorNames
from fl_lightning.wire import Layout, PayloadError


def spread(values: Tensor, part: Tensor | None) -> Tensor:
    """Return a vector of ``layout`` with the values that travelled, and zeros elsewhere.

    Raises:
        PayloadError: there are more or fewer of them.
    """
    if part is None:
        return values
    if values.shape != (int(part.sum()),):
        raise PayloadError(
            f"weights of shape {tuple(values.shape)}",
            f"this client has [{int(part.sum())}]",
            "use one network on both sides",
        )
    vector = values.new_zeros(len(part))
    vector[part] = values
    return vector


def values_of_rank(layout: Layout, pairs: Sequence[FactorNames], rank: int) -> Tensor:
    """Return which values of a layout an adapter of this rank has: the first rows of A and columns
    of B, and of other tensors all; bool ``[P]``."""
    has = {name: torch.ones(shape) for name, shape in layout.shapes.items()}
    for pair in pairs:
        has[pair.a][rank:] = 0
        has[pair.b][:, rank:] = 0
    return layout.pack(has).bool()


def packed(
    layout: Layout, mean: Tensor, pairs: Sequence[FactorNames], made: Sequence[Pair]
) -> Tensor:
    """Return a vector whose factors are those of ``made``, and all else that of ``mean``, float32
    ``[P]``.

    The mean of the factors stays where others would leave the range of what is added up: values of
    uploads are below 2^20, and so are their means, but factors of a product of such values may not
    be.
    """
    tensors: dict[str, Any] = layout.unpack(mean)
    for names, (a, b) in zip(pairs, made, strict=True):
        if max(float(a.abs().max()), float(b.abs().max())) < MAX_MAGNITUDE:
            tensors |= {names.a: a.to(mean), names.b: b.to(mean)}
    return layout.pack(tensors)
