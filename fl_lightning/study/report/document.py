"""``report.json`` and the CSV files. Two runs of one study differ in ``timings`` and ``provenance``
alone.

What a clock measured, and what follows from it, is under ``timings``; machine, commits, command
lines, paths and dates are under ``provenance``; everything else is a function of the
configurations. In CSV the same holds of files: ``timing*.csv`` apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from math import isfinite
from os.path import relpath
from pathlib import Path
from typing import Any

import pandas as pd

from fl_lightning.config.packaged import configs_folder
from fl_lightning.study.metric_names import TaskMetrics, is_timing
from fl_lightning.study.plan.published import SEQUENCE
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.plan.selection import selection_of
from fl_lightning.study.report import transfer_tables
from fl_lightning.study.report.comparison import Comparison, Difference, Levels
from fl_lightning.study.report.judging import Judgement
from fl_lightning.study.report.overall import overall
from fl_lightning.study.report.places import places
from fl_lightning.study.report.registered import NOT_REGISTERED, RegistrationReport
from fl_lightning.study.report.verdicts import Verdict, premise_verdicts, verdicts
from fl_lightning.study.results.published import without_published
from fl_lightning.study.results.runs import HASHES, FinishedRun
from fl_lightning.study.statistics import mean_std

TEST_FIELDS = [
    *(
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
    ),
    *("d_z", "g_z", "detectable", "seeds_needed", "family"),
]
PROVENANCE = [
    *("git", "versions", "command_line", "device", "processes", "threads", "precision"),
    *("started", "finished", "resumed"),
]


def report(
    comparison: Comparison, registration: RegistrationReport = NOT_REGISTERED
) -> dict[str, Any]:
    """Return the whole comparison, fit for JSON: what is not a number is null."""
    study, main, runs = comparison.study, comparison.main_levels, comparison.results.runs
    judged, stopping = verdicts(comparison), comparison.results.stopping
    premises = premise_verdicts(comparison)
    document = {
        "registration": _registration(registration),
        "study": study.name,
        "metric": study.metric,
        "selection": study.selection,
        "higher_is_better": comparison.higher_is_better(study.metric),
        "methods": comparison.labels,
        "proposed": comparison.proposed,
        "baselines": comparison.baselines,
        "seeds": study.seeds,
        "controls": study.controls,
        "target": study.target_value,
        "task": _task(study.task),
        "published": [{"study": one.name, "runs_sha256": one.sha256} for one in study.published],
        "interval": SEQUENCE if comparison.is_sequential else "t",
        "stopping": stopping
        and {key: getattr(stopping, key) for key in ("seeds", "ending", "undecided")},
        "level": main,
        **_ranking(comparison, main),
        "aggregated": aggregated(comparison, main),
        "levels": [_level(comparison, levels) for levels in comparison.levels],
        "overall": {one.label: asdict(one) for one in overall(comparison)},
        "other_model": {
            "selection": comparison.other.study.selection,
            "levels": [
                {"levels": levels, "methods": _methods(comparison.other, levels, _is_of_the_model)}
                for levels in comparison.levels
            ],
        },
        "premises": [_verdict(verdict) for verdict in premises if not verdict.is_timing],
        "criteria": [_verdict(verdict) for verdict in judged if not verdict.is_timing],
        "degradation": [
            {"levels": others, "method": label, **_difference(one)}
            for others, label, one in comparison.degradations()
        ],
        **transfer_tables.document(comparison),
        "claimed": study.claimed,
        "tuned": study.tuned and study.tuned.document(),
        "runs": [_run(run, lambda metric: not is_timing(metric)) for run in runs],
        "not_counted": [asdict(entry) for entry in comparison.not_counted],
        "not_numbers": comparison.not_numbers(),
        "timings": {
            "levels": [
                {"levels": levels, "methods": _methods(comparison, levels, is_timing)}
                for levels in comparison.levels
            ],
            "premises": [_verdict(verdict) for verdict in premises if verdict.is_timing],
            "criteria": [_verdict(verdict) for verdict in judged if verdict.is_timing],
            "runs": [_run(run, is_timing) for run in runs],
        },
        "provenance": {**provenance(comparison), "registration": list(registration.dates)},
    }
    return strict(document)


def aggregated(comparison: Comparison, levels: Levels) -> dict[str, Any]:
    """Return the short form of a report at one combination of levels, in means over seeds.

    ``gap`` is how much better the best proposed method is than the best baseline in the primary
    metric, in percent of the baseline's mean, over the seeds that both have; negative where it is
    worse.
    """
    ranking, metric = comparison.ranking(levels), comparison.study.metric
    pair, gap = [ranking.best_proposed, ranking.best_baseline], None
    if None not in pair and len(both := comparison.table(metric, levels)[pair].dropna()):
        proposed, baseline = (mean_std(both[label])[0] for label in pair)
        sign = 1 if comparison.higher_is_better(metric) else -1
        gap = 100 * sign * (proposed - baseline) / abs(baseline) if baseline else None
    methods = _methods(comparison, levels, lambda metric: not is_timing(metric))
    return {
        "primary_metric": metric,
        "metrics": {
            label: {name: one["mean"] for name, one in found["metrics"].items()}
            for label, found in methods.items()
        },
        "best_proposed": ranking.best_proposed,
        "best_baseline": ranking.best_baseline,
        "gap": gap,
    }


def strict(value: Any) -> Any:
    """Replace NaN and infinities by null: JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _level(comparison: Comparison, levels: Levels) -> dict[str, Any]:
    runs = [run for run in comparison.results.runs if run.levels == levels]
    shared = [run for run in runs if run.label not in comparison.study.controls]
    partitions = {str(run.seed): run.partition for run in reversed(shared)}
    first = next((run for run in shared if comparison.study.methods[run.label].in_grid), runs[0])
    data: dict[str, dict[str, str]] = {}
    for run in shared:
        if run.data_hashes and run.protocol_sha256 == first.protocol_sha256:
            data[str(run.seed)] = data.get(str(run.seed), {}) | run.data_hashes
    return {
        "levels": levels,
        "dataset": runs[0].dataset,
        "content_sha256": first.content,
        "files_sha256": first.shared_files,
        "data_sha256": data,
        "protocol": first.protocol,
        "protocol_sha256": first.protocol_sha256,
        "constant_guess": first.constant_guess,
        "rounds": runs[0].asked_rounds,
        "partition_sha256": {
            str(seed): partitions.get(str(seed)) for seed in comparison.study.seeds
        },
        **_ranking(comparison, levels),
        "methods": _methods(comparison, levels, lambda metric: not is_timing(metric)),
        "places": [asdict(one) for one in places(comparison, levels)],
        "differences": [
            _difference(one) for one in comparison.differences(comparison.study.metric, levels)
        ],
    }


