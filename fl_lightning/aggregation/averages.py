"""How the server averages its clients' weights, and how much a few hostile ones can move it.

The weighted mean adds up integers (:mod:`fl_lightning.aggregation.exact_sum`), so it depends
neither on the order of uploads nor on who computed what. ``[K, P]`` is K clients, P values; p_k =
n_k / sum n, as the clients report n_k.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fl_lightning.aggregation.average import Average
from fl_lightning.aggregation.exact_sum import exact_mean
from fl_lightning.config.constraints import within

MAX_ORDERED_VALUES = 2**22
"""Values that the order statistics hold at once, in float64: 32 MB, however many clients and
weights there are."""


class WeightedMean(Average):
    """sum_k p_k v_k (McMahan et al., AISTATS 2017). One client can move it anywhere."""

    is_sum = True

    def __call__(self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor) -> Tensor:
        return weighted_mean(vectors, shares)


class RefinedMean(Average):
    """The weighted mean, and what a rule for parts of the vectors makes of it."""

    @abstractmethod
    def refined(self, mean: Tensor, vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
        """Return what becomes of the mean of the vectors, float32 ``[P]``."""

    def __call__(self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor) -> Tensor:
        return self.refined(weighted_mean(vectors, shares), vectors, shares)


class CoordinateMedian(Average):
    """The median of each value over the clients, the mean of the middle two when K is even (Yin et
    al., ICML 2018).

    n_k does not enter: every client counts once, or one that lies about its size could be the
    median by itself.
    """

    def __call__(self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor) -> Tensor:
        middle = slice((len(vectors) - 1) // 2, len(vectors) // 2 + 1)
        return torch.cat(
            [in_order(chunk)[middle].mean(dim=0).to(torch.float32) for chunk in chunks(vectors)]
        )


class TrimmedMean(Average):
    """The mean of each value without the largest and the smallest ones (Yin et al., ICML 2018).

    Clients are trimmed by count; those that are left weigh n_k, so that ``trim`` 0 is the weighted
    mean.

    Args:
        trim: share of the clients left out at each end, in [0, 0.5), rounded up to whole clients;
            at least one stays. It has to be the share of hostile clients that a cohort may hold, or
            more.
    """

    def __init__(
        self,
        trim: Annotated[
            float, within("[0, 0.5)", "the share left out at each end lies in [0, 0.5)", 0.1)
        ] = 0.1,
    ) -> None:
        self.trim = trim

    def __call__(self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor) -> Tensor:
        cut = min(math.ceil(self.trim * len(vectors) - 1e-9), (len(vectors) - 1) // 2)
        if cut == 0:
            return weighted_mean(vectors, shares)
        weights = torch.tensor(shares, dtype=torch.float64)
        means = []
        for chunk in chunks(vectors):
            order = places_in_order(chunk)[cut:-cut]
            kept = weights[order]
            means.append((kept * chunk.gather(0, order)).sum(dim=0) / kept.sum(dim=0))
        return torch.cat(means).to(torch.float32)


class NormClipping(Average):
    """The weighted mean of updates cut to a length: w + sum_k p_k u_k min(1, max_norm / ||u_k||),
    u_k = v_k - w (Sun et al., 2019).

    n_k enters as in the weighted mean. It bounds what a client can do in a round, not what it can
    do in all.

    Args:
        max_norm: largest L2 norm of an update over all weights; the median norm of honest updates
            is a good start.
    """

    is_sum = True

    def __init__(
        self, max_norm: Annotated[float, within("(0, inf)", "a length is above 0 and finite", 1.0)]
    ) -> None:
        self.max_norm = max_norm

    def bounded(self, vector: Tensor, start: Tensor) -> Tensor:
        update = vector.to(torch.float64) - start
        norm = float(update.square().sum().sqrt())
        return (start + min(1.0, self.max_norm / max(norm, 1e-300)) * update).to(torch.float32)

    def __call__(self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor) -> Tensor:
        return weighted_mean([self.bounded(vector, start) for vector in vectors], shares)


WEIGHTED_MEAN = WeightedMean()


def capped(shares: Sequence[float], largest: float) -> list[float]:
    """Return shares that add up to 1, none above ``largest``: what is cut off goes to the others in
    proportion to theirs.

    Where even equal shares are above ``largest``, the shares are equal. Shares that are all within
    the bound stay as they are.

    >>> capped([0.8, 0.1, 0.1], 0.5)
    [0.5, 0.25, 0.25]
    """
    count = len(shares)
    if max(shares) <= largest:
        return list(shares)
    if largest * count <= 1:
        return [1 / count] * count
    bounded: set[int] = set()
    result = list(shares)
    while over := {k for k, share in enumerate(result) if k not in bounded and share > largest}:
        bounded |= over
        left = 1 - largest * len(bounded)
        free = sum(share for k, share in enumerate(shares) if k not in bounded)
        result = [
            largest if k in bounded else share * left / free for k, share in enumerate(shares)
        ]
    return result


def weighted_mean(vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the sum of p_k v_k in the shape of v_k, float32; it does not depend on the order of
    clients.

    Args:
        vectors: v_k, all of one shape, with values of less than 2^20.
        shares: p_k, adding up to 1.

    Raises:
        MisuseError: shapes that differ, or a value out of range.
    """
    flat = [vector.reshape(-1) for vector in vectors]
    return exact_mean(flat, shares, math.fsum(shares), len(vectors)).view(vectors[0].shape)


def guided_average(
    average: Average,
    vectors: Sequence[Tensor],
    shares: Sequence[float],
    start: Tensor,
    guide: Tensor,
) -> Tensor:
    """Return what a guided average makes of the values that ``guide`` is an update of, which come
    first, and of each value after them the median over the clients.

    Those are statistics: one that goes further than every client's, as an update that is carried on
    or made longer does, may be a negative variance, and any client can move a mean anywhere.
    """
    P = len(guide)
    made = average.of([vector[:P] for vector in vectors], shares, start[:P], guide)
    if len(start) == P:
        return made
    rest = CoordinateMedian()([vector[P:] for vector in vectors], shares, start[P:])
    return torch.cat([made, rest])


def chunks(vectors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the rows ``[K, P]`` a few columns at a time, in float64."""
    width = max(1, MAX_ORDERED_VALUES // len(vectors))
    for begin in range(0, max(1, len(vectors[0])), width):
        yield torch.stack([vector[begin : begin + width] for vector in vectors]).to(torch.float64)


def in_order(rows: Tensor) -> Tensor:
    """Return each column of ``rows`` ``[K, P]`` in ascending order; NumPy's sort takes a third of
    torch's time."""
    return torch.from_numpy(np.sort(rows.numpy(), axis=0))


def places_in_order(rows: Tensor) -> Tensor:
    """Return for each column of ``rows`` ``[K, P]`` the rows in ascending order, equal ones as they
    come."""
    return torch.from_numpy(np.argsort(rows.numpy(), axis=0, kind="stable"))
