"""Runs without a study file, as any folder has them: what is a method, what a level, and what is there
twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from fl_lightning.settings import is_free, settings_hash
from fl_lightning.study.results.found import Found
from fl_lightning.study.results.runs import Results, Run, Uncounted, run_metrics
from fl_lightning.study.spec.plan import RESERVED, Study, Variation

MOST_SHOWN = 60  # characters of settings in a label
OWN_TAGS = {*RESERVED, "tuning", "trial"}


def label_all(name: str, folder: Path, found: list[Found]) -> Results:
    """A folder without a study file: the label of a run is its tag ``label``, or its method and the settings
    that differ."""
    good = [one for one in found if not one.problem]
    uncounted = [Uncounted(one.name, one.problem) for one in found if one.problem]
    axes = _axes(good)
    labels = _labels(good, axes)
    cells: dict[tuple[Any, ...], Found] = {}
    for one in sorted(good, key=lambda one: (len(one.name), one.name)):
        key = (labels[one.where], one.metadata["seed"], *_levels(one, axes).items())
        if key in cells:
            uncounted.append(
                Uncounted(cells[key].name, f"{one.name} has the same settings and seed, and is used")
            )
        cells[key] = one
    runs = [Run(key[0], key[1], dict(key[2:]), one, run_metrics(one)) for key, one in cells.items()]
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
    return Results(plan, runs, uncounted)


def _axes(found: list[Found]) -> list[str]:
    """Tags that every run has and that are not its own: a level of each axis. What only some runs carry is a
    remark."""
    tagged = [one.metadata.get("tags") or {} for one in found]
    if not all("label" in tags for tags in tagged):
        return []
    names = dict.fromkeys(
        name for tags in tagged for name in tags if name not in OWN_TAGS and not name.startswith("mlflow.")
    )
    return [name for name in names if all(name in tags for tags in tagged)]


def _levels(found: Found, axes: Iterable[str]) -> dict[str, str]:
    return {axis: str(found.metadata["tags"][axis]) for axis in axes}


def _labels(found: list[Found], axes: Iterable[str]) -> dict[str, str]:
    """Of a tag ``label``, that, and the settings in which two runs of it with one seed and the same levels
    differ."""
    by_name: dict[str, list[Found]] = {}
    labels = {}
    for one in found:
        tag = (one.metadata.get("tags") or {}).get("label")
        by_name.setdefault(str(tag or one.metadata.get("method")), []).append(one)
    for name, several in by_name.items():
        settings = {one.where: _settings(one) for one in several}
        keys = sorted(
            {
                key
                for one, other in combinations(several, 2)
                if _are_told_apart(one, other, axes)
                for key in _differing(settings[one.where], settings[other.where])
            }
        )
        for where, values in settings.items():
            labels[where] = f"{name} {_shown(keys, values)}".strip()
    return labels


def _are_told_apart(one: Found, other: Found, axes: Iterable[str]) -> bool:
    """By their settings; not by these when a tag tells what they are, and they are of different levels or
    seeds."""
    if not all((each.metadata.get("tags") or {}).get("label") for each in (one, other)):
        return True
    return one.metadata["seed"] == other.metadata["seed"] and _levels(one, axes) == _levels(other, axes)


def _shown(keys: list[str], values: Mapping[str, Any]) -> str:
    short = [key.rpartition(".")[2] for key in keys]
    names = [short[i] if short.count(short[i]) == 1 else key for i, key in enumerate(keys)]
    text = ", ".join(f"{name}={values.get(key, 'not set')}" for name, key in zip(names, keys, strict=True))
    return (
        text
        if len(text) <= MOST_SHOWN
        else settings_hash({key: values.get(key, "not set") for key in keys})[:8]
    )


def _settings(found: Found) -> dict[str, Any]:
    """Those that can change a result, apart from the seed."""
    return {
        key: value for key, value in found.settings.items() if not is_free(key) and key != "seed_everything"
    }


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterable[str]:
    return [
        key for key in {**one, **other} if repr(one.get(key, "not set")) != repr(other.get(key, "not set"))
    ]