def _task(task: TaskMetrics) -> dict[str, Any]:
    """Return what is known of the task, in the form of ``metadata.json``."""
    return {
        "primary": task.primary,
        "higher_is_better": task.higher_is_better,
        "shares": sorted(task.shares),
        "named": dict(task.named),
        **(
            {"declared": {name: asdict(one) for name, one in task.declared.items()}}
            if task.declared
            else {}
        ),
    }


def _is_of_the_model(metric: str) -> bool:
    """Return whether a metric can differ between two rounds of one run, or is the primary metric of
    one."""
    of_the_run = is_timing(metric) or metric.startswith(("total/", "client/", "target/", "final/"))
    return selection_of(metric) is not None or not of_the_run


def _summary(values: pd.Series) -> dict[str, Any]:
    mean, std = mean_std(values)
    return {"mean": mean, "std": std, "seeds": values.index.tolist()}


def _methods(
    comparison: Comparison, levels: Levels, wanted: Callable[[str], bool]
) -> dict[str, Any]:
    """Return mean, standard deviation and seeds of the wanted metrics, by method."""
    tables = {name: comparison.table(name, levels) for name in comparison.metrics if wanted(name)}
    methods = {}
    for label in comparison.labels:
        found = {name: table[label].dropna() for name, table in tables.items()}
        if metrics := {
            name: _summary(values) for name, values in found.items() if not values.empty
        }:
            methods[label] = {"seeds": list(comparison.runs(label, levels)), "metrics": metrics}
    return methods


def _ranking(comparison: Comparison, levels: Levels) -> dict[str, Any]:
    ranking, metric = comparison.ranking(levels), comparison.study.metric

    def best(label: str | None) -> dict[str, Any] | None:
        return label and {"method": label, **_summary(comparison.values(metric, label, levels))}  # type: ignore[return-value]

    gap, better = ranking.gap, "positive" if comparison.higher_is_better(metric) else "negative"
    return {
        "best_proposed": best(ranking.best_proposed),
        "best_baseline": best(ranking.best_baseline),
        "gap": gap
        and {"direction": f"{gap.a} - {gap.b}; {better}: {gap.a} is better", **_difference(gap)},
        "leader": ranking.leader,
        "winner": ranking.winner,
        "winner_reason": ranking.reason,
    }


