"""The study file: methods x seeds x grid, and the questions to its results.

    study: exp2_embedded              # folder under default_root_dir, and experiment in MLflow
    config: kd_default.yaml           # one `fit` configuration or a list, layered; relative to the study file
    methods:                          # label -> what differs
      FedMPQKD: {}
      FedMPQ: {config: fedmpq.yaml}
      FedAvg: {config: fedavg.yaml, grid: false}    # what the grid varies is none of its settings
      FedMPQKD a=1: {settings: {model.alpha: 1.0}}
    overlays: big_network.yaml        # optional: layered on top of every method's configuration
    grid:                             # optional: axis -> level -> the same form; every combination is run
      noise: {on: {}, off: {config: overlays/noise_off.yaml}}
    settings: {trainer.max_rounds: 100}   # optional: dotted `fit` settings of every cell
    seeds: [0, 1, 2]
    until: {max_seeds: 40}            # optional: seeds are added until every criterion is decided
    tuned: tuned/exp2_embedded.yaml   # optional: what `tune` chose for each method

The rest is for the report: ``selection metric proposed alone controls degradation target_accuracy target
criteria premises claimed``; ``test`` is for the sweep. Of two settings of one name the later wins: config,
method, overlays, grid; then `settings` of study, method, record of `tune`, grid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import InputError
from fl_lightning.probing import PROBES
from fl_lightning.study.metric_names import (
    CLASSIFICATION,
    CLOCKS,
    KNOWN,
    MEASURES,
    TaskMetrics,
    higher_is_better,
    task_columns,
)
from fl_lightning.study.spec.criteria import Criterion, check_needs, parse
from fl_lightning.study.spec.entries import (
    CriterionEntries,
    DegradationEntries,
    MethodEntries,
    PremiseEntries,
    ProbingEntries,
    StudyEntries,
    VariationEntries,
    as_entry,
)
from fl_lightning.study.spec.selection import Selection, for_primary, selected_metric, selection_of
from fl_lightning.study.spec.spec_file import SpecFile
from fl_lightning.study.spec.stopping import StoppingRule, stopping_rule
from fl_lightning.study.spec.tuned import TunedRecord, method_hash, tuned_record
from fl_lightning.support.redaction import redact_settings

RESERVED = (
    *("study", "label", "method", "seed", "dataset", "commit", "dirty", "run_dir", "partition_sha256"),
    "registration",
)
"""Tags that every run has: none of them can name an axis."""
METRICS = [
    *(column.metric for column in (*KNOWN, *CLOCKS)),
    *(column.metric for primary in MEASURES for column in task_columns(TaskMetrics(primary))),
    *(f"final/{form}_{primary}" for primary in MEASURES for form in ("best_val", "last5_val")),
    "total/wasted_bytes",
]
MAX_CELLS = 10_000
"""Runs of one study."""


@dataclass(frozen=True)
class Variation:
    """The changes that a method or a level of an axis makes.

    Args:
        configs: ``fit`` configurations, layered.
        settings: dotted ``fit`` settings.
        in_grid: False for a method that has no level of the grid: it is run once for each seed, and this run
            is compared at every level.
    """

    configs: tuple[Path, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    in_grid: bool = True

    def document(self) -> dict[str, Any]:
        """Return the entry as it is written in a study file, with absolute paths."""
        document = {"config": [str(path.resolve()) for path in self.configs], "settings": dict(self.settings)}
        given = {key: value for key, value in document.items() if value}
        return given if self.in_grid else {**given, "grid": False}


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Args:
        method: the label of its method.
        seed: its seed.
        levels: axis -> level; none for a method that is not in the grid.
        args: arguments of ``fit``, without those that the sweep adds.
    """

    method: str
    seed: int
    levels: Mapping[str, str]
    args: list[str]

    @property
    def name(self) -> str:
        """The name of the run and of its folder.

        >>> Cell("FedMPQ", 0, {"noise": "on"}, []).name
        'FedMPQ-noise=on-seed0'
        """
        levels = [f"{axis}={level}" for axis, level in self.levels.items()]
        return "-".join([self.method, *levels, f"seed{self.seed}"])


