"""A finished run as the report sees it: one number per metric and one row per round."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum, inf, isnan, nan
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from fl_lightning.config.documents import document_hash
from fl_lightning.config.settings import is_number
from fl_lightning.metrics.declared import Metric
from fl_lightning.study.metric_names import CLASSIFICATION, TaskMetrics
from fl_lightning.study.plan.protocol import protocol_of
from fl_lightning.study.plan.quantities import OVER
from fl_lightning.study.results.run_records import RunRecord

if TYPE_CHECKING:
    from fl_lightning.study.plan.selection import Selection
    from fl_lightning.study.plan.stopping import Stopping
    from fl_lightning.study.plan.study import Study

NO_RUN = "no run"
"""The beginning of the reason why a cell without a run is not in the comparison."""
FAILED = ", failed in the sweep"
"""The end of the reason where a run was left by a cell that failed."""
HASHES = ("content_sha256", "partition_sha256", "protocol_sha256")
"""What ``runs.csv`` says of a run beside its numbers: what runs have in common that can be
paired."""
FILES = {"clock": "trainer.clock", "topology": "trainer.topology", "costs": "model.costs"}
"""Settings that read files, by the name of the SHA-256 that runs keep of them."""
OF_DATA = ("tokens", "test_owners", "public")
"""What runs keep a SHA-256 of beside that of all examples, where their data have it; runs of before
may lack it."""
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
        metrics: one number per metric, see :func:`run_metrics`; :func:`selected` fills them in.
        published: of a published run, the selection that its metrics are of; None: they follow from
            the record.
    """

    label: str
    seed: int
    levels: Mapping[str, str]
    record: RunRecord
    metrics: Mapping[str, float] = field(default_factory=dict)
    published: Selection | None = None

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
        if early:
            return int(self.record.settings.get("trainer.max_rounds", self.rounds))
        return self.rounds

    @property
    def has_versions(self) -> bool:
        """Whether its rounds are asynchronous: versions of the model, each made of a few
        uploads."""
        return any("clients/staleness" in row for row in self.record.history[:1])

    @property
    def last_evaluations(self) -> tuple[int, ...]:
        """The rounds of the last five evaluations on the test set, or of all where there are
        fewer."""
        name = f"test/{self.task.primary}"
        return tuple(int(row["round"]) for row in self.record.history if name in row)[-5:]

    def over_rounds(self, aggregate: str, metric: str) -> float:
        """Return an aggregate of a metric over the rounds that have it, or of a quotient of two.

        Args:
            aggregate: ``sum``, ``mean``, ``max``, ``min`` or ``last``.
            metric: a metric of the rounds, or two with ``OVER`` between them, divided round by
                round.

        It is NaN where no round has it, or one has it as NaN.
        """
        above, _, below = metric.partition(OVER)
        values = [
            (row[above] / row[below] if row[below] else nan) if below else row[above]
            for row in self.record.history
            if above in row and (not below or below in row)
        ]
        if not values or any(map(isnan, values)) or {inf, -inf} <= {*values}:
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
    def content(self) -> str:
        """SHA-256 of all examples; empty where the name of the data set says which they are, and
        for runs of before."""
        return str(self.record.metadata.get("content_sha256") or "")

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of the files that settings read, by the names of :data:`FILES`."""
        hashes = {name: self.record.metadata.get(f"{name}_sha256") for name in FILES}
        return {name: str(value) for name, value in hashes.items() if value}

    @property
    def shared_files(self) -> dict[str, str]:
        """Those of the files that belong to the protocol, and not to a method."""
        return {name: value for name, value in self.files.items() if name != "costs"}

    @property
    def data_hashes(self) -> dict[str, str]:
        """SHA-256 of what its data have of :data:`OF_DATA`."""
        hashes = {name: self.record.metadata.get(f"{name}_sha256") for name in OF_DATA}
        return {name: str(value) for name, value in hashes.items() if value}

    @property
    def label_of_joules(self) -> str:
        """Where its joules come from; empty: it has none, or it is of before."""
        return str(self.record.metadata.get("costs_label") or "")

    @property
    def task(self) -> TaskMetrics:
        return TaskMetrics.of_run(self.record.metadata)

    @property
    def constant_guess(self) -> float:
        """The best value of the primary metric that one answer to all examples of the test set has;
        NaN where the run does not say, as runs of before and some tasks do not."""
        found = self.record.metadata.get("constant_guess")
        return float(found) if isinstance(found, (int, float)) else nan

    @property
    def partition(self) -> str:
        return str(self.record.metadata.get("partition_sha256"))

    @cached_property
    def protocol(self) -> dict[str, Any]:
        """Every setting that is not the method's own; empty where the settings are not known, or
        MLflow keeps them as text."""
        return (
            protocol_of(self.record.settings) if self.record.settings and self.record.typed else {}
        )

    @property
    def protocol_sha256(self) -> str:
        """The hash of the protocol; empty where it is not known."""
        known = self.record.metadata.get("protocol_sha256")
        return str(known or (document_hash(self.protocol) if self.protocol else ""))

    @property
    def hashes(self) -> dict[str, str]:
        """:data:`HASHES` of this run."""
        return dict(zip(HASHES, (self.content, self.partition, self.protocol_sha256), strict=True))


def unlike_rounds(metric: str, runs: Iterable[FinishedRun]) -> str:
    """Return over how many or which rounds some runs are, as in ``3 to 10``, where a metric cannot
    be compared because they differ; else empty.

    The area is over the rounds that a run has made. Of asynchronous ones a round is another thing,
    so that rounds until a target are not compared with synchronous ones, nor where runs were to
    make another number of them.
    """
    found = [*runs]
    own = [run for run in found if run.published is None]  # the others have one protocol
    kinds = {run.has_versions for run in own}
    if metric.startswith("final/auc_"):
        rounds = {run.rounds for run in found}
    elif metric == "target/rounds" and True in kinds:
        rounds = {run.asked_rounds for run in own}
    else:
        return ""
    if len(rounds) > 1:
        return f"{min(rounds)} to {max(rounds)}"
    return "synchronous and asynchronous" if len(kinds) > 1 else ""


@dataclass(frozen=True)
class ExcludedRun:
    """A run, or a cell without one, that is not in the comparison.

    Args:
        name: the name of the run or cell.
        reason: why it is left out.
    """

    name: str
    reason: str

    @property
    def has_failed(self) -> bool:
        """Whether the sweep tried it, and it failed."""
        return self.reason == f"{NO_RUN}; failed" or self.reason.endswith(FAILED)


@dataclass(frozen=True)
class Results:
    """The runs that there are to compare.

    Args:
        study: what was asked; for a plain folder of runs, what can be seen from them.
        runs: finished runs, one for each method, seed and level, in the study's order; one that is
            compared at every level of the grid stands there once for each.
        excluded: all others.
        stopping: where a study that adds seeds has stopped; None: its seeds are fixed.
        other_tests: results of ``test`` that are of another round than the study's tables, or of
            other weights.
        records: everything that was read, finished or not.
    """

    study: Study
    runs: list[FinishedRun]
    excluded: list[ExcludedRun]
    stopping: Stopping | None = None
    other_tests: list[ExcludedRun] = field(default_factory=list)
    records: list[RunRecord] = field(default_factory=list)

    @property
    def distinct(self) -> list[FinishedRun]:
        """Every run once that is not published, also one that is compared at every level of the
        grid."""
        return list({run.record.where: run for run in reversed(self.own)}.values())[::-1]

    @property
    def own(self) -> list[FinishedRun]:
        """The runs that are not published."""
        return [run for run in self.runs if run.published is None]

    @property
    def not_counted(self) -> list[ExcludedRun]:
        """Everything that is in no table, with the reason."""
        return [*self.excluded, *self.other_tests]


def run_metrics(
    record: RunRecord,
    target: float | None = None,
    selection: Selection = "last5",
    task: TaskMetrics = CLASSIFICATION,
) -> dict[str, float]:
    """Return one number per metric of a run, all of one model: that of :func:`selected_round`.

    - ``final/*`` is taken as the run gives it, and ``final/best_val_test_accuracy``, or that of
      another primary metric, is its value on the test set in the round that validation chose.
    - ``total/*`` is the bytes over all rounds, ``total/bits_pruned`` and ``total/bits_moved`` the
      sums of ``bits/pruned`` and ``bits/moved``, and ``client/*`` the bytes per client that trained
      and round, without wasted ones; the broadcasts of clients whose upload was lost are counted.
    - ``clock/seconds`` are those of all rounds.
    - ``privacy/epsilon`` is that of all rounds, whichever is selected: all models were to be seen;
      of a deployment also of rounds that were taken back.
    - ``time/round`` and ``time/train`` are the median seconds of a round without the first three;
      ``time/total`` is the seconds of all rounds.
    - Of the other metrics of the rounds, the last one measured until the selected round counts; of
      ``cost/train_*`` the last of a round in which anybody trained.
    - What ``test`` measured of that round is added, except what the round has itself.
    - ``target/rounds_to_purity`` is the first round from which on each cluster of clients had
      experts of its own; it is NaN where the run does not end so.
    - With a ``target``, ``target/rounds`` and ``target/megabytes`` count until the primary metric
      on the test set first reaches it; they are NaN when it never does.

    Args:
        record: what was read of the run.
        target: a value of the primary metric.
        selection: the study's.
        task: the run's.
    """
    history, chosen = record.history, selected_round(record, selection)
    columns: dict[str, list[float]] = {}
    for row in history:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    metrics = {
        name: value
        for row in history
        if row["round"] <= chosen  # of nothing, where no round was chosen
        for name, value in row.items()
        if not re.match("round$|comm/|clients/|time/|privacy/epsilon$", name)
        and (value or not name.startswith("cost/train_"))  # 0 where nobody trained
    }
    metrics |= {name: value for name, value in record.metadata.items() if name.startswith("final/")}
    best = next((row for row in history if row["round"] == metrics.get("final/best_val_round")), {})
    if f"test/{task.primary}" in best:
        metrics[f"final/best_val_test_{task.primary}"] = best[f"test/{task.primary}"]
    for name in ("upload", "download", "wasted", "total"):
        if f"comm/{name}_bytes" in columns:
            metrics[f"total/{name}_bytes"] = sum(columns[f"comm/{name}_bytes"])
    for name in ("pruned", "moved"):
        if f"bits/{name}" in columns:
            metrics[f"total/bits_{name}"] = sum(columns[f"bits/{name}"])
    if "privacy/epsilon" in history[-1]:
        metrics["privacy/epsilon"] = max(
            history[-1]["privacy/epsilon"], _epsilon_spent(record.metadata)
        )
    if "clock/seconds" in columns:
        metrics["clock/seconds"] = columns["clock/seconds"][-1]
    trained = sum(columns.get("clients/trained", []))
    if trained:
        up, wasted, down = (
            sum(columns.get(f"comm/{name}_bytes", [])) for name in ("upload", "wasted", "download")
        )
        metrics["client/upload_bytes"] = (up - wasted) / trained
        metrics["client/download_bytes"] = down / trained
    for name in ("time/round", "time/train"):
        if name in columns:
            metrics[name] = median(columns[name][WARM_UP_ROUNDS:] or columns[name])
    if "time/round" in columns:
        metrics["time/total"] = sum(columns["time/round"])
    if record.test.round == chosen:
        metrics = {**record.test.metrics, **metrics}
    if "router/purity" in columns:
        metrics["target/rounds_to_purity"] = to_purity(history)
    if target is not None:
        reached = to_target(history, target, task)
        names = ["target/rounds", "target/megabytes", f"target/seconds_to_{task.primary}"]
        metrics |= dict(
            zip(names, reached if "clock/seconds" in columns else reached[:2], strict=False)
        )
    return {name: float(metrics[name]) for name in sorted(metrics)}  # floats, as MLflow has them


def _epsilon_spent(metadata: Mapping[str, Any]) -> float:
    """Return epsilon of all noisy sums that a deployment has begun, by its ``metadata.json``; 0
    where that does not say."""
    found: Any = metadata
    for name in ("deployment", "privacy", "epsilon"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if is_number(found) else 0.0


def selected_round(record: RunRecord, selection: Selection) -> float:
    """Return the round whose model the tables hold; NaN where validation was to choose and none was
    made."""
    if selection == "best_val":
        return float(record.metadata.get("final/best_val_round", nan))
    return float(record.history[-1]["round"])


def to_target(
    history: Iterable[Mapping[str, float]], target: float, task: TaskMetrics = CLASSIFICATION
) -> tuple[float, float, float]:
    """Return the rounds, the megabytes over the wire and, of a run with a clock, the virtual
    seconds until the primary metric on the test set first reaches ``target``.

    >>> rows = [{"round": 1, "comm/total_bytes": 2_000_000, "test/accuracy": 0.5}]
    >>> rows += [{"round": 2, "comm/total_bytes": 1_000_000}]
    >>> last = {"round": 3, "comm/total_bytes": 500_000, "test/accuracy": 0.9, "clock/seconds": 12.5}
    >>> to_target([*rows, last], 0.8)
    (3, 3.5, 12.5)
    """
    total, sign = 0.0, 1 if task.higher_is_better else -1
    for row in history:
        total += row.get("comm/total_bytes", 0)
        if sign * row.get(f"test/{task.primary}", nan) >= sign * target:
            return row["round"], total / 1e6, row.get("clock/seconds", nan)
    return nan, nan, nan


def to_purity(history: Iterable[Mapping[str, float]]) -> float:
    """Return the first round from which on ``router/purity`` is 1 wherever it was measured; NaN
    where it is not at the end.

    >>> to_purity({"round": r, "router/purity": p} for r, p in enumerate((1.0, 0.75, 1.0, 1.0), 1))
    3
    """
    found = nan
    for row in history:
        if row.get("router/purity", 1.0) < 1.0:
            found = nan
        elif "router/purity" in row and isnan(found):
            found = row["round"]
    return found


def selected(results: Results) -> Results:
    """Give every run the metrics of the model that the study selects, and the study the task of its
    runs.

    What ``test`` measured of another round, or of other weights, is left out, and listed in
    ``other_tests``.
    """
    study, runs, others = results.study, [], []
    if results.runs:
        study = study.with_task(replace(results.runs[0].task, declared=_agreed(results.runs)))
    for run in results.runs:
        if run.published is not None:
            runs.append(run if run.published == study.selection else replace(run, metrics={}))
            continue
        chosen = selected_round(run.record, study.selection)
        record = run.record.tested_at(chosen)
        run = replace(run, record=record)
        why = record.test_problem
        if record.test.metrics and record.test.round != chosen:
            why = _why_other(run, chosen, study.selection)
        elif record.test.is_there and record.is_test_of_others:
            why = f"it is of other weights: round {chosen:.0f} was made anew since; test it again"
            record = record.without_test()
            run = replace(run, record=record)
        other = ExcludedRun(f"test.json of {run.name}", why)
        if why and other not in others:  # a run may be compared at several levels
            others.append(other)
        metrics = run_metrics(record, study.target_value, study.selection, study.task)
        runs.append(replace(run, metrics=metrics))
    return replace(results, study=study, runs=runs, other_tests=others)


def _agreed(runs: Sequence[FinishedRun]) -> dict[str, Metric]:
    """Return what all runs that declare a metric say of it; where they differ, nothing."""
    said: dict[str, list[Metric]] = {}
    for run in runs:
        for name, one in run.task.declared.items():
            said.setdefault(name, []).append(one)
    return {name: found[0] for name, found in said.items() if all(one == found[0] for one in found)}


def _why_other(run: FinishedRun, chosen: float, selection: Selection) -> str:
    tested = f"it is of round {run.record.test.round}"
    if selection == "best_val":
        which = (
            "no round was validated"
            if chosen != chosen
            else f"the tables are of round {chosen:.0f}"
        )
        return f"{tested}, {which}, which validation chose; test it with --checkpoint best"
    if run.record.test.checkpoint == "last":
        return f"{tested}, the run has {run.rounds}; test it again"
    instead = "test it with --checkpoint last, or write selection: best_val"
    return f"{tested}, the tables are of the last round, {run.rounds}; {instead}"
