"""``report.json`` and the CSV files. Two runs of one study differ in ``timings`` and ``provenance`` alone.

What a clock measured, and what follows from it, is under ``timings``; machine, commits, command lines, paths
and dates are under ``provenance``; everything else is a function of the configurations. In CSV the same holds
of files: ``timing*.csv`` apart.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from fl_lightning.study.metric_names import higher_is_better, is_timing
from fl_lightning.study.report.comparison import Comparison, Difference, Levels, name_of
from fl_lightning.study.report.verdicts import Verdict, verdicts
from fl_lightning.study.results.runs import Run
from fl_lightning.study.statistics import mean_std

TEST_FIELDS = (
    "mean",
    "std",
    "low",
    "high",
    "bootstrap_low",
    "bootstrap_high",
    "t",
    "p_t",
    "p_holm",
    "p_wilcoxon",
    "d_z",
    "g_z",
    "detectable",
    "seeds_needed",
    "family",
)


def report(comparison: Comparison) -> dict[str, Any]:
    """The whole comparison, fit for JSON: what is not a number is null."""
    study, main = comparison.study, comparison.main_levels
    document = {
        "study": study.name,
        "metric": study.metric,
        "higher_is_better": higher_is_better(study.metric),
        "methods": comparison.labels,
        "proposed": comparison.proposed,
        "baselines": comparison.baselines,
        "seeds": study.seeds,
        "level": main,
        **_outcome(comparison, main),
        "levels": [_level(comparison, levels) for levels in comparison.levels],
        "criteria": [
            _verdict(verdict) for verdict in verdicts(comparison) if not verdict.criterion.is_timing
        ],
        "degradation": [
            {"levels": others, "method": label, **_difference(one)}
            for others, label, one in comparison.degradations()
        ],
        "claimed": study.claimed,
        "runs": [_run(run, lambda metric: not is_timing(metric)) for run in comparison.results.runs],
        "not_counted": [asdict(entry) for entry in comparison.results.uncounted],
        "not_numbers": [{"run": run.name, "metric": metric} for run, metric in comparison.not_numbers()],
        "timings": {
            "levels": [
                {"levels": levels, "methods": _means(comparison, levels, is_timing)}
                for levels in comparison.levels
            ],
            "criteria": [
                _verdict(verdict) for verdict in verdicts(comparison) if verdict.criterion.is_timing
            ],
            "runs": [_run(run, is_timing) for run in comparison.results.runs],
        },
        "provenance": provenance(comparison),
    }
    return strict(document)


def strict(value: Any) -> Any:
    """NaN and infinities as null: JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def comparable(document: Mapping[str, Any]) -> dict[str, Any]:
    """A report without what may differ between two sweeps of one study."""
    return {key: value for key, value in document.items() if key not in ("timings", "provenance")}


def _level(comparison: Comparison, levels: Levels) -> dict[str, Any]:
    runs = [run for run in comparison.results.runs if dict(run.levels) == dict(levels)]
    return {
        "levels": dict(levels),
        "dataset": runs[0].dataset,
        "rounds": runs[0].asked_rounds,
        "partition_sha256": {
            str(seed): next((run.partition for run in runs if run.seed == seed), None)
            for seed in comparison.study.seeds
        },
        **_outcome(comparison, levels),
        "methods": _means(comparison, levels, lambda metric: not is_timing(metric)),
        "differences": [_difference(one) for one in comparison.differences(comparison.study.metric, levels)],
    }