@dataclass(frozen=True)
class Study:
    """A study, as its file describes it.

    Args:
        name: the name of the study, of its folder of runs and of its MLflow experiment.
        path: the study file.
        seeds: the seeds of every method, each once.
        methods: label -> its changes.
        common: the configurations and settings that all cells share before the method's.
        overlays: the configurations on top of every method's.
        grid: axis -> level -> its changes.
        test: the flags of the ``test`` that is run on every finished cell; None: no test is run.
        selection: the model that all tables hold, and what ``primary(L)`` stands for: ``last5``, the last
            round's model and the mean of the last five evaluated rounds; ``best_val``, the model of the round
            that validation chose; ``last``, the last round's.
        metric: the primary metric of the report; by default that of the task, of the selected model.
        proposed: the labels that are not baselines.
        alone: the label of the method in which every client trains alone, for negative transfer; empty: the
            one of the class ``LocalOnly``.
        controls: the labels whose clients may hold other examples than those of the other methods, such as an
            IID control.
        degradation: ``axis``, ``stressed`` and ``clean``: the levels whose difference is reported, paired by
            seed.
        target_accuracy: an accuracy in (0, 1]; rounds and megabytes to it are reported.
        target: the same for any task: a value of its primary metric; None: there is none, or it is
            ``target_accuracy``.
        criteria: the claims about the results, each a text or a mapping as in the study file.
        premises: what must occur for the criteria to be tested, in the same form.
        claimed: figures that were claimed elsewhere; only the report reads them.
        until: the rule by which seeds are added to ``seeds``; None: these are all.
        tuned: what ``tune`` chose for each method; None: nothing.
        task: the task of the runs; no part of the study file, since it follows from the data.
    """

    name: str
    path: Path
    seeds: list[int]
    methods: Mapping[str, Variation]
    common: Variation = Variation()
    overlays: tuple[Path, ...] = ()
    grid: Mapping[str, Mapping[str, Variation]] = field(default_factory=dict)
    test: Mapping[str, Any] | None = None
    selection: Selection = "last5"
    metric: str = selected_metric("last5")
    proposed: list[str] = field(default_factory=list)
    alone: str = ""
    controls: list[str] = field(default_factory=list)
    degradation: Mapping[str, str] | None = None
    target_accuracy: float | None = None
    target: float | None = None
    criteria: list[str | dict[str, Any]] = field(default_factory=list)
    premises: list[str | dict[str, Any]] = field(default_factory=list)
    claimed: Any = None
    until: StoppingRule | None = None
    tuned: TunedRecord | None = None
    task: TaskMetrics = CLASSIFICATION

    @property
    def selected_metric(self) -> str:
        """The metric that ``primary(L)`` stands for."""
        return selected_metric(self.selection, self.task.primary)

    @property
    def target_value(self) -> float | None:
        """The value of the primary metric that rounds and megabytes are counted to."""
        return self.target_accuracy if self.target is None else self.target

    def with_metric(self, metric: str) -> Study:
        """Return the study with another primary metric, and with the selection that it is about."""
        return replace(self, metric=metric, selection=selection_of(metric) or self.selection)

    def with_task(self, task: TaskMetrics) -> Study:
        """Return the study of runs of this task."""
        if task == self.task:
            return self
        return replace(self, task=task, metric=for_primary(self.metric, self.selection, task.primary))

    def parsed_criteria(self) -> list[Criterion]:
        """Return the criteria, checked.

        Raises:
            InputError: one cannot be read.
        """
        return self._parsed(self.criteria)

    def parsed_premises(self) -> list[Criterion]:
        """Return the premises, checked.

        Raises:
            InputError: one cannot be read.
        """
        return self._parsed(self.premises)

    def _parsed(self, entries: Sequence[str | dict[str, Any]]) -> list[Criterion]:
        return [parse(**entry, labels=list(self.methods), grid=self.grid) for entry in map(as_entry, entries)]

    @classmethod
    def read(cls, path: str | Path, find_configs: bool = True, with_record: bool = True) -> Study:
        """Read a study file.

        Args:
            path: the file.
            find_configs: whether the configurations that it names must exist; a report of finished runs needs
                none.
            with_record: whether the record of ``tune`` that it names is read; it need not be there before
                ``tune`` has written it.

        Raises:
            InputError: it cannot be read, or something in it is wrong; the message names the file and the
                key.
        """
        file = SpecFile(Path(path), find_configs)
        entries = file.read(StudyEntries, "study file")
        if not with_record:
            entries.tuned = None
        return _study(file, entries)

    @property
    def seed_order(self) -> list[int]:
        """All seeds that may be run, in the order in which they are run and looked at."""
        return self.seeds if self.until is None else self.until.seeds(self.seeds)

    def cells(self) -> list[Cell]:
        """Return every run, seed by seed, so that a sweep that is stopped early has whole comparisons."""
        count = len(self.seeds) * len(self.methods) * math.prod(map(len, self.grid.values()))
        if count > MAX_CELLS:
            parts = (
                f"{len(self.methods)} methods, {len(self.seeds)} seeds and a grid of {len(self.grid)} axes"
            )
            given, rule = f"{self.path}: {count} cells of {parts}", f"a study has at most {MAX_CELLS}"
            raise InputError(given, rule, "leave axes or levels out")
        return [
            self._cell(label, seed, levels if method.in_grid else {})
            for seed in self.seeds
            for place, levels in enumerate(self.combinations())
            for label, method in self.methods.items()
            if method.in_grid or place == 0
        ]

    def combinations(self) -> list[dict[str, str]]:
        """Return every combination of levels, axis -> level; one without levels where there is no grid."""
        return [dict(zip(self.grid, levels, strict=True)) for levels in product(*self.grid.values())]

    def compared_at(self, cell: Cell) -> list[Mapping[str, str]]:
        """Return the combinations of levels at which the run of a cell is compared."""
        return [cell.levels] if self.methods[cell.method].in_grid else [*self.combinations()]

    def _cell(self, label: str, seed: int, levels: dict[str, str]) -> Cell:
        method = self.methods[label]
        chosen = [self.grid[axis][level] for axis, level in levels.items()]
        configs = [
            *self.common.configs,
            *method.configs,
            *self.overlays,
            *(path for level in chosen for path in level.configs),
        ]
        settings = {**self.common.settings, **method.settings, **self.tuned_settings(label)}
        for level in chosen:
            settings |= level.settings
        return Cell(label, seed, levels, as_arguments(configs, settings, seed))

    def tuned_settings(self, label: str) -> Mapping[str, Any]:
        """Return the settings that ``tune`` chose for a method."""
        return {} if self.tuned is None else self.tuned.chosen[label].settings

    def to_yaml(self) -> str:
        """Return the study file with absolute paths, so that a copy can be read anywhere on this machine."""
        document = {
            "study": self.name,
            "seeds": self.seeds,
            **self.common.document(),
            "methods": {label: method.document() for label, method in self.methods.items()},
            "overlays": [str(path.resolve()) for path in self.overlays],
            "grid": {
                axis: {name: level.document() for name, level in levels.items()}
                for axis, levels in self.grid.items()
            },
            "test": True if self.test == {} else self.test,
            "selection": self.selection,
            "metric": self.metric,
            "proposed": self.proposed,
            "alone": self.alone or None,
            "controls": self.controls,
            "degradation": self.degradation,
            "target_accuracy": self.target_accuracy,
            "target": self.target,
            "criteria": self.criteria,
            "premises": self.premises,
            "claimed": self.claimed,
            "until": self.until and self.until.document(),
            "tuned": self.tuned and self.tuned.document(),
        }
        given = {key: value for key, value in document.items() if value not in (None, [], {})}
        return yaml.safe_dump(redact_settings(given), sort_keys=False, allow_unicode=True, width=130)