def _difference(one: Difference) -> dict[str, Any]:
    return {
        **{name: getattr(one, name) for name in ("a", "b", "seeds", "unpaired")},
        **{name: getattr(one.test, name) for name in ("differences", *TEST_FIELDS)},
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    judged = [{"levels": dict(levels), **_judgement(one)} for levels, one in verdict.judgements]
    criterion = verdict.criterion
    named = {"name": criterion.name, "text": criterion.claim}
    return {
        "criterion": criterion.text,
        **{key: value for key, value in named.items() if value},
        "verdict": verdict.decision,
        "needed_levels": verdict.needed,
        "levels": judged,
    }


def _judgement(one: Judgement) -> dict[str, Any]:
    """Return a judgement without what a sweep alone needs."""
    found = {key: value for key, value in vars(one).items() if key != "lost"}
    return {**found, "parts": [(text, _judgement(part)) for text, part in one.parts]}


def _registration(registration: RegistrationReport) -> dict[str, Any]:
    """Return how the report stands to what was registered, and the registered verdicts if it has
    others."""
    registered = registration.registered
    return {
        "status": registration.status,
        "sha256": registration.sha256 or None,
        "differences": list(registration.differences),
        "registered": registered
        and {
            "metric": registered.study.metric,
            "selection": registered.study.selection,
            "criteria": [_verdict(verdict) for verdict in verdicts(registered)],
        },
    }


def _run(run: FinishedRun, wanted: Callable[[str], bool]) -> dict[str, Any]:
    return {
        "name": run.name,
        "method": run.label,
        "seed": run.seed,
        "levels": run.levels,
        "rounds": run.rounds,
        "weights_sha256": run.record.metadata.get("weights_sha256"),
        "metrics": {metric: value for metric, value in run.metrics.items() if wanted(metric)},
    }


def provenance(comparison: Comparison) -> dict[str, Any]:
    """Return where the runs come from."""
    records = [run.record for run in comparison.results.distinct]
    return {
        "runs": [
            {
                "name": one.name,
                "where": one.where,
                **{key: one.metadata.get(key) for key in PROVENANCE},
            }
            for one in records
        ],
        "begun_beyond": comparison.results.stopping.beyond if comparison.results.stopping else (),
    }


def runs_csv(comparison: Comparison, timing: bool) -> str:
    """Return one line a run; a cell is empty where a run has no such number."""
    metrics = [metric for metric in comparison.metrics if is_timing(metric) == timing]
    axes = list(comparison.study.grid)
    lines = [
        [run.name, run.label, run.seed, *(run.levels[axis] for axis in axes), run.rounds]
        + ([] if timing else [*run.hashes.values()])
        + [_digits(run.metrics.get(metric)) for metric in metrics]
        for run in comparison.results.runs
    ]
    hashes = () if timing else HASHES
    return _csv(lines, ["run", "method", "seed", *axes, "rounds", *hashes, *metrics])


def plan_yaml(comparison: Comparison, out: Path) -> str:
    """Return the study file of a report, from which ``rank`` plans runs that can be paired with
    these.

    Configurations of the project are written by their names there, and others relative to the
    report.

    Args:
        comparison: what is reported.
        out: the folder of the report.
    """
    study = replace(without_published(comparison.results).study, until=None)

    def place(path: Path) -> str:
        found, project = path.resolve(), configs_folder().resolve()
        inside = found.is_relative_to(project)
        if inside:
            return found.relative_to(project).as_posix()
        return Path(relpath(found, out)).as_posix()

    return study.to_yaml(place)


def differences_csv(comparison: Comparison, timing: bool) -> str:
    """Return one line per level, metric and pair of the family.

    ``p_holm`` is corrected within level and metric.
    """
    lines = [
        [level_key(levels), metric, one.a, one.b]
        + [" ".join(map(str, seeds)) for seeds in (one.seeds, one.unpaired)]
        + [_digits(getattr(one.test, name)) for name in ("n", *TEST_FIELDS)]
        for levels in comparison.levels
        for metric in comparison.metrics
        if is_timing(metric) == timing
        for one in comparison.differences(metric, levels)
    ]
    return _csv(lines, ["levels", "metric", "a", "b", "seeds", "unpaired", "n", *TEST_FIELDS])


def _digits(value: float | None) -> str:
    """Write all digits of a number, so that a test on the file gives what the report says.

    ``nan`` and ``inf`` are written as such; a number that is missing is empty.
    """
    return "" if value is None else repr(float(value)) if isinstance(value, float) else str(value)


def _csv(lines: list[list[Any]], header: list[str]) -> str:
    return pd.DataFrame(lines, columns=header, dtype=object).to_csv(
        index=False, lineterminator="\n"
    )
