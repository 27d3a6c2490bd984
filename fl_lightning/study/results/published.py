"""Published runs as runs of a study: read from ``runs.csv`` and ``report.json``, and refused where
they cannot be paired with those of the study."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from fl_lightning.config.documents import document_hash
from fl_lightning.errors import InputError, as_bad_input, require
from fl_lightning.run.snapshot import IDENTITY
from fl_lightning.study.plan.protocol import different_settings
from fl_lightning.study.plan.published import AGAIN, REPORT, RUNS, PublishedStudy
from fl_lightning.study.plan.study import Study
from fl_lightning.study.plan.variations import Variation
from fl_lightning.study.results.run_records import RunRecord
from fl_lightning.study.results.runs import HASHES, ExcludedRun, FinishedRun, Results

CONTENT_BY_NAME = {
    "digits": {
        "7e62a565914c3e206c201205ea0faffe193e47186aefe2d1a93d4c310b67be1f",  # one channel
        "e88eb6a57c9ef7aefefe2f532513ca13b762a1b1fd2ec46cf83802d6b79f40bf",  # three
    },
    "fashion_mnist": {
        "8f754aedc245569efaefcd48338e0b30e649279352009f68e85f2780d21708d6",
        "1663312ba4a6f3286a0ea673836b69faa50bf557da3470ca05e52cd6664895bd",
    },
}
"""SHA-256 of the images by a name of which reports of an earlier release say none: what those runs
had."""
MOST_RUNS = 3
"""Runs that a message names."""
MOST_SETTINGS = 5
"""Settings that a message names; a protocol in which more differ is another one altogether."""


def add_published(results: Results) -> Results:
    """Return the results with the published runs of the study, whose methods are then methods of
    it.

    Raises:
        InputError: a run of the study cannot be paired with them; the message names what differs.
    """
    study, excluded = results.study, list(results.excluded)
    methods, controls, runs = dict(study.methods), list(study.controls), list(results.runs)
    for published in study.published:
        for run in results.runs:
            check_paired(published, run, is_control=run.label in study.controls)
        found = list(_runs(published, study))
        apart = [run for run in found if not _is_of_protocol(published, run)]
        excluded += [
            ExcludedRun(run.name, "published with another protocol than its level has")
            for run in apart
        ]
        runs += [run for run in found if run not in apart]
        methods |= {label: Variation() for label in published.labels}
        controls += published.controls
    study = replace(study, methods=methods, controls=controls)
    return replace(results, study=study, runs=runs, excluded=excluded)


def without_published(results: Results) -> Results:
    """Return the results without what :func:`add_published` has added."""
    study = results.study
    added = {label for published in study.published for label in published.labels}
    methods = {label: one for label, one in study.methods.items() if label not in added}
    controls = [label for label in study.controls if label not in added]
    runs = [run for run in results.runs if run.label not in added]
    return replace(results, study=replace(study, methods=methods, controls=controls), runs=runs)


def check_paired(published: PublishedStudy, run: FinishedRun, is_control: bool = False) -> None:
    """Check that a run can be paired with the published ones of its seed and level.

    Args:
        published: the published study.
        run: a finished run, as the study has it.
        is_control: whether it is one whose clients may hold other examples.

    Raises:
        InputError: data, protocol or partition are others.
    """
    where = f"published: {published.name}"
    level = published.level(run.levels, where)
    pairs: tuple[tuple[str, str, str], ...] = (
        ("data set", str(level.get("dataset")), run.dataset),
        ("content of the data", str(level.get("content_sha256") or ""), run.content),
    )
    for what, theirs, ours in pairs:
        given = f"{run.name} has {what} {ours[:12] or 'unknown'}, {where} has {theirs[:12] or 'unknown'}"
        same = ours == theirs or (not theirs and ours in CONTENT_BY_NAME.get(run.dataset, ()))
        require(same, given, f"runs are paired on one {what}", "use the published data")
    if is_control:
        return
    check_protocol(published, run.name, run.levels, run.protocol)
    for name, ours in run.shared_files.items():
        theirs = (level.get("files_sha256") or {}).get(name, ours)  # reports of before have none
        given = f"{run.name} has other files of trainer.{name} than {where}"
        require(
            ours == theirs,
            given,
            "runs are paired on one content of them",
            "use the published files",
        )
    known = (level.get("data_sha256") or {}).get(str(run.seed), {})
    for name, ours in run.data_hashes.items():
        theirs = known.get(name, ours)
        given = f"{run.name} has {IDENTITY[name]} {ours[:12]}, {where} has {theirs[:12]}"
        rule = f"runs are paired on one content of {IDENTITY[name]}"
        require(ours == theirs, given, rule, "use the published data, and the tokeniser of then")
    theirs = str((level.get("partition_sha256") or {}).get(str(run.seed)) or "")
    given = f"{run.name} has partition {run.partition[:12]}, {where} has {theirs[:12] or 'none'}"
    rule = f"runs are paired on one partition, here that of seed {run.seed}"
    instead = "use the published data"
    require(run.partition == theirs, given, rule, instead)


def check_protocol(
    published: PublishedStudy, name: str, levels: Mapping[str, str], protocol: Mapping[str, Any]
) -> None:
    """Check that a run has, or would have, the published protocol.

    Args:
        published: the published study.
        name: the name of the run.
        levels: axis -> level.
        protocol: that of the run; empty: it is not known.

    Raises:
        InputError: it has another one; the message names the settings.
    """
    where = f"published: {published.name}"
    level = published.level(levels, where)
    if document_hash(protocol) == level.get("protocol_sha256"):
        return
    rule = "its settings are not known, so that it cannot be paired"
    require(protocol, name, rule, "read it from its folder")
    found = different_settings(level["protocol"], protocol)
    more = f" and {len(found) - MOST_SETTINGS} more" if len(found) > MOST_SETTINGS else ""
    given = f"{name} has another protocol than {where}: {'; '.join(found[:MOST_SETTINGS])}{more}"
    rule = "runs are paired on one protocol: every setting that is not the method's own"
    raise InputError(given, rule, "leave these settings as they are published")


def _is_of_protocol(published: PublishedStudy, run: FinishedRun) -> bool:
    level = published.level(run.levels, published.name)
    return run.label in published.controls or run.protocol_sha256 == level["protocol_sha256"]


def _runs(published: PublishedStudy, study: Study) -> Iterator[FinishedRun]:
    """Yield the published runs at the levels and seeds of a study."""
    wanted, needed = study.combinations(), _needed(published)
    for row in published_rows(published):
        levels = {axis: row[axis] for axis in study.grid}  # their order is part of a level's key
        seed, rounds, metrics = _numbers(row, needed)
        if levels not in wanted or seed not in study.seeds:
            continue
        level = published.level(levels, published.name)
        about = {key: row[key] for key in HASHES if row[key]}
        metadata = {
            **about,
            "seed": seed,
            "dataset": level["dataset"],
            "constant_guess": level.get("constant_guess"),
            "task": published.report.get("task"),
        }
        if published.report.get("target") != study.target_value:
            metrics = {
                key: value for key, value in metrics.items() if not key.startswith("target/")
            }
        history = [{"round": rounds}]
        record = RunRecord(row["run"], f"{published.path}: {row['run']}", metadata, history)
        selection = published.report["selection"]
        yield FinishedRun(row["method"], seed, levels, record, metrics, selection)


def published_rows(published: PublishedStudy) -> list[dict[str, str]]:
    """Return the lines of ``runs.csv``.

    Raises:
        InputError: it is not the table of its report.
    """
    path, needed = published.path / RUNS, _needed(published)
    rule, errors = "it is not the table of its report", (OSError, ValueError, csv.Error)
    with (
        as_bad_input(f"{path}", rule, AGAIN, *errors),
        path.open(encoding="utf-8", newline="") as file,
    ):
        rows = list(csv.DictReader(file))
        if not all(needed <= {*row} and None not in row.values() for row in rows):
            raise ValueError(f"each line needs {', '.join(sorted(needed))}")
        axes = published.levels[0]["levels"]
        cells = Counter((row["method"], int(row["seed"]), *map(row.get, axes)) for row in rows)
        for (method, seed, *_), count in cells.items():
            if count > 1:
                raise ValueError(f"{count} lines of {method}, seed {seed}")
        if labels := {row["method"] for row in rows} ^ {*published.labels}:
            raise ValueError(f"{', '.join(sorted(labels))} is not in both")
        if other := _not_as_reported(published, rows):
            more = f" and {len(other) - MOST_RUNS} more" if len(other) > MOST_RUNS else ""
            raise ValueError(f"{', '.join(other[:MOST_RUNS])}{more}: not as {REPORT} has it")
        return rows


def _not_as_reported(published: PublishedStudy, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of the runs that the table and the report have with other numbers, or that
    only one of them has."""
    axes, needed = published.levels[0]["levels"], _needed(published)
    here: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        seed, rounds, metrics = _numbers(row, needed)
        finite = {name: value for name, value in metrics.items() if isfinite(value)}
        here[(row["run"], row["method"], seed, *map(row.get, axes))] = rounds, finite
    told = {
        (run["name"], run["method"], run["seed"], *map(run["levels"].get, axes)): (
            run["rounds"],
            {name: value for name, value in run["metrics"].items() if value is not None},
        )
        for run in published.report["runs"]
    }
    differing = {run[0] for run in {*told, *here} if told.get(run) != here.get(run)}
    return sorted(differing)


def _numbers(row: Mapping[str, str], needed: set[str]) -> tuple[int, float, dict[str, float]]:
    """Return the seed, the rounds and the metrics of a line."""
    metrics = {key: float(cell) for key, cell in row.items() if key not in needed and cell}
    return int(row["seed"]), float(row["rounds"]), metrics


def _needed(published: PublishedStudy) -> set[str]:
    """Return the headings beside the metrics."""
    return {"run", "method", "seed", "rounds", *HASHES, *published.levels[0]["levels"]}
