"""The compiled form of :func:`fl_lightning.aggregation.exact_sum.add_block`: scale, round, check
and add in one pass over the values, with the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from fl_lightning.support.compiled import CompiledLibrary

AddCompiled: TypeAlias = Callable[[slice, "Tensor | None"], "Tensor | None"]
VALUES_PER_BUILD = 2**28
"""So many are added without the library in about as long as the compiler takes (0.4 s)."""
COMPILED = CompiledLibrary(Path(__file__).with_name("exact_sum.cpp"), VALUES_PER_BUILD)


def adder(vectors: Sequence[Tensor], scales: Sequence[float]) -> AddCompiled | None:
    """Return what adds up a block of these vectors, as ``add_block`` does, in int64; or returns
    None where a value is out of range, and the sums are of no use. There is none where there is no
    library, or the vectors are not float32 in one piece of this machine's memory.

    Args:
        vectors: x of each client, ``[P]``.
        scales: one a client.
    """
    if not all(
        v.dtype == torch.float32 and v.is_contiguous() and v.device.type == "cpu" for v in vectors
    ):
        return None
    library, count, size = COMPILED.library(sum(map(len, vectors))), len(vectors), len(vectors[0])
    if library is None:
        return None
    addresses = (ctypes.c_void_p * count)(*(vector.data_ptr() for vector in vectors))
    factors = (ctypes.c_double * count)(*scales)

    def add(block: slice, sums: Tensor | None) -> Tensor | None:
        begin, end, _ = block.indices(size)
        sums = torch.zeros(end - begin, dtype=torch.int64) if sums is None else sums
        assert _is_flat(sums, torch.int64, end - begin)
        where = (ctypes.c_int64(count), ctypes.c_int64(begin), ctypes.c_int64(end))
        refused = library.add_scaled(addresses, factors, *where, ctypes.c_void_p(sums.data_ptr()))
        return None if refused else sums

    return add


def divide(sums: Tensor, unit: float, total: float, means: Tensor) -> None:
    """Set ``means``, float32 ``[P]``, to sums * unit / total, rounded to float32 at the end.

    Args:
        sums: integers ``[P]``, in int64 or float64.
        unit: a power of two.
    """
    if COMPILED.found is None or sums.dtype != torch.int64:
        means.copy_(sums.to(torch.float64).mul_(unit).div_(total))
        return
    assert _is_flat(sums, torch.int64, len(means))
    assert _is_flat(means, torch.float32, len(sums))
    COMPILED.found.divide(
        ctypes.c_void_p(sums.data_ptr()),
        ctypes.c_int64(len(sums)),
        ctypes.c_double(unit),
        ctypes.c_double(total),
        ctypes.c_void_p(means.data_ptr()),
    )


def _is_flat(tensor: Tensor, dtype: torch.dtype, size: int) -> bool:
    return tensor.dtype == dtype and tensor.shape == (size,) and tensor.is_contiguous()
