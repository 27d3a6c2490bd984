"""The comparison of finished runs: within a level of the grid, methods against each other, seed by
seed.

The *family* that Holm's correction is taken over is what is tested together for one metric at one
level: every proposed method against every other method (without proposed ones: every pair), and the
pairs of the study's ``p(A, B)``. A statement about the whole study is made only where it is true of
every level, which needs no further correction (Berger, 1982).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from math import isinf, isnan

import numpy as np
import pandas as pd

from fl_lightning.study.metric_names import (
    CLASSIFICATION,
    Column,
    TaskMetrics,
    column,
    higher_is_better,
)
from fl_lightning.study.plan.quantities import TRANSFER
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.plan.selection import Selection, selected_metric
from fl_lightning.study.ranks import times_behind
from fl_lightning.study.report.judging import NO_SPREAD
from fl_lightning.study.report.transfer import NegativeTransfer
from fl_lightning.study.results.runs import (
    ExcludedRun,
    FinishedRun,
    Results,
    selected,
    unlike_rounds,
)
from fl_lightning.study.statistics import (
    Interval,
    PairedTest,
    mean_std,
    paired_test,
    sequence_interval,
    t_interval,
    with_holm,
)

Levels = Mapping[str, str]
"""The level of every axis of the grid; empty without a grid."""
MIN_SEEDS = 5
"""The seeds that a winner takes, a convention. With n seeds Wilcoxon's p is 2^(1 - n) at least, so
that below six a p under 0.05 rests on normally distributed differences alone."""
INSIDE_NOISE = (
    "inside the noise: no method is significantly better than every other, and no winner is named"
)


@dataclass(frozen=True)
class Difference:
    """The paired difference a - b of two methods in one metric at one level.

    Args:
        metric: the metric.
        a, b: labels; of a degradation, ``a`` is the method's clean runs and ``b`` those under
            stress.
        seeds: the seeds that both have.
        unpaired: the seeds that only one of them has.
        test: the test of the differences.
        task: the task of the runs.
    """

    metric: str
    a: str
    b: str
    seeds: tuple[int, ...]
    unpaired: tuple[int, ...]
    test: PairedTest
    task: TaskMetrics = CLASSIFICATION

    @property
    def column(self) -> Column:
        """How the metric is written."""
        return column(self.metric, self.task)

    @property
    def winner(self) -> str | None:
        """The significantly better method, or None."""
        if not self.test.is_significant:
            return None
        return (
            self.a if (self.test.mean > 0) == higher_is_better(self.metric, self.task) else self.b
        )

    @property
    def loser(self) -> str | None:
        """The significantly worse method, or None."""
        return None if self.winner is None else self.b if self.winner == self.a else self.a

    def flipped(self) -> Difference:
        """Return b - a."""
        test = self.test
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
        return replace(self, a=self.b, b=self.a, test=turned)


@dataclass(frozen=True)
class Ranking:
    """The ranking of the methods at one level.

    Args:
        best_proposed: the best one, by paired differences; None when the study has none with
            finished runs.
        best_baseline: the best of the others; without proposed methods, the second best of all.
        gap: best proposed - best baseline.
        leader: the method that is significantly better than every other method, or None.
        winner: the same, where there are ``MIN_SEEDS`` seeds or more and it has learnt something.
        reason: why it is the winner, or why there is none.
    """

    best_proposed: str | None
    best_baseline: str | None
    gap: Difference | None
    leader: str | None
    winner: str | None
    reason: str


class Comparison:
    """Answers every question that a report asks of the runs of a study.

    ``frame`` holds one number a row: columns ``run label seed level metric value``, where ``level``
    is the :func:`level_key` the levels.

    Args:
        results: runs that :func:`fl_lightning.study.results.gather.check_comparable` accepts.
        interval: the interval of a mean that decides criteria; the t interval is for a number of
            seeds that was fixed before the first of them.

    Raises:
        InputError: a criterion of the study cannot be read.
    """

    def __init__(self, results: Results, interval: Interval | None = None) -> None:
        self.results, self.study = results, results.study
        self.interval = interval or (sequence_interval if self.is_sequential else t_interval)
        with_runs = {run.label for run in results.runs}
        self.labels = [label for label in self.study.methods if label in with_runs]
        self.proposed = [label for label in self.labels if label in self.study.proposed]
        self.baselines = [label for label in self.labels if label not in self.study.proposed]
        self.criteria, self.premises = self.study.parsed_criteria(), self.study.parsed_premises()
        rows = [
            (run.name, run.label, run.seed, level_key(run.levels), metric, value)
            for run in results.runs
            for metric, value in run.metrics.items()
        ]
        self.frame = pd.DataFrame(
            rows, columns=["run", "label", "seed", "level", "metric", "value"]
        )
        finite = self.frame[np.isfinite(self.frame.value)]
        self._values = {
            key: group.pivot(index="seed", columns="label", values="value")
            for key, group in finite.groupby(["metric", "level"])
        }
        self._differences: dict[tuple[str, str], list[Difference]] = {}

    @cached_property
    def _cells(self) -> dict[tuple[str, str], dict[int, FinishedRun]]:
        """The runs by method and level, and then by seed."""
        cells: dict[tuple[str, str], dict[int, FinishedRun]] = {}
        for run in self.results.runs:
            cells.setdefault((run.label, level_key(run.levels)), {})[run.seed] = run
        return cells

    @property
    def is_sequential(self) -> bool:
        """Whether seeds were added until the criteria were decided, here or in a published study,
        so that a confidence sequence decides."""
        return self.study.until is not None or any(
            one.is_sequential for one in self.study.published
        )

    @cached_property
    def levels(self) -> list[dict[str, str]]:
        """The planned levels that have a run."""
        with_runs = {level_key(run.levels) for run in self.results.runs}
        return [levels for levels in self.study.combinations() if level_key(levels) in with_runs]

    @cached_property
    def with_own_models(self) -> tuple[list[str], list[str]]:
        """The methods whose clients have models of their own, and the others."""
        own = {*self.frame.label[self.frame.metric.str.startswith("personal/")]}
        return [one for one in self.labels if one in own], [
            one for one in self.labels if one not in own
        ]

    @cached_property
    def metrics(self) -> list[str]:
        """The names of all metrics, sorted."""
        return sorted(self.frame.metric.unique())

    @cached_property
    def other(self) -> Comparison:
        """The same runs with the other model: the last round's beside the one that validation
        chose, and the other way round."""
        selection: Selection = "last" if self.study.selection == "best_val" else "best_val"
        study = self.study.with_metric(selected_metric(selection, self.study.task.primary))
        return Comparison(selected(replace(self.results, study=study)), self.interval)

    @cached_property
    def transfer(self) -> NegativeTransfer:
        """What taking part gains or costs the clients; it is empty where no method trains clients
        alone."""
        return NegativeTransfer(self.results, self.interval)

    @property
    def not_counted(self) -> list[ExcludedRun]:
        """Everything that is in no table, or not in all tables, with the reason."""
        _ = self.transfer.frame  # says what it leaves out
        return [*self.results.not_counted, *self.transfer.left_out]

    def column(self, metric: str) -> Column:
        """Return how a metric is written."""
        return column(metric, self.study.task)

    def higher_is_better(self, metric: str) -> bool:
        """Return whether more of a metric is better.

        Raises:
            InputError: it is not known.
        """
        return higher_is_better(metric, self.study.task)

    @property
    def main_levels(self) -> dict[str, str]:
        """The level that stands for the whole study: under stress if there is a degradation, else
        the first."""
        entry = self.study.degradation
        stressed = (
            one for one in self.levels if not entry or one[entry["axis"]] == entry["stressed"]
        )
        return next(stressed, self.levels[0])

    def runs(self, label: str, levels: Levels) -> dict[int, FinishedRun]:
        """Return the runs of one method at one level, by seed."""
        found = self._cells.get((label, level_key(levels)), {})
        return {seed: found[seed] for seed in self.study.seeds if seed in found}

    def table(self, metric: str, levels: Levels) -> pd.DataFrame:
        """Return the metric as ``[seeds, methods]``, with NaN where a run is missing or has no
        number."""
        table = self._values.get((metric, level_key(levels)), pd.DataFrame(dtype=float))
        return table.reindex(index=self.study.seeds, columns=list(self.study.methods))

    def values(self, metric: str, label: str, levels: Levels) -> pd.Series:
        """Return the numbers of one method, by seed."""
        return self.table(metric, levels)[label].dropna()

    def measured(self, metric: str, label: str, levels: Levels) -> pd.Series:
        """Return the numbers of one method, by seed: a metric of its runs, or one of negative
        transfer."""
        if metric not in TRANSFER.values():
            return self.values(metric, label, levels)
        found = self.transfer.clients(levels, label, self.study.task.primary)
        gains = (found.gain, found.harmed, found.worst_gain, found.worst) if found else (None,) * 4
        of_metric = dict(zip(TRANSFER.values(), gains, strict=True))[metric]
        return pd.Series(of_metric.values if of_metric else {}, dtype=float).dropna()

    def over_rounds(self, aggregate: str, metric: str, label: str, levels: Levels) -> pd.Series:
        """Return the aggregate over rounds of a metric of one method, by seed."""
        found = {
            seed: run.over_rounds(aggregate, metric)
            for seed, run in self.runs(label, levels).items()
        }
        return pd.Series(found, dtype=float).dropna()

    def counted(self, metric: str, label: str, levels: Levels) -> pd.Series:
        """Return what was counted in the runs of one method, by seed; infinity is a number of it,
        as it is of an epsilon."""
        found = {seed: run.metrics.get(metric) for seed, run in self.runs(label, levels).items()}
        return pd.Series(found, dtype=float).dropna()

    def without_number(self, metric: str, label: str, levels: Levels) -> list[int]:
        """Return the seeds of one method that have a run, and no finite number of a metric."""
        there = self.measured(metric, label, levels).index
        return [seed for seed in self.runs(label, levels) if seed not in there]

    def unlike_rounds(self, metric: str, levels: Levels) -> str:
        """Return over how many rounds the runs at one level are, where these differ and a metric
        cannot be compared therefore; else empty."""
        found = [run for label in self.labels for run in self.runs(label, levels).values()]
        return unlike_rounds(metric, found)

    def not_numbers(self) -> list[dict[str, str]]:
        """Return ``run`` and ``metric`` of each value that is NaN or infinite, so that it is in no
        mean.

        A target that was never reached is not among them.
        """
        wrong = ~np.isfinite(self.frame.value) & ~self.frame.metric.str.startswith("target/")
        found = self.frame[wrong].drop_duplicates(["run", "label", "metric"])  # of several levels
        return found[["run", "metric"]].to_dict("records")

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs (a, b) of the family, also those with a method that has no run."""
        labels = list(self.study.methods)
        if self.proposed and self.baselines:
            proposed = [label for label in labels if label in self.study.proposed]
            baselines = [label for label in labels if label not in proposed]
            pairs = [*product(proposed, baselines), *combinations(proposed, 2)]
        else:
            pairs = list(combinations(labels, 2))
        for criterion in (*self.criteria, *self.premises):
            for quantity in criterion.quantities:
                if quantity.name == "p":
                    a, b = quantity.labels
                    if {a, b} not in map(set, pairs):
                        pairs.append((a, b))
        return pairs

    def differences(self, metric: str, levels: Levels) -> list[Difference]:
        """Return the difference of every pair of methods with runs, corrected for the whole
        family."""
        key = (metric, level_key(levels))
        if key not in self._differences:
            table, family = self.table(metric, levels), max(1, len(self.pairs))
            found = [
                self._tested(metric, (a, b), (table[a], table[b]), family) for a, b in self.pairs
            ]
            tests = with_holm([one.test for one in found])
            self._differences[key] = [
                replace(one, test=test)
                for one, test in zip(found, tests, strict=True)
                if {one.a, one.b} <= {*self.labels}
            ]
        return self._differences[key]

    def _tested(
        self, metric: str, labels: tuple[str, str], values: tuple[pd.Series, pd.Series], family: int
    ) -> Difference:
        """Test the difference of two series over the same seeds, with NaN where there is no value.

        Where seeds are added, it is tested by a confidence sequence.
        """
        seeds, (of_a, of_b) = values[0].index, (one.to_numpy(float) for one in values)
        differences, single = of_a - of_b, np.isnan(of_a) ^ np.isnan(of_b)
        both = ~np.isnan(differences)
        test = paired_test(differences[both].tolist(), family, self.is_sequential)
        paired, unpaired = (tuple(seeds[which].tolist()) for which in (both, single))
        return Difference(metric, *labels, paired, tuple(sorted(unpaired)), test, self.study.task)

    def difference(self, metric: str, a: str, b: str, levels: Levels) -> Difference | None:
        """Return a - b from the family of tests, or None where the family has no such pair."""
        for one in self.differences(metric, levels):
            if {one.a, one.b} == {a, b}:
                return one if one.a == a else one.flipped()
        return None

    def means(self, metric: str, levels: Levels) -> dict[str, float]:
        """Return the mean over seeds of each method that has a number."""
        table = self.table(metric, levels)
        means = {label: mean_std(table[label].dropna())[0] for label in self.labels}
        return {label: mean for label, mean in means.items() if not isnan(mean)}

    def order(self, metric: str, levels: Levels) -> list[str]:
        """Return the methods that have a number, the best first: by paired differences, of which
        seeds that a method lacks are no part, and then by means."""
        sign, means = 1 if self.higher_is_better(metric) else -1, self.means(metric, levels)
        table = sign * self.table(metric, levels)[list(means)].to_numpy(float)
        behind = dict(zip(means, times_behind(table).tolist(), strict=True))
        return sorted(means, key=lambda label: (behind[label], -sign * means[label]))

    def ranking(self, levels: Levels) -> Ranking:
        """Return which methods lead in the primary metric."""
        metric = self.study.metric
        ranked = self.order(metric, levels)
        proposed = [label for label in ranked if label in self.proposed]
        others = [label for label in ranked if label not in self.proposed]
        if 0 < len({*self.study.proposed} & {*self.study.methods}) < len(self.study.methods):
            first, second = (next(iter(side), None) for side in (proposed, others))
        else:  # all methods, or none, are proposed: the best two
            first, second, *_ = [*ranked, None, None]
        if first is None or second is None:
            return Ranking(
                first, second, None, None, None, f"no comparison: {self._missing(ranked)}"
            )
        gap = self.difference(metric, first, second, levels)
        assert gap is not None  # every pair that a ranking can name is in the family
        leader, reason = self._leader(ranked, self.differences(metric, levels), gap)
        silent = [one for one in self.study.methods if one not in ranked]
        if leader is not None and silent:
            reason += f" that has a number ({', '.join(silent)}: none)"
        winner = leader
        if leader is not None and (doubt := self._doubt(leader, levels)):
            winner, reason = None, f"{reason}, {doubt}"
        return Ranking(first, second, gap, leader, winner, reason)

    def _doubt(self, leader: str, levels: Levels) -> str:
        """Return why a method that is significantly better than every other one is not called the
        winner; empty where it is."""
        metric = self.study.metric
        if rounds := self.unlike_rounds(metric, levels):
            return f"but {metric} of runs of {rounds} rounds cannot be compared"
        if lost := self.without_number(metric, leader, levels):
            return f"but in seed {', '.join(map(str, lost))} its {metric} is not a number"
        numbered = self.means(metric, levels)
        tests = [
            one.test
            for one in self.differences(metric, levels)
            if leader in (one.a, one.b) and {one.a, one.b} <= numbered.keys()
        ]
        fewest = min(test.n for test in tests)
        if fewest < MIN_SEEDS:
            return (
                f"but no winner is named with fewer than {MIN_SEEDS} seeds: with {fewest}, so small a p "
                "rests on normally distributed differences alone (Wilcoxon's cannot be below "
                f"{min(1.0, 2.0 ** (1 - fewest)):.3g})"
            )
        if self.has_learnt(leader, levels) is False:
            metric, guess = self._against_guess([leader], levels)
            return f"but it has not learnt anything: its {metric} is not {guess}"
        return ""

    def has_learnt(self, label: str, levels: Levels) -> bool | None:
        """Return whether the primary metric of a method is better than that of a constant guess:
        whether the whole 95 % interval of its mean over seeds is. None where the runs do not tell.

        A constant guess is the best single answer to all examples of the test set, such as its most
        frequent class, or the mean of its targets.
        """
        guesses = {seed: run.constant_guess for seed, run in self.runs(label, levels).items()}
        values = self.values(self.study.selected_metric, label, levels)
        sign = 1 if self.study.task.higher_is_better else -1
        gains = sign * (values - pd.Series(guesses, dtype=float)).reindex(values.index)
        if gains.empty or gains.isna().any():
            return None
        if gains.mean() <= 0:
            return False
        if len(gains) == 1:
            return None
        low, _ = self.interval(gains.tolist())
        if isinf(low):  # a sequence of intervals says nothing yet
            return None
        return isnan(low) or low > 0  # of equal values there is no interval

    def _against_guess(self, labels: Sequence[str], levels: Levels) -> tuple[str, str]:
        """Return the primary metric's title, and the words for what is better than a constant
        guess."""
        runs = [run for label in labels for run in self.runs(label, levels).values()]
        written = self.column(self.study.selected_metric)
        ends = (choose(run.constant_guess for run in runs) for choose in (min, max))
        shown = " to ".join(dict.fromkeys(map(written.number, ends)))
        guess = f"better, by the 95 % interval, than {shown}, which one answer to all test examples can have"
        return written.title, guess

    def nobody_learnt(self, levels: Levels) -> str:
        """Return a sentence where it is known of every method that it has not learnt anything; else
        empty."""
        labels = [label for label in self.labels if self.runs(label, levels)]
        if not labels or any(self.has_learnt(label, levels) is not False for label in labels):
            return ""
        metric, guess = self._against_guess(labels, levels)
        return f"Nobody has learnt anything: no method's {metric} is {guess}."

    def _missing(self, ranked: Sequence[str]) -> str:
        absent = [label for label in self.study.methods if label not in ranked]
        if not absent:
            return "there is only one method"
        have = "have" if len(absent) > 1 else "has"
        return f"{', '.join(absent)} {have} no finished run with a number for {self.study.metric}"

    def _leader(
        self, ranked: Sequence[str], tested: Sequence[Difference], gap: Difference
    ) -> tuple[str | None, str]:
        if gap.test.n < 2:
            seeds = f"{gap.test.n} paired seed{'s' * (gap.test.n != 1)}"
            reason = f"{seeds}: how much seeds differ is not known, and no winner is named"
            return None, reason
        beaten = {label: {one.loser for one in tested if one.winner == label} for label in ranked}
        best = ranked[0]
        if beaten[best] == set(ranked[1:]):
            return best, f"{best} is significantly better than every other method"
        proposed, baselines = (set(side) & set(ranked) for side in (self.proposed, self.baselines))
        ahead = [
            label
            for label in ranked
            if label in baselines and proposed and beaten[label] >= proposed
        ]
        if ahead:
            names = ", ".join(ahead)
            return (
                None,
                f"no proposed method is ahead: {names} significantly better than every one of them",
            )
        ahead = [
            label for label in self.proposed if baselines and beaten.get(label, set()) >= baselines
        ]
        if ahead:
            names = ", ".join(ahead)
            undecided = "between the proposed methods it is not decided"
            return None, f"{names} significantly better than every baseline; {undecided}"
        return None, f"{NO_SPREAD}, and no winner is named" if isnan(
            gap.test.p_holm
        ) else INSIDE_NOISE

    def without_stressor(self, several: Sequence[Levels]) -> list[dict[str, str]]:
        """Return each combination of the other axes' levels once, without the axis of the
        degradation."""
        axis = (self.study.degradation or {}).get("axis")
        rest = [
            tuple((name, level) for name, level in levels.items() if name != axis)
            for levels in several
        ]
        return [dict(levels) for levels in dict.fromkeys(rest)]

    def stressed_and_clean(self, others: Levels) -> tuple[dict[str, str], dict[str, str]]:
        """Return both levels of the degradation, completed by ``others``, with axes in the grid's
        order."""
        entry = self.study.degradation or {}
        stressed, clean = (
            {axis: {**others, entry["axis"]: entry[key]}[axis] for axis in self.study.grid}
            for key in ("stressed", "clean")
        )
        return stressed, clean

    def drops(self, metric: str, label: str, others: Levels) -> pd.Series:
        """Return how much worse the metric is under stress, by seed: positive is worse."""
        if not self.study.degradation:
            return pd.Series(dtype=float)
        of_stressed, of_clean = self._degraded(metric, label, others)
        return (of_clean - of_stressed).dropna()

    def degradations(self) -> Iterator[tuple[dict[str, str], str, Difference]]:
        """Yield the other axes' levels, the label, and how much worse the primary metric is under
        stress."""
        metric = self.study.metric
        for others in self.without_stressor(self.levels) if self.study.degradation else []:
            for label in self.labels:
                of_stressed, of_clean = self._degraded(metric, label, others)
                yield (
                    others,
                    label,
                    self._tested(metric, (label, label), (of_clean, of_stressed), 1),
                )

    def _degraded(self, metric: str, label: str, others: Levels) -> list[pd.Series]:
        """Return the metric with and without stress, with its sign changed where lower is
        better."""
        sign = 1 if self.higher_is_better(metric) else -1
        return [
            sign * self.table(metric, levels)[label] for levels in self.stressed_and_clean(others)
        ]
