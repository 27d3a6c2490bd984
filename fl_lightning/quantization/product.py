"""Product quantisation (Jegou et al., TPAMI 2011): sub-vectors of length d, each replaced by the nearest of K
centroids.

Lloyd's k-means, written out element by element: no matrix product, whose rounding depends on the number of
threads, so the same seed gives the same bytes on any number of them. ``[n, d]`` sub-vectors, ``[K, d]``
centroids.
"""

from __future__ import annotations

import numpy as np

ROWS = 256
"""Sub-vectors compared at once: with 256 centroids their distances stay in the cache."""


def num_centroids(subvectors: int, centroids: int) -> int:
    """K: ``centroids``, but at most a quarter of the sub-vectors, or the codebook would weigh more than it
    saves."""
    return min(centroids, subvectors // 4)


def index_bits(centroids: int) -> int:
    """Bits of an index into a codebook."""
    return max(1, (centroids - 1).bit_length())


def split(values: np.ndarray, dim: int) -> np.ndarray:
    """float32 ``[n, d]``, the last sub-vector filled up with zeros."""
    flat = np.asarray(values, dtype=np.float32).reshape(-1)
    return np.pad(flat, (0, -len(flat) % dim)).reshape(-1, dim) + np.float32(
        0
    )  # -0.0 becomes 0.0: one value, one pattern


def kmeans(
    points: np.ndarray, centroids: int, iterations: int, noise: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Indices int64 ``[n]`` and codebook float32 ``[K, d]``; at most ``centroids`` different points are kept
    exactly.

    Starts from points chosen at random. A centroid that nobody chose moves to the point that is worst served
    in the cluster with the largest error, so that cluster is split; several take one cluster each.

    Args:
        points: float32 ``[n, d]``, finite.
        iterations: times that the centroids move; it ends sooner when no point changes its cluster.
    """
    chosen = points[np.sort(noise.choice(len(points), centroids, replace=False))]
    if len(np.unique(chosen, axis=0)) < centroids:  # few different points, as in a layer of zeros
        different = np.unique(points, axis=0)
        if len(different) <= centroids:
            return nearest(points, different)[0], different
        chosen = different[np.sort(noise.choice(len(different), centroids, replace=False))]
    index, error = nearest(points, chosen)
    for _ in range(iterations):
        chosen = _move(points, index, error, chosen)
        before, (index, error) = index, nearest(points, chosen)
        if np.array_equal(before, index):
            break
    return index, chosen


def nearest(points: np.ndarray, codebook: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the nearest centroid, the lowest of equals, int64 ``[n]``, and the squared distance to it,
    float32 ``[n]``."""
    index, error = np.empty(len(points), np.int64), np.empty(len(points), np.float32)
    columns = np.ascontiguousarray(codebook.T)
    total, part = np.empty((2, ROWS, len(codebook)), np.float32)
    for begin in range(0, len(points), ROWS):
        rows = points[begin : begin + ROWS]
        distance, term = total[: len(rows)], part[: len(rows)]
        with np.errstate(over="ignore"):  # beyond 1e19; all are equally far then
            for axis, column in enumerate(columns):
                out = distance if axis == 0 else term
                np.subtract(rows[:, axis, None], column, out=out)
                np.multiply(out, out, out=out)
                if axis:
                    np.add(distance, term, out=distance)
        best = distance.argmin(axis=1)
        index[begin : begin + ROWS] = best
        error[begin : begin + ROWS] = distance[np.arange(len(rows)), best]
    return index, error


def _move(points: np.ndarray, index: np.ndarray, error: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    """Each centroid to the mean of its points, added up in float64; the empty ones into the clusters with the
    largest error."""
    count = np.bincount(index, minlength=len(codebook))
    sums = np.stack(
        [np.bincount(index, weights=column, minlength=len(codebook)) for column in points.T], axis=1
    )
    moved = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], codebook).astype(np.float32)
    empty = np.flatnonzero(count == 0)
    if len(empty):
        errors = np.bincount(index, weights=error, minlength=len(codebook))
        for centroid, cluster in zip(empty, np.argsort(-errors, kind="stable"), strict=False):
            if errors[cluster] == 0:
                break
            members = np.flatnonzero(index == cluster)
            moved[centroid] = points[members[error[members].argmax()]]
    return moved
