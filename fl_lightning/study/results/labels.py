"""Runs without a study file, as any folder has them: which method and levels each run has, and
which runs are there twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.config.settings import is_free, settings_hash
from fl_lightning.study.plan.study import Study
from fl_lightning.study.plan.variations import RESERVED, Variation
from fl_lightning.study.results.run_records import RunRecord
from fl_lightning.study.results.runs import ExcludedRun, FinishedRun, Results

MAX_SETTINGS_LENGTH = 60
"""Characters of settings in a label; longer ones are shown as a hash."""
OWN_TAGS = {*RESERVED, "tuned_by", "trial"}
"""Tags that are no axis; ``tune`` gives the last two."""


def label_all(name: str, folder: Path, records: list[RunRecord]) -> Results:
    """Label the runs of a folder without a study file.

    The label of a run is its tag ``label``, or its method and the settings that differ.
    """
    complete = [record for record in records if not record.problem]
    excluded = [ExcludedRun(record.name, record.problem) for record in records if record.problem]
    axes = _axes(complete)
    labels = _labels(complete, axes)
    cells: dict[tuple[Any, ...], list[RunRecord]] = {}
    for record in sorted(complete, key=lambda record: (len(record.name), record.name)):
        key = (labels[record.where], record.metadata["seed"], *_levels(record, axes).items())
        cells.setdefault(key, []).append(record)
    for *older, used in cells.values():
        reason = f"{used.name} has the same settings and seed, and is used"
        excluded += [ExcludedRun(record.name, reason) for record in older]
    runs = [
        FinishedRun(label, seed, dict(levels), used)
        for (label, seed, *levels), (*_, used) in cells.items()
    ]
    runs.sort(key=lambda run: (run.label, run.seed, *run.levels.values()))
    grid: dict[str, dict[str, Variation]] = {}
    for run in runs:
        for axis, level in run.levels.items():
            grid.setdefault(axis, {})[level] = Variation()
    plan = Study(
        name=name,
        path=folder,
        seeds=sorted({run.seed for run in runs}),
        methods={run.label: Variation() for run in runs},
        grid=grid,
    )
    return Results(plan, runs, excluded, records=records)


def _axes(records: list[RunRecord]) -> list[str]:
    """Return the tags, other than a run's own, that every run has: each is an axis."""
    tagged = [record.tags for record in records]
    if not all("label" in tags for tags in tagged):
        return []
    names = dict.fromkeys(name for tags in tagged for name in tags)
    return [
        name
        for name in names
        if name not in OWN_TAGS
        and not name.startswith("mlflow.")
        and all(name in tags for tags in tagged)
    ]


def _levels(record: RunRecord, axes: Iterable[str]) -> dict[str, str]:
    return {axis: str(record.tags[axis]) for axis in axes}


def _labels(records: list[RunRecord], axes: Iterable[str]) -> dict[str, str]:
    """Return the label of each run by its folder.

    It is the tag ``label`` or the method's name, followed by the settings in which runs of that
    name differ.
    """
    by_name: dict[str, list[RunRecord]] = {}
    labels = {}
    for record in records:
        name = record.tags.get("label") or record.metadata.get("method")
        by_name.setdefault(str(name), []).append(record)
    for name, several in by_name.items():
        settings = {record.where: record.settings for record in several}
        # of labelled runs the grid changed the settings: one seed and level is compared at a time
        planned = all(record.tags.get("label") for record in several)
        alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for record in several:
            at = (record.metadata["seed"], *_levels(record, axes).items()) if planned else ()
            alike.setdefault(at, []).append(settings[record.where])
        keys = sorted({key for group in alike.values() for key in _differing(group)})
        for where, values in settings.items():
            labels[where] = f"{name} {_shown(keys, values)}".strip()
    return labels


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the last part of each of these settings, or the whole where others end so too.

    >>> short_names(["a.lr", "b.lr", "c.mu"])
    {'a.lr': 'a.lr', 'b.lr': 'b.lr', 'c.mu': 'mu'}
    """
    short = {key: key.rpartition(".")[2] for key in keys}
    last = [*short.values()]
    return {key: name if last.count(name) == 1 else key for key, name in short.items()}


def _shown(keys: list[str], values: Mapping[str, Any]) -> str:
    names, given = short_names(keys), {key: values.get(key, "not set") for key in keys}
    text = ", ".join(f"{names[key]}={value}" for key, value in given.items())
    return text if len(text) <= MAX_SETTINGS_LENGTH else settings_hash(given)[:8]


def _differing(several: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings, other than the seed, that can change a result and do not all have one
    value."""
    keys = dict.fromkeys(key for one in several for key in one)
    return [
        key
        for key in keys
        if not all(is_free(key, one) for one in several)
        and key != "seed_everything"
        and len({repr(one.get(key, "not set")) for one in several}) > 1
    ]
