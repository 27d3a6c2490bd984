"""Places of methods, with intervals, from numbers that are paired by seed. No run, no file, no
table.

Every pair of the k methods is tested by its per-seed differences, and p is corrected for all k (k -
1) / 2 pairs (Holm, 1979). The rank of a method is then at least 1 + (methods that are significantly
better) and at most k - (methods that are significantly worse): with probability 1 - a all these
intervals hold the true ranks together (Mogstad, Romano, Shaikh & Wilhelm, "Inference for ranks",
Review of Economic Studies, 2024). Pairs that are not significant cannot be told apart, and a
diagram of mean ranks joins them by bars (Demsar, "Statistical comparisons of classifiers over
multiple data sets", JMLR, 2006; here over seeds, and by paired tests as Benavoli, Corani & Mangili,
JMLR, 2016, recommend in place of mean ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy import stats

from fl_lightning.study.statistics import LEVEL, holm, mean_std, sequence_p, t_test


@dataclass(frozen=True)
class Place:
    """The place of one method.

    Args:
        label: the method.
        place: 1 for the best, one more for each further method that is ahead in the mean of their
            paired differences; who is level shares the better place.
        mean_rank: the mean over seeds of its rank among the methods; NaN where no seed has all
            methods.
        first, last: the interval of its rank, from 1 to the number of methods.
        alike: the methods that it cannot be told apart from.
    """

    label: str
    place: int
    mean_rank: float
    first: int
    last: int
    alike: tuple[str, ...]


def places(
    labels: Sequence[str],
    values: np.ndarray,
    higher_is_better: bool = True,
    sequential: bool = False,
    least_std: float = 0.0,
) -> list[Place]:
    """Return the place of each method, the best first.

    Args:
        labels: the methods ``[k]``.
        values: their numbers ``[seeds, k]``, NaN where there is none; each method has one at least.
        higher_is_better: whether more is better.
        sequential: whether p is that of the confidence sequence, which is valid at every look.
        least_std: standard deviation of a difference by rounding alone, where numbers are discrete.

    >>> values = np.array([[0.9, 0.8, 0.1], [0.8, 0.9, 0.3], [0.7, 0.7, 0.1], [0.8, 0.8, 0.2]])
    >>> [(one.label, one.place, one.first, one.last) for one in places("ABC", values)]
    [('A', 1, 1, 2), ('B', 1, 1, 2), ('C', 3, 3, 3)]
    """
    good = np.asarray(values, np.float64) * (1 if higher_is_better else -1)
    pairs = list(combinations(range(len(labels)), 2))
    differences = [(found := good[:, a] - good[:, b])[np.isfinite(found)] for a, b in pairs]
    p = holm([p_of(one, sequential, least_std) for one in differences])
    better = np.zeros((len(labels), len(labels)), bool)  # whether the row is significantly better
    for (a, b), found, corrected in zip(pairs, differences, p, strict=True):
        if corrected < LEVEL:
            better[(a, b) if mean_std(found)[0] > 0 else (b, a)] = True
    ahead = times_behind(good)
    whole = good[np.isfinite(good).all(axis=1)]
    mean_ranks = [float(one) for one in ranks_within(-whole).mean(axis=0)] if len(whole) else []
    told = better | better.T
    found_places = [
        Place(
            label=label,
            place=1 + int(ahead[i] - ahead.min()),
            mean_rank=mean_ranks[i] if mean_ranks else float("nan"),
            first=1 + int(better[:, i].sum()),
            last=len(labels) - int(better[i].sum()),
            alike=tuple(other for j, other in enumerate(labels) if j != i and not told[i, j]),
        )
        for i, label in enumerate(labels)
    ]
    return sorted(found_places, key=lambda one: (one.place, one.mean_rank))


def ranks_within(values: np.ndarray) -> np.ndarray:
    """Return the ranks along the last axis, 1 for the smallest. Values that are equal up to
    rounding share theirs.

    >>> ranks_within(np.array([0.1 + 0.2, 0.3, 0.1])).tolist()
    [2.5, 2.5, 1.0]
    """
    return np.asarray(stats.rankdata(values.round(12), axis=-1))


def times_behind(values: np.ndarray) -> np.ndarray:
    """Return how many others are ahead of each method in the mean of their paired differences, over
    the seeds that both have, int64 ``[k]``.

    Where all methods have all seeds it is the order of their means.

    Args:
        values: their numbers ``[seeds, k]``, the higher the better, NaN where there is none.

    >>> times_behind(np.array([[0.9, 0.8], [0.1, np.nan]])).tolist()
    [0, 1]
    """
    gaps = values[:, None, :] - values[:, :, None]
    known = np.isfinite(gaps)
    means = np.where(known, gaps, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    return (means.round(12) > 0).sum(axis=1)


def p_of(differences: np.ndarray, sequential: bool = False, least_std: float = 0.0) -> float:
    """Return the two-sided p of paired differences; arguments as of :func:`places`."""
    return sequence_p(differences, least_std) if sequential else t_test(differences, least_std)[1]


def groups(ordered: Sequence[Place]) -> list[tuple[int, int]]:
    """Return the first and last position of each largest run of neighbours of whom no two can be
    told apart.

    Args:
        ordered: places, in the order in which they are drawn.

    >>> of = {"A": "B", "B": "AC", "C": "B"}
    >>> groups([Place(label, 1, 1.0, 1, 3, tuple(alike)) for label, alike in of.items()])
    [(0, 1), (1, 2)]
    """
    found: list[tuple[int, int]] = []
    for start, first in enumerate(ordered):
        end, members = start, [first]
        while end + 1 < len(ordered) and all(
            ordered[end + 1].label in one.alike for one in members
        ):
            end += 1
            members.append(ordered[end])
        if end > start and not (found and found[-1][1] >= end):
            found.append((start, end))
    return found