def _means(comparison: Comparison, levels: Levels, wanted: Callable[[str], bool]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for label in comparison.labels:
        found = {
            metric: comparison.values(metric, label, levels)
            for metric in comparison.metrics
            if wanted(metric)
        }
        metrics = {
            metric: dict(zip(("mean", "std"), mean_std(list(values.values())), strict=True))
            | {"seeds": list(values)}
            for metric, values in found.items()
            if values
        }
        if metrics:
            means[label] = {"seeds": list(comparison.runs(label, levels)), "metrics": metrics}
    return means


def _outcome(comparison: Comparison, levels: Levels) -> dict[str, Any]:
    outcome = comparison.outcome(levels)

    def best(label: str | None) -> dict[str, Any] | None:
        if label is None:
            return None
        values = comparison.values(comparison.study.metric, label, levels)
        mean, std = mean_std(list(values.values()))
        return {"method": label, "mean": mean, "std": std, "seeds": list(values)}

    gap = outcome.gap
    better = "positive" if higher_is_better(comparison.study.metric) else "negative"
    return {
        "best_proposed": best(outcome.best_proposed),
        "best_baseline": best(outcome.best_baseline),
        "gap": gap and {"direction": f"{gap.a} - {gap.b}; {better}: {gap.a} is better", **_difference(gap)},
        "winner": outcome.winner,
        "winner_reason": outcome.reason,
    }


def _difference(one: Difference) -> dict[str, Any]:
    tested = {name: getattr(one.test, name) for name in TEST_FIELDS}
    return {
        "a": one.a,
        "b": one.b,
        "seeds": one.seeds,
        "unpaired": one.unpaired,
        "differences": one.test.differences,
        **tested,
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    judged = [{"levels": dict(levels), **asdict(judgement)} for levels, judgement in verdict.judgements]
    return {"criterion": verdict.criterion.text, "verdict": verdict.decision, "levels": judged}


def _run(run: Run, wanted: Callable[[str], bool]) -> dict[str, Any]:
    metrics = {metric: value for metric, value in run.metrics.items() if wanted(metric)}
    weights = run.found.metadata.get("weights_sha256")
    return {
        "name": run.name,
        "method": run.label,
        "seed": run.seed,
        "levels": dict(run.levels),
        "rounds": run.rounds,
        "weights_sha256": weights,
        "metrics": metrics,
    }


def provenance(comparison: Comparison) -> dict[str, Any]:
    """Where the runs come from."""
    keys = (
        "git",
        "versions",
        "command_line",
        "device",
        "processes",
        "threads",
        "precision",
        "started",
        "finished",
        "resumed",
    )
    found = [(run, run.found.metadata) for run in comparison.results.runs]
    return {
        "runs": [
            {"name": run.name, "where": run.found.where, **{key: data.get(key) for key in keys}}
            for run, data in found
        ]
    }


def runs_csv(comparison: Comparison, timing: bool) -> str:
    """One line a run; an empty cell where a run has no such number."""
    metrics = [metric for metric in comparison.metrics if is_timing(metric) == timing]
    axes = list(comparison.study.grid)
    lines = [
        [
            run.name,
            run.label,
            run.seed,
            *(run.levels[axis] for axis in axes),
            run.rounds,
            *(cell(run.metrics.get(m)) for m in metrics),
        ]
        for run in comparison.results.runs
    ]
    return _csv(["run", "method", "seed", *axes, "rounds", *metrics], lines)


def differences_csv(comparison: Comparison, timing: bool) -> str:
    """One line per level, metric and pair of the family; ``p_holm`` is corrected within level and metric."""
    lines = [
        [
            name_of(levels),
            metric,
            one.a,
            one.b,
            " ".join(map(str, one.seeds)),
            " ".join(map(str, one.unpaired)),
            one.test.n,
            *(cell(getattr(one.test, name)) for name in TEST_FIELDS),
        ]
        for levels in comparison.levels
        for metric in comparison.metrics
        if is_timing(metric) == timing
        for one in comparison.differences(metric, levels)
    ]
    return _csv(["levels", "metric", "a", "b", "seeds", "unpaired", "n", *TEST_FIELDS], lines)


def cell(value: float | None) -> str:
    """All digits, so that a test on the file gives what the report says; ``nan`` and ``inf`` as such, nothing
    for nothing."""
    return "" if value is None else repr(float(value)) if isinstance(value, float) else str(value)


def _csv(header: list[str], lines: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    return text.getvalue()
