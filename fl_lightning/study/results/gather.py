"""Find the runs that ``--study`` names, and say of each run that cannot be compared why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import Any

from fl_lightning.config.near_names import nearest
from fl_lightning.config.packaged import find_config
from fl_lightning.config.settings import has_hash, is_under
from fl_lightning.errors import InputError, require
from fl_lightning.run.snapshot import IDENTITY
from fl_lightning.study.metric_names import direction, higher_is_better
from fl_lightning.study.plan.kinds import folder_of, is_study_file
from fl_lightning.study.plan.registration import has_registered_hash, level_key, registered_study
from fl_lightning.study.plan.spec_file import SpecFile
from fl_lightning.study.plan.study import Cell, Study, check_published_seeds
from fl_lightning.study.results.labels import label_all
from fl_lightning.study.results.run_records import RunRecord, from_store, read_cells, read_folder
from fl_lightning.study.results.runs import (
    FAILED,
    FILES,
    NO_RUN,
    ExcludedRun,
    FinishedRun,
    Results,
    selected,
)
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
        records = [from_store(entry) for entry in read_runs(mlflow, name)]
        where = f"the experiment {name} at {redact(mlflow)}"
    else:
        rule = f"its runs are read from {folder}, which does not exist"
        require(folder.is_dir(), f"--study {study}", rule, "run the sweep, or name --root")
        records, where = read_folder(folder), str(folder)
    results = assign(plan, records, folder) if plan else label_all(name, folder, records)
    if not results.runs:
        reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in results.excluded[:3])
        rule = f"no finished run in {where} ({reasons or 'it holds no run'})"
        raise InputError(f"--study {study}", rule, "wait for the sweep, or name --root")
    return selected(results)


def gather_registered(results: Results, plan: Mapping[str, Any], folder: Path) -> Results:
    """Return the same runs as a registered plan assigns them: its methods, settings, seeds and
    selection.

    Args:
        results: the runs of the study as it is now.
        plan: the registered plan.
        folder: the folder of the study.

    Raises:
        InputError: no run is one that was registered, or no run has its metric.
    """
    study = registered_study(results.study, plan)
    hashes = {label: method["sha256"] for label, method in plan["methods"].items()}
    found = assign(study, results.records, folder, hashes)
    if not found.runs:
        given = f"the plan of {study.name} that was registered"
        raise InputError(given, "no finished run was made by it", "run the sweep")
    return with_metric(selected(found), None)


def _with_rule_of_sweep(plan: Study, folder: Path) -> Study:
    """Return the study with the rule by which its sweep added seeds, where the file itself has
    none.

    A sweep has it from a flag then, and the runs' folder keeps it.
    """
    swept = folder / "study.yaml"
    if plan.until is not None or not swept.is_file():
        return plan
    found = replace(plan, until=_copy_of_sweep(swept).until)
    check_published_seeds(SpecFile(plan.path), found)
    return found


def _copy_of_sweep(file: Path) -> Study:
    try:
        return Study.read(file, find_configs=False)
    except InputError as error:
        raise error.within("the copy that a sweep left, and the next one writes anew") from error


def locate(study: str, root: Path, must_exist: bool = True) -> tuple[Study | None, Path]:
    """Return the study, if there is a file of it, and the folder of its runs."""
    root = Path(expanduser(root))
    if is_study_file(study):
        path = find_config(study) or Path(study)
        plan = Study.read(path, find_configs=False)
        return _with_rule_of_sweep(plan, root / plan.name), root / plan.name
    folder = folder_of(study, root, must_exist)
    file = folder / "study.yaml"
    return (_copy_of_sweep(file) if file.is_file() else None), folder


def assign(
    plan: Study,
    records: list[RunRecord],
    folder: Path,
    registered: Mapping[str, Mapping[str, str]] | None = None,
) -> Results:
    """Give every cell of the study its run.

    It is the run that ``cells.json`` names, or else the latest run of the cell's name or tags. Of a
    study that adds seeds, cells of all seeds that may be added are looked for.

    Where there is a ``cells.json``, only runs with the cell's own settings count: others are left
    from an earlier form of the study.

    Args:
        plan: the study.
        records: the runs that there are.
        folder: the folder of the study.
        registered: the hash of the settings of each method and level, without the seed, in place of
            what ``cells.json`` says.
    """
    named = read_cells(folder)
    cells = replace(plan, seeds=plan.seed_order).cells()
    if registered is not None:
        # of a plan that was edited, one may be missing: no run was made by it then
        hashes = {one.name: registered[one.method].get(level_key(one.levels)) for one in cells}
        named = {name: {**named.get(name, {}), "registered": hash} for name, hash in hashes.items()}
    runs, excluded, used = [], [], set()
    for cell in cells:
        entry = named.get(cell.name, {})
        mine = [record for record in records if _belongs_to(record, cell)]
        used |= {one.where for one in mine}
        if named:
            other = [one for one in mine if not _has_settings(one, entry)]
            excluded += [
                ExcludedRun(one.name, "not counted: made with other settings") for one in other
            ]
            mine = [one for one in mine if _has_settings(one, entry)]
        exact = [one for one in mine if one.name == entry.get("run")]
        chosen = _latest(exact or mine)
        excluded += [
            ExcludedRun(one.name, f"{chosen.name} is used")
            for one in mine
            if chosen and one is not chosen
        ]
        if chosen is None:
            excluded.append(
                ExcludedRun(cell.name, f"{NO_RUN}; {entry.get('status', 'never started')}")
            )
        elif chosen.problem:
            failed = FAILED if entry.get("status") == "failed" else ""
            excluded.append(ExcludedRun(cell.name, chosen.problem + failed))
        else:
            runs += [
                FinishedRun(cell.method, cell.seed, at, chosen) for at in plan.compared_at(cell)
            ]
    excluded += [
        ExcludedRun(one.name, "not a cell of the study") for one in records if one.where not in used
    ]
    return Results(plan, runs, excluded, records=records)


def _belongs_to(record: RunRecord, cell: Cell) -> bool:
    """Return whether the tags of a run, or its name where it has none, are those of the cell."""
    tags = record.tags
    if "label" in tags:
        levels = {axis: tags.get(axis) for axis in cell.levels}
        seed = record.metadata.get("seed")
        return (tags["label"], seed, levels) == (cell.method, cell.seed, dict(cell.levels))
    return re.fullmatch(rf"{re.escape(cell.name)}(-\d+)?", record.name) is not None


def _has_settings(record: RunRecord, entry: Mapping[str, Any]) -> bool:
    """Return whether a run was made with the settings of a cell.

    MLflow keeps settings as text, which cannot tell: there the name decides.
    """
    if record.settings and record.typed:
        if "registered" in entry:
            return has_registered_hash(record.settings, entry["registered"])
        return has_hash(record.settings, entry.get("hash"))
    return bool(record.problem) or (not record.typed and record.name == entry.get("run"))


def _latest(records: list[RunRecord]) -> RunRecord | None:
    """Return the finished run with the highest number; an unfinished one when none is finished."""
    return max(records, key=lambda one: (not one.problem, len(one.name), one.name), default=None)


def with_metric(results: Results, metric: str | None) -> Results:
    """Return the results with another primary metric.

    An accuracy of another model, such as ``final/accuracy`` in a study that selects by validation,
    changes the selection with it, so that all columns are of that model.

    Raises:
        InputError: no run has the metric, or it is not known whether more of it is better.
    """
    if metric is not None:
        study = results.study.with_metric(metric)
        results = selected(replace(results, study=study))
    study = results.study
    known = sorted({name for run in results.runs for name in run.metrics})
    if study.metric not in known:
        near = nearest(study.metric, known) or study.selected_metric
        rule = f"no run of {study.name} has it"
        raise InputError(f"metric {study.metric}", rule, f"write --metric {near}")
    higher_is_better(study.metric, study.task)
    return replace(results, study=study)


def check_comparable(results: Results) -> None:
    """Check that what is compared has one data set, one number of rounds and, seed by seed, one
    partition.

    Asynchronous rounds are versions of the model, made of fewer uploads, and may be more. All runs
    have one primary metric. Levels of a grid may differ in the rest, since methods are compared
    within a level; the two levels of a degradation may not, except in the content of the data set.

    Raises:
        InputError: two runs differ.
    """
    hint = "give each task its own study"
    _require_one(results.runs, "primary metric", lambda run: run.task.primary, hint)
    metric = results.study.metric
    having = [run for run in results.runs if metric in run.metrics]
    hint = "runs keep what the class that adds it said of it: give those of another version their own study"
    _require_one(
        having, f"direction of {metric}", lambda run: str(direction(metric, run.task)), hint
    )
    hint = "joules of two sources are never in one table: give each source its own study"
    with_joules = [run for run in results.runs if run.label_of_joules]
    _require_one(with_joules, "source of joules", lambda run: run.label_of_joules, hint)
    degradation = results.study.degradation or {}
    axis = degradation.get("axis", "")
    compared = (degradation.get("stressed"), degradation.get("clean"))
    groups: dict[tuple[tuple[str, str], ...], list[FinishedRun]] = {}
    alike: dict[tuple[tuple[str, str], ...], list[FinishedRun]] = {}
    for run in results.runs:
        if run.content:  # runs of before, of images known by a name, have none
            alike.setdefault(tuple(run.levels.items()), []).append(run)
        levels = dict(run.levels)
        if axis in levels and levels[axis] in compared:
            del levels[axis]
        groups.setdefault(tuple(levels.items()), []).append(run)
    readers: dict[tuple[str, str, int | None], list[FinishedRun]] = {}
    """Runs with the same settings of a clock, a topology or data, or of one method, which read the
    same files; a public set is drawn for each seed."""
    for run in results.runs:
        for name in {**run.files, **run.data_hashes}:
            own = {k: v for k, v in run.protocol.items() if is_under(k, [FILES.get(name, "data")])}
            seed = run.seed if name == "public" else None
            key = name, str(own or (run.label, run.levels)), seed
            readers.setdefault(key, []).append(run)
    for (name, *_), runs in readers.items():
        read = FILES.get(name, "data")
        hint = f"a file of {read} has changed: run all again with one version of it"
        what = f"content of {f'the files of {read}' if name in FILES else IDENTITY[name]}"
        if name == "tokens":
            hint = "the tokeniser or its template has changed: run all again with one version of it"
        _require_one(runs, what, partial(_hash_of, name), hint)
    for runs in alike.values():
        hint = "the examples are not the same: run all methods again on one version of the files"
        _require_one(runs, "content of the data", lambda run: run.content, hint)
    for runs in groups.values():
        hint = "a study has one data set; give each its own study"
        _require_one(runs, "data set", lambda run: run.dataset, hint)
        hint = "run them again with the same --trainer.max_rounds"
        # of published runs it is part of the protocol, and nothing says which were stopped early
        rounds = [run for run in runs if not run.has_versions and run.published is None]
        _require_one(rounds, "number of rounds", lambda run: str(run.asked_rounds), hint)
        hint = (
            "give all methods the same data.* settings (FedKD's public set is taken from the training "
            "set: set it for all), name a control of another partition in the study: controls: [LABEL]"
        )
        for seed in sorted({run.seed for run in runs}):
            controls = results.study.controls
            same_seed = [run for run in runs if run.seed == seed and run.label not in controls]
            if same_seed:
                _require_one(same_seed, "partition", lambda run: run.partition, hint)


def _hash_of(name: str, run: FinishedRun) -> str:
    return {**run.files, **run.data_hashes}[name]


def _require_one(
    runs: list[FinishedRun], what: str, value: Callable[[FinishedRun], str], hint: str
) -> None:
    for run in runs:
        first = runs[0]
        is_hash = what == "partition" or what.startswith("content")
        both = (value(one)[:12] if is_hash else value(one) for one in (first, run))
        given = f"{first.name} has {what} {next(both)}, {run.name} has {what} {next(both)}"
        rule = f"methods are compared on one {what}{(' a seed' if what == 'partition' else '')}"
        require(value(run) == value(first), given, rule, f"{hint}, or leave one out")
