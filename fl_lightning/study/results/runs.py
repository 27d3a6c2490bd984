"""A finished run as the report sees it: one number per metric and one row per round."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import fsum, isfinite, nan
from statistics import fmean, median
from typing import TYPE_CHECKING

from fl_lightning.study.results.run_records import RunRecord

if TYPE_CHECKING:
    from fl_lightning.study.spec.plan import Study
    from fl_lightning.study.spec.stopping import Stopping

NO_RUN = "no run"
"""The beginning of the reason why a cell without a run is not in the comparison."""
WARM_UP_ROUNDS = 3
"""Rounds whose seconds do not count: memory is allocated and libraries choose their algorithms."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run of a study.

    Args:
        label: the label of its method.
        seed: its seed.
        levels: axis -> level.
        record: what was read of it.
        metrics: one number per metric, see :func:`run_metrics`.
    """

    label: str
    seed: int
    levels: Mapping[str, str]
    record: RunRecord
    metrics: Mapping[str, float]

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def rounds(self) -> int:
        return int(self.record.history[-1]["round"])

    @property
    def asked_rounds(self) -> int:
        """The rounds that it was to make: more than ``rounds`` where early stopping ended it."""
        early = self.record.metadata.get("stopped_early")
        return int(self.record.settings.get("trainer.max_rounds", self.rounds)) if early else self.rounds

    def over_rounds(self, aggregate: str, metric: str) -> float:
        """Return an aggregate of a metric over the rounds that have it.

        Args:
            aggregate: ``sum``, ``mean``, ``max``, ``min`` or ``last``.
            metric: a metric of the rounds.

        It is NaN where no round has it, or one has it as NaN or an infinity.
        """
        values = [row[metric] for row in self.record.history if metric in row]
        if not values or not all(map(isfinite, values)):
            return nan
        if aggregate == "last":
            return values[-1]
        functions: dict[str, Callable[[list[float]], float]] = {
            "sum": fsum,
            "mean": fmean,
            "max": max,
            "min": min,
        }
        return functions[aggregate](values)

    @property
    def dataset(self) -> str:
        return str(self.record.metadata.get("dataset"))

    @property
    def partition(self) -> str:
        return str(self.record.metadata.get("partition_sha256"))


@dataclass(frozen=True)
class ExcludedRun:
    """A run, or a cell without one, that is not in the comparison.

    Args:
        name: the name of the run or cell.
        reason: why it is left out.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Results:
    """The runs that there are to compare.

    Args:
        study: what was asked; for a plain folder of runs, what can be seen from them.
        runs: finished runs, one a cell, in the study's order.
        excluded: all others.
        stopping: where a study that adds seeds has stopped; None: its seeds are fixed.
    """

    study: Study
    runs: list[FinishedRun]
    excluded: list[ExcludedRun]
    stopping: Stopping | None = None


def run_metrics(record: RunRecord, target: float | None = None) -> dict[str, float]:
    """Return one number per metric of a run.

    - ``final/*`` is taken as the run gives it, and ``final/best_val_test_accuracy`` is the accuracy on the
      test set in the round that validation chose.
    - ``total/*`` is the bytes over all rounds, ``client/*`` the bytes per client that trained and round.
    - ``time/round`` and ``time/train`` are the median seconds of a round without the first three;
      ``time/total`` is the seconds of all rounds.
    - Of the other metrics of the rounds, the last one measured counts.
    - What ``test`` measured is added, except what has the name of a round's metric.
    - With a ``target`` accuracy, ``target/rounds`` and ``target/megabytes`` count until ``test/accuracy``
      first reaches it; they are NaN when it never does.
    """
    history = record.history
    columns: dict[str, list[float]] = {}
    for row in history:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    metrics = {
        name: values[-1]
        for name, values in columns.items()
        if not re.match("round$|comm/|clients/|time/", name)
    }
    metrics |= {name: value for name, value in record.metadata.items() if name.startswith("final/")}
    best = next((row for row in history if row["round"] == metrics.get("final/best_val_round")), {})
    if "test/accuracy" in best:
        metrics["final/best_val_test_accuracy"] = best["test/accuracy"]
    for name in ("upload", "download", "wasted", "total"):
        if f"comm/{name}_bytes" in columns:
            metrics[f"total/{name}_bytes"] = sum(columns[f"comm/{name}_bytes"])
    trained = sum(columns.get("clients/trained", []))
    for name in ("upload", "download") if trained else ():
        metrics[f"client/{name}_bytes"] = sum(columns.get(f"comm/{name}_bytes", [])) / trained
    for name in ("time/round", "time/train"):
        if name in columns:
            metrics[name] = median(columns[name][WARM_UP_ROUNDS:] or columns[name])
    if "time/round" in columns:
        metrics["time/total"] = sum(columns["time/round"])
    metrics |= {name: value for name, value in record.tested.items() if name not in metrics}
    if target is not None:
        metrics |= dict(zip(("target/rounds", "target/megabytes"), to_target(history, target), strict=True))
    return {name: float(metrics[name]) for name in sorted(metrics)}  # floats, as MLflow has them


def to_target(history: Iterable[Mapping[str, float]], target: float) -> tuple[float, float]:
    """Return the rounds, and the megabytes over the wire, until the test accuracy first reaches ``target``.

    >>> rows = [{"round": 1, "comm/total_bytes": 2_000_000, "test/accuracy": 0.5}]
    >>> rows += [{"round": 2, "comm/total_bytes": 1_000_000}]
    >>> to_target([*rows, {"round": 3, "comm/total_bytes": 500_000, "test/accuracy": 0.9}], 0.8)
    (3, 3.5)
    """
    total = 0.0
    for row in history:
        total += row.get("comm/total_bytes", 0)
        if row.get("test/accuracy", 0.0) >= target:
            return row["round"], total / 1e6
    return nan, nan


def with_one_checkpoint(results: Results) -> Results:
    """Leave out the metrics of ``test`` that belong to another checkpoint than those of other runs.

    ``last`` is the run's final round: a test made before the run went on belongs to an earlier one. When some
    runs were tested at ``last`` and some at ``best``, none of their tests counts, since nothing says which
    was meant. What is left out is listed in ``excluded``.
    """
    reasons = {run.record.where: reason for run in results.runs if (reason := _outdated_test(run))}
    tested = [run for run in results.runs if run.record.tested and run.record.where not in reasons]
    checkpoints = sorted({run.record.checkpoint for run in tested})
    for run in tested if len(checkpoints) > 1 else []:
        others = ", ".join(name for name in checkpoints if name != run.record.checkpoint)
        reasons[run.record.where] = (
            f"it is of the checkpoint {run.record.checkpoint}, those of other runs of {others}; test all "
            "with one --checkpoint"
        )
    runs = [
        _without_test(run, results.study.target_accuracy) if run.record.where in reasons else run
        for run in results.runs
    ]
    left_out = [
        ExcludedRun(f"test.json of {run.name}", reasons[run.record.where])
        for run in results.runs
        if run.record.where in reasons
    ]
    return replace(results, runs=runs, excluded=[*results.excluded, *left_out])


def _outdated_test(run: FinishedRun) -> str:
    record = run.record
    if not record.tested or record.checkpoint != "last" or record.tested_round == run.rounds:
        return ""
    return f"it is of round {record.tested_round}, the run has {run.rounds}; test it again"


def _without_test(run: FinishedRun, target: float | None) -> FinishedRun:
    record = replace(run.record, tested={})
    return replace(run, record=record, metrics=run_metrics(record, target))
