"""Finished runs compared: within a level of the grid, methods against each other, seed by seed.

The *family* that Holm's correction is taken over is what is tested together for one metric at one level:
every proposed method against every other method (without proposed ones: every pair), and the pairs of the
study's ``p(A, B)``. A statement about the whole study is made only where it is true of every level, which
needs no further correction (Berger, 1982).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from math import isnan

from fl_lightning.study.metric_names import higher_is_better
from fl_lightning.study.results.runs import Results, Run, finite
from fl_lightning.study.spec.criteria import parse
from fl_lightning.study.statistics import PairedTest, mean_std, paired_test, with_holm

Levels = Mapping[str, str]


@dataclass(frozen=True)
class Difference:
    """a - b in one metric at one level.

    Args:
        metric: which.
        a, b: labels; of a degradation, ``a`` is the method's clean runs and ``b`` those under stress.
        seeds: that both have.
        unpaired: seeds that only one of them has.
        test: of the differences.
    """

    metric: str
    a: str
    b: str
    seeds: tuple[int, ...]
    unpaired: tuple[int, ...]
    test: PairedTest

    @property
    def winner(self) -> str | None:
        """The better one, outside the noise."""
        if not self.test.is_significant:
            return None
        return self.a if (self.test.mean > 0) == higher_is_better(self.metric) else self.b


@dataclass(frozen=True)
class Outcome:
    """Who is ahead at one level.

    Args:
        best_proposed: with the best mean; None when the study has none with finished runs.
        best_baseline: with the best mean of the others; without proposed methods, the second best of all.
        gap: best proposed - best baseline.
        winner: significantly better than every other method, or None.
        reason: of the winner, or why there is none.
    """

    best_proposed: str | None
    best_baseline: str | None
    gap: Difference | None
    winner: str | None
    reason: str


class Comparison:
    """All questions that a report asks of the runs of a study.

    Args:
        results: runs that :func:`fl_lightning.study.results.gather.check_comparable` lets pass.

    Raises:
        InputError: a criterion of the study cannot be read.
    """

    def __init__(self, results: Results) -> None:
        self.results, self.study = results, results.study
        self.labels = [
            label for label in self.study.methods if any(run.label == label for run in results.runs)
        ]
        self.proposed = [label for label in self.labels if label in self.study.proposed]
        self.baselines = [label for label in self.labels if label not in self.study.proposed]
        self.criteria = [parse(text, list(self.study.methods)) for text in self.study.criteria]
        self._differences: dict[tuple[str, str], list[Difference]] = {}
        self._runs = {(run.label, run.seed, tuple(run.levels.items())): run for run in results.runs}

    @cached_property
    def planned_levels(self) -> list[dict[str, str]]:
        """Every combination of the grid's levels, in the study's order; ``[{}]`` without a grid."""
        return [
            dict(zip(self.study.grid, names, strict=True)) for names in product(*self.study.grid.values())
        ]

    @cached_property
    def levels(self) -> list[dict[str, str]]:
        """Those that have a run."""
        return [
            levels
            for levels in self.planned_levels
            if any(dict(run.levels) == levels for run in self.results.runs)
        ]

    @cached_property
    def metrics(self) -> list[str]:
        return sorted({name for run in self.results.runs for name in run.metrics})

    @property
    def main_levels(self) -> dict[str, str]:
        """The level that stands for the study where one has to: under stress if there is a degradation, else
        the first."""
        entry = self.study.degradation
        return next(
            (one for one in self.levels if not entry or one[entry["axis"]] == entry["stressed"]),
            self.levels[0],
        )

    def runs(self, label: str, levels: Levels) -> dict[int, Run]:
        """By seed."""
        every = ((seed, self._runs.get((label, seed, tuple(levels.items())))) for seed in self.study.seeds)
        return {seed: run for seed, run in every if run is not None}

    def values(self, metric: str, label: str, levels: Levels) -> dict[int, float]:
        """By seed, where it is a number."""
        return finite(
            {
                seed: run.metrics[metric]
                for seed, run in self.runs(label, levels).items()
                if metric in run.metrics
            }
        )

    def not_numbers(self) -> list[tuple[Run, str]]:
        """Runs whose metric is NaN or infinite, so that it is in no mean; not the target that was never
        reached."""
        return [
            (run, name)
            for run in self.results.runs
            for name, value in run.metrics.items()
            if not finite({0: value}) and not name.startswith("target/")
        ]

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """The family: a, then b."""
        if self.proposed and self.baselines:
            found = [*product(self.proposed, self.baselines), *combinations(self.proposed, 2)]
        else:
            found = list(combinations(self.labels, 2))
        for criterion in self.criteria:
            if criterion.is_p:
                a, b = criterion.quantities[0].labels
                if a != b and {a, b} <= set(self.labels) and {a, b} not in [set(pair) for pair in found]:
                    found.append((a, b))
        return found

    def differences(self, metric: str, levels: Levels) -> list[Difference]:
        """Of every pair of the family, corrected for all of them."""
        key = (metric, name_of(levels))
        if key not in self._differences:
            found = [self.difference(metric, a, b, levels) for a, b in self.pairs]
            tests = with_holm([one.test for one in found])
            self._differences[key] = [replace(one, test=test) for one, test in zip(found, tests, strict=True)]
        return self._differences[key]

    def difference(self, metric: str, a: str, b: str, levels: Levels) -> Difference:
        """Of one pair, not corrected; its power is that of the family's strictest step."""
        return _paired(
            metric,
            a,
            b,
            self.values(metric, a, levels),
            self.values(metric, b, levels),
            max(1, len(self.pairs)),
        )

    def outcome(self, levels: Levels) -> Outcome:
        """Who is ahead in the primary metric."""
        metric = self.study.metric
        means = {
            label: mean_std(list(found.values()))[0]
            for label in self.labels
            if (found := self.values(metric, label, levels))
        }
        ranked = sorted(means, key=lambda label: means[label], reverse=higher_is_better(metric))
        if (
            set(self.study.proposed) & set(self.study.methods) < set(self.study.methods)
            and self.study.proposed
        ):
            proposed = [label for label in ranked if label in self.proposed]
            others = [label for label in ranked if label not in self.proposed]
            first, second = (next(iter(side), None) for side in (proposed, others))
        else:  # no side to take: the best two
            first, second, *_ = [*ranked, None, None]
        if first is None or second is None:
            return Outcome(first, second, None, None, f"no comparison: {self._missing(ranked)}")
        tested = self.differences(metric, levels)
        gap = next((one for one in tested if (one.a, one.b) == (first, second)), None) or flipped(
            next(one for one in tested if (one.b, one.a) == (first, second))
        )
        return Outcome(first, second, gap, *self._winner(ranked, tested, gap))

    def _missing(self, ranked: Sequence[str]) -> str:
        absent = [label for label in self.study.methods if label not in ranked]
        if not absent:
            return "there is only one method"
        return (
            f"{', '.join(absent)} {('have' if len(absent) > 1 else 'has')} no finished run with a number "
            f"for {self.study.metric}"
        )

    def _winner(
        self, ranked: Sequence[str], tested: Sequence[Difference], gap: Difference
    ) -> tuple[str | None, str]:
        if gap.test.n < 2:
            return (
                None,
                f"{gap.test.n} paired seeds: how much seeds differ is not known, and no winner is named",
            )
        ahead = {label: {self._loser(one) for one in tested if one.winner == label} for label in ranked}
        best = ranked[0]
        if ahead[best] == set(ranked[1:]):
            return best, f"{best} is significantly better than every other method"
        rivals = set(self.proposed) & set(ranked)
        over = [label for label in ranked if label not in self.proposed and rivals and ahead[label] >= rivals]
        if over:
            return (
                None,
                f"no proposed method is ahead: {', '.join(over)} significantly better than every one of them",
            )
        beaten = set(self.baselines) & set(ranked)
        over = [label for label in self.proposed if beaten and ahead.get(label, set()) >= beaten]
        if over:
            return (
                None,
                (
                    f"{', '.join(over)} significantly better than every baseline; between the proposed "
                    "methods it is not decided"
                ),
            )
        if isnan(gap.test.p_holm):
            return (
                None,
                (
                    "all seeds give the same difference, so that its spread cannot be estimated, and no "
                    "winner is named"
                ),
            )
        return (
            None,
            "inside the noise: no method is significantly better than every other, and no winner is named",
        )

    @staticmethod
    def _loser(one: Difference) -> str:
        return one.b if one.winner == one.a else one.a

    @property
    def other_levels(self) -> list[dict[str, str]]:
        """Combinations of the axes without that of the degradation, as far as they have a run."""
        return self.without_stressor(self.levels)

    def without_stressor(self, several: Sequence[Levels]) -> list[dict[str, str]]:
        """The levels of the other axes, each combination once."""
        axis = (self.study.degradation or {}).get("axis")
        rest = [tuple((name, level) for name, level in levels.items() if name != axis) for levels in several]
        return [dict(levels) for levels in dict.fromkeys(rest)]

    def stressed_and_clean(self, others: Levels) -> tuple[dict[str, str], dict[str, str]]:
        """Both levels of the degradation, beside ``others``, in the grid's order."""
        entry = self.study.degradation or {}
        every = [
            {axis: {**others, entry["axis"]: entry[key]}[axis] for axis in self.study.grid}
            for key in ("stressed", "clean")
        ]
        return every[0], every[1]

    def drops(self, metric: str, label: str, others: Levels) -> dict[int, float]:
        """How much worse the metric is under stress, by seed: positive is worse."""
        if not self.study.degradation:
            return {}
        stressed, clean = (self.values(metric, label, levels) for levels in self.stressed_and_clean(others))
        sign = 1 if higher_is_better(metric) else -1
        return {seed: sign * (clean[seed] - stressed[seed]) for seed in clean if seed in stressed}

    def degradations(self) -> Iterator[tuple[dict[str, str], str, Difference]]:
        """Of the primary metric, by the other axes' levels and by label."""
        for others in self.other_levels if self.study.degradation else []:
            for label in self.labels:
                drops = self.drops(self.study.metric, label, others)
                stressed, clean = (
                    self.values(self.study.metric, label, levels)
                    for levels in self.stressed_and_clean(others)
                )
                test = paired_test(list(drops.values()))
                unpaired = tuple(sorted(set(clean) ^ set(stressed)))
                yield others, label, Difference(self.study.metric, label, label, tuple(drops), unpaired, test)


def _paired(
    metric: str, a: str, b: str, of_a: Mapping[int, float], of_b: Mapping[int, float], family: int
) -> Difference:
    seeds = tuple(seed for seed in of_a if seed in of_b)
    unpaired = tuple(sorted(set(of_a) ^ set(of_b)))
    return Difference(
        metric, a, b, seeds, unpaired, paired_test([of_a[seed] - of_b[seed] for seed in seeds], family)
    )


def flipped(one: Difference) -> Difference:
    """b - a."""
    test = one.test
    turned = replace(
        test,
        differences=tuple(-x for x in test.differences),
        mean=-test.mean,
        low=-test.high,
        high=-test.low,
        bootstrap_low=-test.bootstrap_high,
        bootstrap_high=-test.bootstrap_low,
        t=-test.t,
        d_z=-test.d_z,
        g_z=-test.g_z,
    )
    return replace(one, a=one.b, b=one.a, test=turned)


def name_of(levels: Levels) -> str:
    """For a heading or a file: ``noise=on,bits=4``; empty without a grid."""
    return ",".join(f"{axis}={level}" for axis, level in levels.items())
