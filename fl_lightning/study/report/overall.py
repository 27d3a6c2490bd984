"""The places of the methods over all settings of a study: a table, and a critical-difference
diagram.

A seed ranks the methods that every setting has under each setting, and these ranks are averaged
over the settings. Methods are then told apart by paired tests over seeds, as at one setting. What
is said is about these settings, as they are: Demsar (JMLR, 2006) takes data sets for draws from
all, which a few chosen settings are not.

``S`` seeds, ``k`` methods.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.ranks import Place, p_of, ranks_within
from fl_lightning.study.ranks import places as places_of
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.report.places import MIN_METHODS, diagram, ends_of, named, places, table_of
from fl_lightning.study.report.tables import ReportTable
from fl_lightning.study.statistics import LEVEL, holm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_LEVELS = 2
"""With one setting, its own places are the overall ones."""


@dataclass(frozen=True)
class OverallPlace(Place):
    """The place of one method over all settings; ``mean_rank`` is the mean over settings and seeds.

    Args:
        low, high: the 95 % interval of the mean rank over seeds, within 1 and the number of
            methods; NaN where it cannot be estimated.
        seeds: the seeds that count.
    """

    low: float
    high: float
    seeds: tuple[int, ...]


def mean_ranks(comparison: Comparison) -> tuple[list[str], np.ndarray, tuple[int, ...]]:
    """Return the methods that every setting has, their ranks averaged over settings, float64
    ``[S, k]``, and the seeds; nothing with fewer than two settings or three methods.

    A seed counts where all of these methods have a number in all settings.
    """
    metric, levels = comparison.study.metric, comparison.levels
    labels = [
        one
        for one in comparison.labels
        if all(one in comparison.means(metric, at) for at in levels)
    ]
    if len(levels) < MIN_LEVELS or len(labels) < MIN_METHODS:
        return [], np.empty((0, 0)), ()
    sign = -1 if comparison.higher_is_better(metric) else 1
    tables = np.array(
        [sign * comparison.table(metric, at)[labels].to_numpy(float) for at in levels]
    )
    whole = np.isfinite(tables).all(axis=(0, 2))
    seeds = [seed for seed, counts in zip(comparison.study.seeds, whole, strict=True) if counts]
    return labels, ranks_within(tables[:, whole]).mean(axis=0), tuple(seeds)


def _over_seeds(comparison: Comparison, seeds: Collection[int]) -> str:
    """Return over which seeds the places are, where some do not count."""
    few, every = len(seeds), len(comparison.study.seeds)
    if few == every:
        return ""
    return (
        f", over {few} of {every} seeds, those in which all methods have a number in all settings"
    )


def _rounding(comparison: Comparison) -> float:
    """Return the standard deviation of the difference of two mean ranks by rounding: over L
    settings they are multiples of 1 / L, so that differences which are the same for all seeds are
    not known exactly."""
    return 1 / (len(comparison.levels) * 6**0.5)


def overall(comparison: Comparison) -> list[OverallPlace]:
    """Return the places over all settings, the best first; empty where there are none."""
    labels, ranks, seeds = mean_ranks(comparison)
    if not len(ranks):
        return []
    found = places_of(labels, ranks, False, comparison.is_sequential, _rounding(comparison))
    means = dict(zip(labels, ranks.mean(axis=0).tolist(), strict=True))
    ends = {
        label: np.clip(comparison.interval(ranks[:, place].tolist()), 1, len(labels)).tolist()
        for place, label in enumerate(labels)
    }
    return [
        OverallPlace(**vars(one) | {"mean_rank": means[one.label]}, low=low, high=high, seeds=seeds)
        for one in found
        for low, high in [ends[one.label]]
    ]


def overall_table(comparison: Comparison) -> ReportTable | None:
    """Return the places of all methods over all settings; None where there are none."""
    found = overall(comparison)
    if not found:
        return None
    intervals = [
        f"{one.low:.2f} to {one.high:.2f}" if np.isfinite([one.low, one.high]).all() else "-"
        for one in found
    ]
    pairs = len(found) * (len(found) - 1) // 2
    written = comparison.column(comparison.study.metric).title
    counted = _over_seeds(comparison, found[0].seeds)
    caption = (
        f"by the rank in {written} within each of the {len(comparison.levels)} settings, averaged over them "
        f"seed by seed{counted}; the 95 % intervals of the places hold together, by paired tests over seeds "
        f"corrected for all {pairs} pairs (Holm), for these settings"
    )
    return table_of("Places over all settings", found, caption, intervals)


def overall_diagram(comparison: Comparison) -> Figure | None:
    """Draw the mean rank of each method over all settings, the interval of its place, and bars over
    those that cannot be told apart; None where there are no places."""
    title = f"Mean rank over {len(comparison.levels)} settings and seeds"
    written = comparison.column(comparison.study.metric)
    return diagram(comparison, overall(comparison), f"{title}\nin {written.title}")


def proposed_table(comparison: Comparison) -> ReportTable | None:
    """Return the place of each proposed method at every level, by its own comparisons; None where
    no method is proposed, or too few are compared."""
    rows, over_all = [], ""
    for label in comparison.proposed:
        for levels in comparison.levels:
            found = {one.label: one for one in places(comparison, levels)}
            if label not in found or len(found) < MIN_METHODS:
                continue
            tests = comparison.differences(comparison.study.metric, levels)
            tests = [one for one in tests if label in (one.a, one.b)]
            better, worse = (
                sum(getattr(one, who) == label for one in tests) for who in ("loser", "winner")
            )
            others = [one.b if one.a == label else one.a for one in tests if one.winner is None]
            alike = [other for other in others if other in found]
            place = f"{found[label].place} of {len(found)}"
            ends = ends_of(1 + better, len(found) - worse)
            rows.append([label, level_key(levels) or "all", named(alike), place, ends])
        if (row := own_row(comparison, label)) is not None:
            rows.append(row)
            over_all = (
                "; by mean rank by the method's own pairs over all levels, corrected for these"
                f"{_over_seeds(comparison, mean_ranks(comparison)[2])}"
            )
    if not rows:
        return None
    caption = (
        f"in {comparison.column(comparison.study.metric).title}, by the table of differences, which is "
        f"corrected for all pairs of its level (Holm){over_all}"
    )
    header = ["method", "levels", "cannot be told apart from", "place", "95 % interval"]
    return ReportTable.of("Place of what is proposed", header, rows, 3, caption)


def own_row(comparison: Comparison, label: str) -> list[str] | None:
    """Return the row of a proposed method over all settings, by its own comparisons, corrected for
    their number; None where there are no places."""
    labels, ranks, _ = mean_ranks(comparison)
    if label not in labels or not len(ranks):
        return None
    others = [one for one in labels if one != label]
    mine = ranks[:, labels.index(label)]
    gaps = [ranks[:, labels.index(one)] - mine for one in others]  # positive: this one is better
    p = holm([p_of(one, comparison.is_sequential, _rounding(comparison)) for one in gaps])
    told = [corrected < LEVEL for corrected in p]
    better = sum(one and gap.mean() < 0 for one, gap in zip(told, gaps, strict=True))
    worse = sum(one and gap.mean() > 0 for one, gap in zip(told, gaps, strict=True))
    alike = [other for other, one in zip(others, told, strict=True) if not one]
    place = 1 + sum(round(float(gap.mean()), 12) < 0 for gap in gaps)
    ends = ends_of(1 + better, len(labels) - worse)
    return [label, "all, by mean rank", named(alike), f"{place} of {len(labels)}", ends]
