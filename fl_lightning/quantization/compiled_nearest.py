"""The compiled form of :func:`fl_lightning.quantization.product.nearest`, with the same bits."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from fl_lightning.support.compiled import CompiledLibrary

DISTANCES_PER_BUILD = 2**28
"""So many are computed without the library in about as long as the compiler takes (0.4 s)."""
BLOCK = 64
"""The library takes a multiple of so many sub-vectors."""


COMPILED = CompiledLibrary(Path(__file__).with_name("nearest.cpp"), DISTANCES_PER_BUILD)


def nearest(points: np.ndarray, codebook: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the index of the nearest centroid, int64 ``[n]``, and its squared distance, float32
    ``[n]``. There are none where there is no library.

    Args:
        points: float32 ``[n, d]``, finite.
        codebook: float32 ``[K, d]``, finite.
    """
    (count, dim), centroids = points.shape, len(codebook)
    library = COMPILED.library(count * centroids)
    if library is None:
        return None
    assert points.dtype == codebook.dtype == np.float32
    columns = np.zeros((dim, -(-count // BLOCK) * BLOCK), np.float32)
    columns[:, :count] = points.T
    codebook = np.ascontiguousarray(codebook)
    index, error = np.empty(columns.shape[1], np.int32), np.empty(columns.shape[1], np.float32)
    library.nearest(
        ctypes.c_void_p(columns.ctypes.data),
        ctypes.c_int64(columns.shape[1]),
        ctypes.c_void_p(codebook.ctypes.data),
        ctypes.c_int32(centroids),
        ctypes.c_int64(dim),
        ctypes.c_void_p(index.ctypes.data),
        ctypes.c_void_p(error.ctypes.data),
    )
    return index[:count].astype(np.int64), error[:count]
