"""Product quantisation: sub-vectors of length d, each replaced by the nearest of K centroids.

Source: Jegou et al., TPAMI 2011. Lloyd's k-means is written out element by element, without a
matrix product, whose rounding depends on the number of threads: the same seed gives the same bytes
with any number of threads. ``[n, d]`` sub-vectors, ``[K, d]`` centroids.
"""

from __future__ import annotations

import numpy as np

from fl_lightning.quantization import compiled_nearest

POINTS_PER_BLOCK = 256
"""Sub-vectors that are compared at once; with 256 centroids their distances fit into the cache."""


def num_centroids(subvectors: int, centroids: int) -> int:
    """Return K: ``centroids``, but at most a quarter of the sub-vectors.

    A larger codebook would take more bytes than it saves.
    """
    return min(centroids, subvectors // 4)


def index_bits(centroids: int) -> int:
    """Return the bits of an index into a codebook of so many centroids."""
    return max(1, (centroids - 1).bit_length())


def split(values: np.ndarray, dim: int) -> np.ndarray:
    """Return the values as sub-vectors, float32 ``[n, d]``; zeros fill the last one."""
    flat = np.asarray(values, dtype=np.float32).reshape(-1)
    padded = np.pad(flat, (0, -len(flat) % dim)).reshape(-1, dim)
    return padded + np.float32(0)  # -0.0 becomes 0.0, so that equal values have equal bytes


def kmeans(
    points: np.ndarray, centroids: int, iterations: int, noise: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cluster the points; return indices int64 ``[n]`` and codebook float32 ``[K, d]``.

    The start is a random choice of points. A centroid without points moves to the point with the
    largest error in the cluster with the largest error, which splits that cluster; several such
    centroids split one cluster each. If there are at most ``centroids`` different points, they are
    kept exactly.

    Args:
        points: float32 ``[n, d]``, finite.
        centroids: K.
        iterations: largest number of moves of the centroids; fewer if no point changes its cluster.
        noise: generator for the start.
    """
    chosen = points[np.sort(noise.choice(len(points), centroids, replace=False))]
    if len(np.unique(chosen, axis=0)) < centroids:  # few different points, as in a layer of zeros
        different = np.unique(points, axis=0)
        if len(different) <= centroids:
            return nearest(points, different)[0], different
        chosen = different[np.sort(noise.choice(len(different), centroids, replace=False))]
    index, error = nearest(points, chosen)
    for _ in range(iterations):
        chosen = _move_centroids(points, index, error, chosen)
        before, (index, error) = index, nearest(points, chosen)
        if np.array_equal(before, index):
            break
    return index, chosen


def nearest(points: np.ndarray, codebook: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the nearest centroid, int64 ``[n]``, and its squared distance, float32
    ``[n]``.

    Of equally near centroids it is the one with the lowest index. Both are float32 and finite.
    """
    if (found := compiled_nearest.nearest(points, codebook)) is not None:
        return found
    index, error = np.empty(len(points), np.int64), np.empty(len(points), np.float32)
    columns = np.ascontiguousarray(codebook.T)
    total, part = np.empty((2, POINTS_PER_BLOCK, len(codebook)), np.float32)
    for begin in range(0, len(points), POINTS_PER_BLOCK):
        rows = points[begin : begin + POINTS_PER_BLOCK]
        distance, term = total[: len(rows)], part[: len(rows)]
        # squares of values beyond 1e19; all centroids are then equally far
        with np.errstate(over="ignore"):
            for axis, column in enumerate(columns):
                out = distance if axis == 0 else term
                np.subtract(rows[:, axis, None], column, out=out)
                np.multiply(out, out, out=out)
                if axis:
                    np.add(distance, term, out=distance)
        best = distance.argmin(axis=1)
        index[begin : begin + POINTS_PER_BLOCK] = best
        error[begin : begin + POINTS_PER_BLOCK] = distance[np.arange(len(rows)), best]
    return index, error


def _move_centroids(
    points: np.ndarray, index: np.ndarray, error: np.ndarray, codebook: np.ndarray
) -> np.ndarray:
    """Return the codebook with each centroid at the mean of its points, summed in float64.

    Centroids without points move into the clusters with the largest error.
    """
    count = np.bincount(index, minlength=len(codebook))
    sums = np.stack(
        [np.bincount(index, weights=column, minlength=len(codebook)) for column in points.T], axis=1
    )
    moved = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], codebook).astype(
        np.float32
    )
    empty = np.flatnonzero(count == 0)
    if len(empty):
        errors = np.bincount(index, weights=error, minlength=len(codebook))
        for centroid, cluster in zip(empty, np.argsort(-errors, kind="stable"), strict=False):
            if errors[cluster] == 0:
                break
            members = np.flatnonzero(index == cluster)
            moved[centroid] = points[members[error[members].argmax()]]
    return moved
