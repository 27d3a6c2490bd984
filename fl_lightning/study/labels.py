"""Runs without a study file, as any folder has them: what is a method, what a level, and what is there twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from fl_lightning.settings import config_of, is_free, settings_hash
from fl_lightning.study.plan import RESERVED, Study, Variation
from fl_lightning.study.runs import Found, Results, Run, Uncounted, run_metrics

MOST_SHOWN = 60  # characters of settings in a label
OWN_TAGS = {*RESERVED, "tuning", "trial"}


def label_all(name: str, folder: Path, found: list[Found]) -> Results:
    """A folder without a study file: the label of a run is its tag ``label``, or its method and the settings that differ."""
    good = [one for one in found if not one.problem]
    uncounted = [Uncounted(one.name, one.problem) for one in found if one.problem]
    labels = _labels(good)
    cells: dict[tuple[Any, ...], Found] = {}
    for one in sorted(good, key=lambda one: (len(one.name), one.name)):
        key = (labels[one.where], one.metadata["seed"], *_levels(one).items())
        if key in cells:
            uncounted.append(Uncounted(cells[key].name, f"{one.name} has the same settings and seed, and is used"))
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


def _levels(found: Found) -> dict[str, str]:
    """The tags of a sweep that are not its own: a level of each axis."""
    tags = found.metadata.get("tags") or {}
    if "label" not in tags:
        return {}
    return {name: str(value) for name, value in tags.items() if name not in OWN_TAGS and not name.startswith("mlflow.")}


def _labels(found: list[Found]) -> dict[str, str]:
    by_method: dict[str, list[Found]] = {}
    labels = {}
    for one in found:
        tag = (one.metadata.get("tags") or {}).get("label")
        if tag:
            labels[one.where] = str(tag)
        else:
            by_method.setdefault(str(one.metadata.get("method")), []).append(one)
    for method, several in by_method.items():
        settings = {one.where: _settings(one) for one in several}
        keys = sorted({key for one, other in combinations(settings.values(), 2) for key in _differing(one, other)})
        short = [key.rpartition(".")[2] for key in keys]
        names = [short[i] if short.count(short[i]) == 1 else key for i, key in enumerate(keys)]
        for where, values in settings.items():
            text = ", ".join(f"{name}={values.get(key, 'not set')}" for name, key in zip(names, keys, strict=True))
            if len(text) > MOST_SHOWN:
                text = settings_hash(values)[:8]
            labels[where] = f"{method} {text}".strip()
    return labels


def _settings(found: Found) -> dict[str, Any]:
    """Those that can change a result, apart from the seed; none of a run that is read from MLflow."""
    folder = Path(found.where)
    settings = config_of(folder) if (folder / "config.yaml").is_file() else {}
    return {key: value for key, value in settings.items() if not is_free(key) and key != "seed_everything"}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterable[str]:
    return [key for key in {**one, **other} if repr(one.get(key, "not set")) != repr(other.get(key, "not set"))]