def as_arguments(configs: Sequence[Path], settings: Mapping[str, Any], seed: int) -> list[str]:
    """Return the arguments of ``fit``."""
    layered = [part for path in configs for part in ("--config", str(path))]
    flags = [f"--{key}={as_flag(value)}" for key, value in settings.items()]
    return [*layered, *flags, f"--seed_everything={seed}"]


def as_flag(value: Any) -> str:
    """Return a setting as it is written after ``--name=``.

    >>> as_flag(True), as_flag(None), as_flag(float("inf")), as_flag([1, 2]), as_flag("1e-4")
    ('true', 'null', '.inf', '[1, 2]', '1e-4')
    """
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    return value if isinstance(value, str) else json.dumps(value)


def _study(file: SpecFile, given: StudyEntries) -> Study:
    """Check what the entries mean together."""
    if not given.seeds:
        raise file.wrong("seeds", given.seeds)
    repeated = len({*given.seeds}) < len(given.seeds)
    file.require(not repeated, f"seeds: {given.seeds}", "each seed is run once", "remove the repeated one")
    methods, grid = _variations(file, given.methods, "methods", MethodEntries), {}
    for axis, levels in given.grid.items():
        file.name(axis, "grid")
        taken = axis in RESERVED or axis.startswith("mlflow.")
        file.require(not taken, f"grid.{axis}", "every run has a tag of that name", f"write {axis}_axis")
        grid[axis] = _variations(file, levels, f"grid.{axis}")
    study = Study(
        name=file.name(given.study, "study"),
        path=file.path,
        seeds=[int(seed) for seed in given.seeds],
        methods=methods,
        common=Variation(file.configs(given.config, "config"), file.settings(given.settings, "settings")),
        overlays=file.configs(given.overlays, "overlays"),
        grid=grid,
        **_selected(file, given, _test(file, given.test)),
        proposed=[file.one_of(label, methods, "proposed") for label in given.proposed],
        alone="" if given.alone is None else file.one_of(given.alone, methods, "alone"),
        controls=[file.one_of(label, methods, "controls") for label in given.controls],
        degradation=None if given.degradation is None else _degradation(file, given.degradation, grid),
        **_target(file, given),
        criteria=[_criterion(file, entry, "criteria", CriterionEntries) for entry in given.criteria],
        premises=[_criterion(file, entry, "premises", PremiseEntries) for entry in given.premises],
        claimed=given.claimed,
        until=None if given.until is None else stopping_rule(file, given.until, given.seeds, given.criteria),
        tuned=None if given.tuned is None else tuned_record(file, given.tuned),
    )
    if study.tuned is not None:
        hashes = {label: method_hash(one.configs, one.settings) for label, one in methods.items()}
        study.tuned.check(f"{file.path}: ", hashes)
    rule, instead = "each is compared with it, and clients hold other examples in a control", "leave it out"
    file.require(study.alone not in study.controls, f"controls: {study.alone} is alone too", rule, instead)
    first: dict[str, str] = {}
    for name in (cell.name for cell in replace(study, seeds=study.seed_order).cells()):
        file.name(name, "cell")
        same = first.setdefault(name.lower(), name)  # some file systems do not tell A from a
        rule = "their names must differ, in more than case"
        file.require(same is name, f"cells {same} and {name}", rule, "rename a method or a level")
    _check_criteria(file, study)  # hours before the report finds it
    higher_is_better(study.metric)
    return study


