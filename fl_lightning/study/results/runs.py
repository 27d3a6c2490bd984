"""A finished run as the report sees it: one number per metric and one row per round."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from statistics import median
from typing import TYPE_CHECKING

from fl_lightning.study.results.found import Found

if TYPE_CHECKING:
    from fl_lightning.study.spec.plan import Study

WARM_UP = 3
"""Rounds whose seconds do not count: memory is allocated and libraries choose their algorithms."""


@dataclass(frozen=True)
class Run:
    """A finished run of a study.

    Args:
        label: of its method.
        seed: its seed.
        levels: axis -> level.
        found: where it comes from.
        metrics: one number per metric, see :func:`run_metrics`.
    """

    label: str
    seed: int
    levels: Mapping[str, str]
    found: Found
    metrics: Mapping[str, float]

    @property
    def name(self) -> str:
        return self.found.name

    @property
    def rounds(self) -> int:
        return int(self.found.history[-1]["round"])

    @property
    def asked_rounds(self) -> int:
        """The rounds that it was to make: more than ``rounds`` where early stopping ended it."""
        early = self.found.metadata.get("stopped_early")
        return int(self.found.settings.get("trainer.max_rounds", self.rounds)) if early else self.rounds

    @property
    def dataset(self) -> str:
        return str(self.found.metadata.get("dataset"))

    @property
    def partition(self) -> str:
        return str(self.found.metadata.get("partition_sha256"))


@dataclass(frozen=True)
class Uncounted:
    """A run, or a cell without one, that is not in the comparison.

    Args:
        name: of the run or cell.
        reason: why.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Results:
    """What there is to compare.

    Args:
        study: what was asked; of a plain folder of runs, what can be seen from them.
        runs: finished runs, one a cell, in the study's order.
        uncounted: all others.
    """

    study: Study
    runs: list[Run]
    uncounted: list[Uncounted]


def run_metrics(found: Found, target: float | None = None) -> dict[str, float]:
    """One number per metric of a run.

    ``final/*`` as the run gives them, and ``final/best_val_test_accuracy``: on the test set, in the round
    that validation chose.
    ``total/*``: bytes over all rounds; ``client/*``: bytes per client that trained and round. ``time/round``
        and ``time/train``: median
    seconds of a round, the first three left out; ``time/total``: seconds of all. Other metrics of the rounds:
    the last one measured. What ``test`` measured, except what has the name of a round's metric. With a
    ``target`` accuracy, ``target/rounds`` and ``target/megabytes`` until ``test/accuracy`` first reaches it;
    NaN when it never does.
    """
    history = found.history
    columns: dict[str, list[float]] = {}
    for row in history:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    metrics = {
        name: values[-1]
        for name, values in columns.items()
        if not re.match("round$|comm/|clients/|time/", name)
    }
    metrics |= {name: value for name, value in found.metadata.items() if name.startswith("final/")}
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
            metrics[name] = median(columns[name][WARM_UP:] or columns[name])
    if "time/round" in columns:
        metrics["time/total"] = sum(columns["time/round"])
    metrics |= {name: value for name, value in found.tested.items() if name not in metrics}
    if target is not None:
        metrics |= dict(zip(("target/rounds", "target/megabytes"), to_target(history, target), strict=True))
    return {name: float(metrics[name]) for name in sorted(metrics)}  # floats, as MLflow has them


def to_target(history: Iterable[Mapping[str, float]], target: float) -> tuple[float, float]:
    """Rounds, and megabytes over the wire, until the test accuracy first reaches ``target``.

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


def finite(values: Mapping[int, float]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if isfinite(value)}
