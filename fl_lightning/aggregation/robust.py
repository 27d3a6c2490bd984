"""Averages that look at whole updates D_k = v_k - w: who is near whom, or near what the server
knows.

- Krum, MultiKrum (Blanchard et al., NeurIPS 2017): s_k is the sum of the m - f - 2 smallest
  ||D_k - D_j||^2.
- Bulyan (El Mhamdi et al., ICML 2018): Krum again and again, then a trimmed mean around the median.
- GeometricMedian (Pillutla et al., 2019, "RFA"): argmin_z sum_k p_k ||z - D_k||, by smoothed
  Weiszfeld steps.
- CenteredClipping (Karimireddy et al., ICML 2021):
  v <- v + mean_k (D_k - v) min(1, tau / ||D_k - v||).
- FLTrust (Cao et al., NDSS 2021): sum_k T_k (||D_0|| / ||D_k||) D_k / sum_k T_k,
  T_k = max(0, cos(D_k, D_0)).

The last two go by trained values alone, and take the median over the clients of each statistic of
BatchNorm (:func:`fl_lightning.aggregation.averages.guided_average`).

m is the number of uploads, f how many of them may be hostile. n_k plays no part but in the
geometric median, so claims about it do not help. Distances are in float64 and from differences:
||a||^2 + ||b||^2 - 2 a b cancels where models are close together, which they are. Ties go to the
smaller client id, as uploads come in that order. What is summed over clients is a sum of integers,
or sorted first, so that the order of clients does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from fl_lightning.aggregation.average import Average, GuidedAverage, NoAverageError
from fl_lightning.aggregation.averages import chunks, in_order, places_in_order, weighted_mean
from fl_lightning.aggregation.exact_sum import ExactSum, exact_mean
from fl_lightning.config.constraints import at_least, within

Hostile = Annotated[int, within("[0, inf)", "0 or more uploads of a round may be hostile", 1)]
Iterations = Annotated[int, within("[1, inf)", "one iteration or more is made", 1)]


class NearestUpdates(Average):
    """An average that looks at which updates are near to one another.

    Args:
        f: how many uploads of a round may be hostile.
    """

    hostile_times = 2  # uploads that a hostile one asks for, beside three

    def __init__(self, f: Hostile = 1) -> None:
        self.f = f

    @property
    def fewest(self) -> int:  # type: ignore[override]
        return self.hostile_times * self.f + 3


class Krum(NearestUpdates):
    """The one update whose m - f - 2 nearest others are the nearest: argmin_k s_k.

    A round with fewer than 2f + 3 uploads changes nothing.

    Args:
        f: how many uploads of a round may be hostile.
    """

    def __call__(self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor) -> Tensor:
        return vectors[ranked(squared_distances(vectors), self.f)[0]].to(torch.float32, copy=True)


class MultiKrum(NearestUpdates):
    """The mean of the ``select`` updates with the smallest s_k of Krum, of all where fewer arrived.

    With f = 0 and ``select`` as large as the cohort it is the mean in which all clients weigh the
    same. A round with fewer than 2f + 3 uploads changes nothing.

    Args:
        f: how many uploads of a round may be hostile.
        select: how many updates are averaged; at most m - f - 2 leave every hostile one out that is
            far away.
    """

    def __init__(
        self,
        f: Hostile = 1,
        select: Annotated[int, within("[1, inf)", "one update or more is averaged", 3)] = 3,
    ) -> None:
        super().__init__(f)
        self.select = select

    def __call__(self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor) -> Tensor:
        best = ranked(squared_distances(vectors), self.f)[: self.select]
        return plain_mean([vectors[position] for position in best])


class Bulyan(NearestUpdates):
    """Choose m - 2f updates one by one, each by Krum over those left with at least one neighbour;
    then of each value the mean of the m - 4f chosen ones that are nearest to their median.

    The median is the mean of the middle two where m is even. A round with fewer than 4f + 3 uploads
    changes nothing.

    Args:
        f: how many uploads of a round may be hostile.
    """

    hostile_times = 4

    def __call__(self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor) -> Tensor:
        chosen = [vectors[position] for position in self.chosen(squared_distances(vectors))]
        kept = len(vectors) - 4 * self.f
        return torch.cat([around_median(chunk, kept) for chunk in chunks(chosen)]).to(torch.float32)

    def chosen(self, distances: Tensor) -> list[int]:
        """Return the positions of the m - 2f updates in the order in which they are chosen."""
        left, chosen = list(range(len(distances))), []
        for _ in range(len(distances) - 2 * self.f):
            chosen.append(left.pop(ranked(distances[left][:, left], self.f)[0]))
        return chosen


def around_median(rows: Tensor, kept: int) -> Tensor:
    """Return of each column of ``rows`` ``[K, P]`` the mean of the ``kept`` values nearest to its
    median.

    They are neighbours in ascending order, so one sort is enough. Where a value on the left and one
    on the right are as near and only one is kept, it is that of the smaller row.
    """
    values = in_order(rows)
    middle = slice((len(rows) - 1) // 2, len(rows) // 2 + 1)
    median = values[middle].mean(dim=0)
    left, right = median - values[: len(rows) - kept], values[kept:] - median
    first = (left > right).sum(dim=0)  # the one on the right takes the place of the one on the left
    mean = values.gather(0, first + torch.arange(kept)[:, None]).mean(dim=0)
    tied = (left == right).any(dim=0)
    if bool(tied.any()):
        some = rows[:, tied]
        nearest = places_in_order((some - median[tied]).abs_())[:kept]
        mean[tied] = in_order(some.gather(0, nearest)).mean(dim=0)
    return mean


class GeometricMedian(Average):
    """The point with the smallest sum of p_k times the distance to D_k, as steps of Weiszfeld find
    it.

    They begin at the weighted mean z; a step makes z the mean with weights p_k / max(nu, ||z -
    D_k||). With an infinite ``nu`` it stays there.

    Args:
        nu: distance below which an update does not weigh more, above 0.
        iterations: the most steps; 0: the weighted mean.
        tolerance: steps end when the sum of distances changes by less than this share of itself.
    """

    def __init__(
        self,
        nu: Annotated[float, within("(0, inf]", "a distance is above 0", 1e-5)] = 1e-5,
        iterations: Annotated[int, within("[0, inf)", "0 steps or more are made", 4)] = 4,
        tolerance: Annotated[float, within("[0, inf)", "a share is 0 or more", 1e-6)] = 1e-6,
    ) -> None:
        self.nu, self.iterations, self.tolerance = nu, iterations, tolerance

    def __call__(self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor) -> Tensor:
        weights, before = list(shares), math.inf
        for _ in range(self.iterations):
            found = ExactSum(len(vectors[0]), len(vectors))
            found.add(vectors, weights)
            lengths = distances_to(found.total().div_(math.fsum(weights)), vectors)
            total = math.fsum(share * length for share, length in zip(shares, lengths, strict=True))
            if abs(before - total) < self.tolerance * total:
                break
            before = total
            weights = self._weights(shares, lengths)
        return weighted_mean(vectors, weights)

    def _weights(self, shares: Sequence[float], lengths: Sequence[float]) -> list[float]:
        """Return p_k / max(nu, length), times what makes the largest factor 1: sums are of weights
        up to 1."""
        bounded = [max(self.nu, length) for length in lengths]
        least = min(bounded)
        return [
            share * (1.0 if length == least else least / length)
            for share, length in zip(shares, bounded, strict=True)
        ]


class CenteredClipping(GuidedAverage):
    """The mean of the updates after each is drawn towards v, the update of the last round, until it
    is no further away than ``tau``.

    v is 0 in the first round; the server keeps it. With an infinite ``tau`` it is the mean in which
    all clients weigh the same. The paper has clients send momentum, over several rounds, which
    makes honest updates alike.

    Args:
        tau: the distance, above 0.
        iterations: how often v is moved in a round.
    """

    guide = "last_update"

    def __init__(
        self,
        tau: Annotated[float, within("(0, inf]", "a distance is above 0", 1.0)],
        iterations: Iterations = 1,
    ) -> None:
        self.tau, self.iterations = tau, iterations

    def guided(
        self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor, guide: Tensor
    ) -> Tensor:
        centre = start.to(torch.float64) + guide
        for _ in range(self.iterations):
            lengths = distances_to(centre, vectors)
            drawn = [self._drawn(*pair, centre) for pair in zip(vectors, lengths, strict=True)]
            mean = plain_mean(drawn)
            centre = mean.to(torch.float64)
        return mean

    def _drawn(self, vector: Tensor, length: float, centre: Tensor) -> Tensor:
        if length <= self.tau:
            return vector
        return (centre + self.tau / length * (vector - centre)).to(torch.float32)


class FLTrust(GuidedAverage):
    """The mean of the updates, each as long as the server's own update D_0 and weighed by how much
    it points the same way.

    D_0 is what ``root_steps`` local steps on the public set of the data
    (``--data.public_examples``), with its labels, make of the weights. Nobody else holds these
    examples. A round in which no update points to the same side changes nothing.

    Args:
        root_steps: local steps that the server makes each round; a step of the global model is
            about as long as they are, so take as many as clients make.
    """

    guide = "root_update"

    def __init__(self, root_steps: Annotated[int, at_least(1)]) -> None:
        self.root_steps = root_steps

    def guided(
        self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor, guide: Tensor
    ) -> Tensor:
        origin, own = start.to(torch.float64), guide.to(torch.float64)
        size = float(own.square().sum().sqrt())
        scaled, trust = [], []
        for vector, length in zip(vectors, distances_to(origin, vectors), strict=True):
            update = vector - origin
            cosine = float((update * own).sum()) / (length * size) if length * size > 0 else 0.0
            if cosine > 0:
                scaled.append((origin + size / length * update).to(torch.float32))
                trust.append(min(1.0, cosine))
        if not trust:
            raise NoAverageError(
                "no update points where the update on the root set does, as FLTrust asks"
            )
        most = max(trust)  # a mean of tiny weights would lose digits
        return weighted_mean(scaled, [one / most for one in trust])


def squared_distances(vectors: Sequence[Tensor]) -> Tensor:
    """Return ||v_i - v_j||^2 of each pair, float64 ``[K, K]``."""
    found = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for chunk in chunks(vectors):
        for row in range(len(vectors) - 1):
            found[row, row + 1 :] += (chunk[row + 1 :] - chunk[row]).square_().sum(dim=1)
    return found + found.T


def ranked(distances: Tensor, f: int) -> list[int]:
    """Return the positions in order of Krum's score s_k, with at least one neighbour; ties in
    order.

    Args:
        distances: squared distances ``[K, K]``.
        f: how many may be hostile.
    """
    others = distances.clone().fill_diagonal_(math.inf).sort(dim=1).values
    scores = others[:, : max(1, len(distances) - f - 2)].sum(dim=1).tolist()
    return sorted(range(len(scores)), key=scores.__getitem__)


def distances_to(centre: Tensor, vectors: Sequence[Tensor]) -> list[float]:
    """Return the distance of each vector to ``centre``, float64 ``[P]``."""
    squares, begin = torch.zeros(len(vectors), dtype=torch.float64), 0
    for chunk in chunks(vectors):
        end = begin + chunk.shape[1]
        squares += (chunk - centre[begin:end]).square_().sum(dim=1)
        begin = end
    return squares.sqrt().tolist()


def plain_mean(vectors: Sequence[Tensor]) -> Tensor:
    """Return the mean in which all weigh the same, float32; it does not depend on their order."""
    return exact_mean(vectors, [1.0] * len(vectors), len(vectors), len(vectors))