def _criterion(file: SpecFile, given: Any, where: str, schema: type) -> str | dict[str, Any]:
    """Check the form of a criterion or premise; what it says is checked later."""
    if isinstance(given, str):
        return given
    entries = dict(vars(file.parse(schema, given, f"{where}.")))
    if entries.get("share") is not None:
        entries["share"] = float(entries["share"])
    return {key: value for key, value in entries.items() if value not in (None, "", [])}


def _check_criteria(file: SpecFile, study: Study) -> None:
    """Check what criteria and premises say, and that their names fit together."""
    criteria, premises = study.parsed_criteria(), study.parsed_premises()
    for criterion in (*criteria, *premises):
        check_needs(criterion, study.degradation, study.target_value, study.alone, study.controls)
    names = [criterion.name for criterion in (*criteria, *premises) if criterion.name]
    for name in names:
        file.require(names.count(name) == 1, f"name: {name}", "each name is given once", "write another")
    known = [criterion.name for criterion in criteria if criterion.name]
    for premise in premises:
        for name in premise.needed_by:
            near = [*get_close_matches(name, known, n=1, cutoff=0.0), "and give a criterion that name"]
            rule = f"it is the name of a criterion: {', '.join(known) or 'none has a name'}"
            file.require(name in known, f"premises.needed_by: {name}", rule, f"write {near[0]}")


def _variations(
    file: SpecFile, given: Any, where: str, schema: type[VariationEntries] = VariationEntries
) -> dict[str, Variation]:
    found = {}
    for name, value in file.names(given, where).items():
        key = f"{where}.{name}."
        entries = file.parse(schema, value, key)
        configs, settings = file.configs(entries.config, f"{key}config"), f"{key}settings"
        in_grid = getattr(entries, "grid", True)
        found[name] = Variation(configs, file.settings(entries.settings, settings), in_grid)
    return found


