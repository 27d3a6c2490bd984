"""Negative transfer: what taking part costs a client, against the same client alone.

The reference is the method in which every client trains alone (``LocalOnly``): its run with the
same seed, the same partition and the same level of the grid. Of client k under a method, in a
metric m of its own validation examples,

    gain_k = m_k - m_k(alone),   with the other sign where less of the metric is better

so that a negative gain is negative transfer. The same is done for each kind of test examples, where
``test`` has measured them by kind.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan

import numpy as np
import pandas as pd

from fl_lightning.run.clients import ABOUT, FILE
from fl_lightning.study.metric_names import direction
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.results.runs import ExcludedRun, FinishedRun, Results, selected_round
from fl_lightning.study.statistics import Interval, bootstrap_interval, mean_std

ALONE = "LocalOnly"
"""The class of the method in which every client trains alone."""
KIND = "kind/"
"""The beginning of the metrics that ``test`` measures by kind of example."""
COLUMNS = [
    *("levels", "method", "seed", "of", "name", "group", "val_examples", "metric"),
    *("value", "alone", "gain"),
]
NONE = "there is none, as of earlier releases and of runs without validation examples"


@dataclass(frozen=True)
class SeedSummary:
    """One number for each seed, and what is known of their mean; what the seeds cannot give is NaN.

    Args:
        values: the numbers by seed.
        mean, std: their mean and standard deviation (divided by n - 1).
        low, high: the interval of the mean that decides in this study.
        bootstrap_low, bootstrap_high: its bootstrap interval.
    """

    values: Mapping[int, float]
    mean: float
    std: float
    low: float
    high: float
    bootstrap_low: float
    bootstrap_high: float

    @classmethod
    def of(cls, values: pd.Series, interval: Interval) -> SeedSummary:
        """Summarise numbers whose index is the seed."""
        x = values.to_numpy(np.float64)
        return cls(values.to_dict(), *mean_std(x), *interval(x), *bootstrap_interval(x))


@dataclass(frozen=True)
class ClientTransfer:
    """What the clients of a method gain at one level, in one metric.

    Args:
        clients: the number of clients, over all seeds.
        gain: the mean gain over clients, by seed; None of the reference itself.
        harmed: the share of clients with a negative gain.
        worst_gain: the gain of the client that gains least.
        worst: the metric of the client that has the worst one.
    """

    clients: tuple[int, ...]
    gain: SeedSummary | None
    harmed: SeedSummary | None
    worst_gain: SeedSummary | None
    worst: SeedSummary


class NegativeTransfer:
    """The gains of all clients, and of all kinds of test examples, in a study.

    Args:
        results: the runs of the study.
        interval: the interval of a mean that decides.

    Attributes:
        alone: the label of the reference; empty where the study has none.
        left_out: the runs of which no client is compared, each with the reason.
    """

    def __init__(self, results: Results, interval: Interval) -> None:
        self.results, self.interval = results, interval
        self.study = results.study
        self.left_out: list[ExcludedRun] = []
        self._diverged: set[tuple[str, str, int, str]] = set()  # level, label, seed, metric
        self.alone = self._reference()

    def _reference(self) -> str:
        """Return the label that the study names, or else the only one whose runs are of
        ``LocalOnly``."""
        if self.study.alone:
            return self.study.alone
        found = {
            run.label for run in self.results.runs if run.record.metadata.get("method") == ALONE
        }
        labels = [label for label in self.study.methods if label in found]
        if len(labels) > 1:
            several = " and in ".join(labels)
            reason = f"clients train alone in {several}; write alone: {labels[0]} in the study file"
            self.left_out.append(ExcludedRun("negative transfer", reason))
        return labels[0] if len(labels) == 1 else ""

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each level, method, seed, client or kind, and metric: columns
        :data:`COLUMNS`.

        ``of`` is ``client`` or ``kind``. Rows of the reference have no ``alone`` and no ``gain``.
        """
        rows: list[tuple[object, ...]] = []
        references = {
            (level_key(run.levels), run.seed): run
            for run in self.results.runs
            if run.label == self.alone
        }
        for run in self.results.runs if references else ():
            reference = references.get((level_key(run.levels), run.seed))
            if reference is None or (run is not reference and run.label in self.study.controls):
                continue
            if reference.partition != run.partition:
                reason = f"its clients hold other examples than those of {reference.name}"
                self._leave_out(run.name, f"no gain of a client is known: {reason}")
                continue
            rows += self._rows(run, reference)
        return pd.DataFrame(rows, columns=COLUMNS)

    def _leave_out(self, name: str, reason: str) -> None:
        entry = ExcludedRun(name, reason)
        if entry not in self.left_out:
            self.left_out.append(entry)

    def _rows(self, run: FinishedRun, reference: FinishedRun) -> Iterator[tuple[object, ...]]:
        is_reference = run is reference
        alone: Mapping[tuple[str, str], float]
        for of, read in (("client", self._clients), ("kind", _kinds)):
            about, values = read(run)
            alone = {} if is_reference else read(reference)[1]
            for (name, metric), value in values.items():
                sign = direction(f"test/{metric}", self.study.task)
                if sign is None or not (is_reference or (name, metric) in alone):
                    continue
                other = nan if is_reference else alone[name, metric]
                place = (level_key(run.levels), run.label, run.seed)
                if not (isfinite(value) and (is_reference or isfinite(other))):
                    if of == "client":
                        self._diverged.add((*place, metric))
                    if not isfinite(value):
                        self._leave_out(f"{of} {name} of {run.name}", f"its {metric} is not finite")
                    continue
                found = (
                    (value, nan, nan) if is_reference else (value, other, sign * (value - other))
                )
                yield (*place, of, name, *about.get(name, ("", "")), metric, *found)

    def _clients(
        self, run: FinishedRun
    ) -> tuple[dict[str, tuple[str, str]], dict[tuple[str, str], float]]:
        """Return group and number of validation examples of each client, and its metrics in the
        round whose model the tables hold."""
        name, text = f"{FILE} of {run.name}", run.record.clients
        if not text:
            self._leave_out(name, f"{NONE}; its clients are not compared with {self.alone}'s")
            return {}, {}
        try:
            rows = list(csv.DictReader(io.StringIO(text)))
            rounds = {int(row["round"]) for row in rows}
            chosen = selected_round(run.record, self.study.selection)
            round = chosen if self.study.selection == "best_val" else max(rounds)
            rows = [row for row in rows if int(row["round"]) == round]
            about = {row["client"]: (row["group"], row["val_examples"]) for row in rows}
            values = {
                (row["client"], metric): float(cell)
                for row in rows
                for metric, cell in row.items()
                if metric not in ABOUT and cell
            }
        except (csv.Error, ValueError, KeyError, TypeError) as error:
            self._leave_out(name, f"it cannot be read ({type(error).__name__}: {error})")
            return {}, {}
        if not rows:
            self._leave_out(name, f"it is not of round {round:.0f}, which validation chose")
        return about, values

    def metrics(self, of: str) -> list[str]:
        """Return the primary metric and the loss, as far as ``client`` or ``kind`` has them."""
        known = set(self.frame.metric[self.frame.of == of])
        return [name for name in dict.fromkeys((self.study.task.primary, "loss")) if name in known]

    def rows(self, levels: Mapping[str, str], label: str, of: str, metric: str) -> pd.DataFrame:
        """Return the rows of one method."""
        frame = self.frame
        mine = (frame.levels == level_key(levels)) & (frame.method == label)
        return frame[mine & (frame.of == of) & (frame.metric == metric)]

    def clients(self, levels: Mapping[str, str], label: str, metric: str) -> ClientTransfer | None:
        """Return what the clients of a method gain; None where nothing is known.

        A seed counts where all of its clients have a number, see :meth:`diverged`: the others are a
        choice by the outcome.
        """
        rows = self.rows(levels, label, "client", metric)
        rows = rows[~rows.seed.isin(self.diverged(levels, label, metric))]
        if rows.empty:
            return None
        by_seed = rows.groupby("seed")
        counts = tuple(sorted(set(by_seed.size())))
        worst = by_seed.value.min() if self.sign(metric) > 0 else by_seed.value.max()
        if label == self.alone:
            return ClientTransfer(counts, None, None, None, self._summary(worst))
        gains = by_seed.gain
        harmed = gains.apply(lambda gain: float((gain < 0).mean()))
        found = (gains.mean(), harmed, gains.min(), worst)
        return ClientTransfer(counts, *map(self._summary, found))

    def diverged(self, levels: Mapping[str, str], label: str, metric: str) -> list[int]:
        """Return the seeds in which the metric of a client of a method, or of the same client
        alone, is not finite."""
        _ = self.frame  # notes them
        mine = level_key(levels), label
        return sorted(
            seed for *place, seed, of in self._diverged if (*place, of) == (*mine, metric)
        )

    def kinds(self, levels: Mapping[str, str], label: str, metric: str) -> dict[str, SeedSummary]:
        """Return what a method gains in each kind of test examples; of the reference, its
        metric."""
        rows = self.rows(levels, label, "kind", metric)
        what = "value" if label == self.alone else "gain"
        return {
            str(name): self._summary(found.set_index("seed")[what])
            for name, found in rows.groupby("name")
        }

    def _summary(self, values: pd.Series) -> SeedSummary:
        return SeedSummary.of(values, self.interval)

    def sign(self, metric: str) -> int:
        """Return 1 where more of a metric is better, -1 where less is."""
        return direction(f"test/{metric}", self.study.task) or 1

    def labels(self, of: str) -> Sequence[str]:
        """Return the methods that have rows, the reference first."""
        known = set(self.frame.method[self.frame.of == of])
        return sorted(
            known, key=lambda one: (one != self.alone, list(self.study.methods).index(one))
        )

    def csv(self) -> str:
        """Return all rows as CSV."""
        return self.frame.to_csv(index=False, lineterminator="\n")


def _kinds(run: FinishedRun) -> tuple[dict[str, tuple[str, str]], dict[tuple[str, str], float]]:
    """Return nothing more of the kinds, and the metrics of each, of the round whose model the
    tables hold."""
    found = {}
    for full, value in run.metrics.items():
        if full.startswith(KIND):
            name, _, metric = full.removeprefix(KIND).rpartition("/")
            found[name, metric] = value
    return {}, found
