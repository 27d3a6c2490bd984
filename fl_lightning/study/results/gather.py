"""From ``--study`` to the runs that can be compared, and a list of those that cannot, with the reason of
each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fl_lightning.errors import InputError
from fl_lightning.settings import settings_hash
from fl_lightning.study.metric_names import higher_is_better
from fl_lightning.study.results.found import Found, from_store, read_cells, read_folder
from fl_lightning.study.results.labels import label_all
from fl_lightning.study.results.runs import Results, Run, Uncounted, run_metrics
from fl_lightning.study.results.tested import with_one_checkpoint
from fl_lightning.study.spec.plan import Study
from fl_lightning.support.packaged import find_config
from fl_lightning.support.redaction import redact
from fl_lightning.tracking.runs import read_runs


def gather(study: str, root: Path, mlflow: str | None = None) -> Results:
    """Read the runs of a study.

    Args:
        study: its name, its YAML file, or a folder of runs.
        root: where folders of runs are.
        mlflow: store to read instead of the folder.

    Raises:
        InputError: there is no such study, or it has no finished run.
    """
    plan, folder = locate(study, root, must_exist=mlflow is None)
    name = plan.name if plan else folder.name
    if mlflow is not None:
        found = [from_store(entry) for entry in read_runs(mlflow, name)]
        where = f"the experiment {name} at {redact(mlflow)}"
    else:
        if not folder.is_dir():
            raise InputError(
                f"--study {study}",
                f"its runs are read from {folder}, which does not exist",
                "run the sweep, or name --root",
            )
        found, where = read_folder(folder), str(folder)
    results = assign(plan, found, folder) if plan else label_all(name, folder, found)
    if not results.runs:
        reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in results.uncounted[:3])
        raise InputError(
            f"--study {study}",
            f"no finished run in {where} ({reasons or 'it is empty'})",
            "wait for the sweep, or name --root",
        )
    return with_one_checkpoint(results)


def locate(study: str, root: Path, must_exist: bool = True) -> tuple[Study | None, Path]:
    """The study, if there is a file of it, and the folder of its runs."""
    path = Path(study)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        path = find_config(path) or path
        plan = Study.read(path, find_configs=False)
        return plan, root / plan.name
    folder = next((folder for folder in (root / study, path) if folder.is_dir()), None)
    if folder is None:
        if not must_exist:
            return None, root / study
        known = sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
        near = get_close_matches(study, known, n=1, cutoff=0.0)
        instead = f"write --study {near[0]}" if near else "name another --root"
        raise InputError(
            f"--study {study}",
            f"it is the name of a study in {root}, a study's YAML file, or a folder of runs",
            f"{instead}",
        )
    file = folder / "study.yaml"
    return (Study.read(file, find_configs=False) if file.is_file() else None), folder


def assign(plan: Study, found: list[Found], folder: Path) -> Results:
    """Give every cell of the study its run: the one that ``cells.json`` names, or else the latest of its name
    or tags.

    Where there is a ``cells.json``, only runs with the cell's own settings count: others are left from an
    earlier form of the study.
    """
    named = read_cells(folder)
    runs, uncounted, used = [], [], set()
    for cell in plan.cells():
        entry = named.get(cell.name, {})
        mine = [one for one in found if _is_cell(one, cell.name, cell.method, cell.seed, cell.levels)]
        used |= {one.where for one in mine}
        if named:
            other = [one for one in mine if not _has_settings(one, entry)]
            uncounted += [Uncounted(one.name, "not counted: made with other settings") for one in other]
            mine = [one for one in mine if _has_settings(one, entry)]
        exact = [one for one in mine if one.name == entry.get("run")]
        chosen = _latest(exact or mine)
        uncounted += [
            Uncounted(one.name, f"{chosen.name} is used") for one in mine if chosen and one is not chosen
        ]
        if chosen is None:
            uncounted.append(Uncounted(cell.name, f"no run; {entry.get('status', 'never started')}"))
        elif chosen.problem:
            failed = ", failed in the sweep" if entry.get("status") == "failed" else ""
            uncounted.append(Uncounted(cell.name, chosen.problem + failed))
        else:
            runs.append(
                Run(cell.method, cell.seed, cell.levels, chosen, run_metrics(chosen, plan.target_accuracy))
            )
    uncounted += [Uncounted(one.name, "not a cell of the study") for one in found if one.where not in used]
    return Results(plan, runs, uncounted)


def _is_cell(found: Found, name: str, label: str, seed: int, levels: Mapping[str, str]) -> bool:
    tags = found.metadata.get("tags") or {}
    if "label" in tags:
        axes = {axis: tags.get(axis) for axis in levels}
        return tags["label"] == label and found.metadata.get("seed") == seed and axes == dict(levels)
    return found.name == name or (
        found.name.startswith(f"{name}-") and found.name[len(name) + 1 :].isdecimal()
    )


def _has_settings(found: Found, entry: Mapping[str, Any]) -> bool:
    """Whether a run was made with the settings of a cell; MLflow's parameters cannot tell, there the name has
    to."""
    if found.settings and found.typed:
        return settings_hash(found.settings) == entry.get("hash")
    return bool(found.problem) or (not found.typed and found.name == entry.get("run"))


def _latest(found: list[Found]) -> Found | None:
    """The finished one with the highest number; one that is not finished when none is."""
    return max(found, key=lambda one: (not one.problem, len(one.name), one.name), default=None)


def with_metric(results: Results, metric: str | None) -> Results:
    """The same with another primary metric.

    Raises:
        InputError: no run has it, or whether more of it is better is not known.
    """
    study = results.study if metric is None else replace(results.study, metric=metric)
    known = sorted({name for run in results.runs for name in run.metrics})
    if study.metric not in known:
        near = get_close_matches(study.metric, known, n=1, cutoff=0.0)
        raise InputError(
            f"metric {study.metric}",
            f"no run of {study.name} has it",
            f"write --metric {(near[0] if near else 'final/accuracy')}",
        )
    higher_is_better(study.metric)
    return replace(results, study=study)


def check_comparable(results: Results) -> None:
    """Methods of one comparison have the same data set, the same rounds and, seed by seed, the same
    partition.

    Levels of a grid may differ in all of them, since methods are compared within a level; the two that a
    degradation is taken of may not.

    Raises:
        InputError: they do not.
    """
    degradation = results.study.degradation or {}
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in results.runs:
        levels = dict(run.levels)
        if (
            levels.get(degradation.get("axis", "")) in (degradation.get("stressed"), degradation.get("clean"))
            and degradation
        ):
            levels.pop(degradation["axis"])
        groups.setdefault(tuple(levels.items()), []).append(run)
    for runs in groups.values():
        _require_one(
            runs, "data set", lambda run: run.dataset, "a study has one data set; give each its own study"
        )
        _require_one(
            runs,
            "number of rounds",
            lambda run: str(run.asked_rounds),
            "run them again with the same --trainer.max_rounds",
        )
        for seed in sorted({run.seed for run in runs}):
            same_seed = [run for run in runs if run.seed == seed]
            hint = (
                "give all methods the same data.* settings (FedKD's public set is taken from the "
                "training set: set it for all)"
            )
            _require_one(same_seed, "partition", lambda run: run.partition, hint)


def _require_one(runs: list[Run], what: str, value: Any, hint: str) -> None:
    first = runs[0]
    for run in runs:
        if value(run) != value(first):
            raise InputError(
                f"{first.name} has {what} {value(first)[:12]}, {run.name} has {what} {value(run)[:12]}",
                f"methods are compared on one {what}{(' a seed' if what == 'partition' else '')}",
                f"{hint}, or leave one out",
            )