def _test(file: SpecFile, given: bool | list[str] | dict[str, Any]) -> dict[str, Any] | None:
    """Return the flags of ``test``, or None where no test is asked for."""
    if isinstance(given, bool):
        return {} if given else None
    entries = ProbingEntries(given) if isinstance(given, list) else file.parse(ProbingEntries, given, "test.")
    probes, flags = entries.probes, {}
    if probes is not None:
        if not probes:
            raise file.wrong("probes", probes, "test.")
        names = [name.strip() for name in (probes.split(",") if isinstance(probes, str) else probes)]
        flags["probes"] = ",".join(file.one_of(name, PROBES, "test") for name in names)
    if entries.checkpoint is not None:
        if not re.fullmatch(r"last|best|round_\d{6}", entries.checkpoint):
            raise file.wrong("checkpoint", entries.checkpoint, "test.")
        flags["checkpoint"] = entries.checkpoint
    return flags


def _selected(file: SpecFile, given: StudyEntries, test: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``selection``, ``metric`` and ``test``, which must be about one model.

    A study whose runs are made already is read as it was written: what ``test`` measured of another round is
    then left out of its report, and listed.
    """
    metric, tested = given.metric and _metric(file, given.metric), (test or {}).get("checkpoint")
    of_test: Selection = "best_val" if tested == "best" else "last5"
    selection = given.selection or selection_of(metric or "") or of_test
    of_metric = selection_of(metric or "") or selection
    rule = f"all tables of a study are of one model, and this is that of selection: {of_metric}"
    instead = f"leave metric out, or write selection: {of_metric}"
    said = f"metric: {metric} with selection: {selection}"
    file.require(of_metric == selection, said, rule, instead)
    needed = "best" if selection == "best_val" else "last"
    rule = f"all tables are of one model, and that of selection: {selection} is in checkpoint: {needed}"
    other = "best_val" if tested == "best" else "last5"
    hint = f", or selection: {other}" if tested in ("best", "last") else ""
    instead = f"write checkpoint: {needed}{hint}"
    fits = tested in (None, needed) or not file.find_configs
    file.require(fits, f"test.checkpoint: {tested} with selection: {selection}", rule, instead)
    if test is not None and tested is None and needed == "best":
        test = {**test, "checkpoint": needed}
    return {"selection": selection, "metric": metric or selected_metric(selection), "test": test}


def _target(file: SpecFile, given: StudyEntries) -> dict[str, Any]:
    """Return ``target_accuracy`` or ``target``, whichever is given."""
    both = {"target_accuracy": given.target_accuracy, "target": given.target}
    found = {name: float(value) for name, value in both.items() if value is not None}
    rule, instead = "both are the value that rounds are counted to", "leave one of them out"
    file.require(len(found) < 2, "target_accuracy and target", rule, instead)
    if not all(map(math.isfinite, found.values())):
        raise file.wrong("target", given.target)
    return found


def _metric(file: SpecFile, metric: str) -> str:
    """Refuse unknown metrics of groups that only this program writes; others may come from methods and
    callbacks."""
    known = metric in METRICS or ("/" in metric and not metric.startswith(("final/", "total/", "target/")))
    near = [*get_close_matches(metric, METRICS, n=1), selected_metric("last5")]
    file.require(known, f"metric: {metric}", "no run has such a metric", f"write metric: {near[0]}")
    return metric


def _degradation(
    file: SpecFile, given: dict[str, Any], grid: Mapping[str, Mapping[str, Variation]]
) -> dict[str, str]:
    entries = file.parse(DegradationEntries, given, "degradation.")
    levels = grid[file.one_of(entries.axis, grid, "degradation.axis")]
    for key in ("stressed", "clean"):
        file.one_of(getattr(entries, key), levels, f"degradation.{key}")
    other = next((level for level in levels if level != entries.clean), "another level")
    same = f"degradation: stressed and clean are both {entries.clean}"
    rule = "it is the difference of two levels"
    file.require(entries.stressed != entries.clean, same, rule, f"write stressed: {other}")
    return vars(entries)
