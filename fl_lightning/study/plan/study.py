"""The study file: methods x seeds x grid, and the questions to its results.

    study: exp2_embedded              # folder under default_root_dir, and experiment in MLflow
    config: kd_default.yaml           # one `fit` configuration or a list, relative to this file
    methods:                          # label -> what differs
      FedMPQKD: {}
      FedMPQ: {config: fedmpq.yaml}
      FedAvg: {config: fedavg.yaml, grid: false}    # what the grid varies is none of its settings
      FedMPQKD a=1: {settings: {model.alpha: 1.0}}
    overlays: big_network.yaml        # optional: layered on top of every method's configuration
    grid:                             # optional: axis -> level -> the same form; all combinations
      noise: {on: {}, off: {config: overlays/noise_off.yaml}}
    settings: {trainer.max_rounds: 100}   # optional: dotted `fit` settings of every cell
    seeds: [0, 1, 2]
    until: {max_seeds: 40}            # optional: seeds are added until every criterion is decided
    tuned: tuned/exp2_embedded.yaml   # optional: what `tune` chose for each method
    published: leaderboard_digits     # optional: a folder of `compare`, whose methods join in

The rest is for the report: ``selection metric proposed alone controls degradation target_accuracy
target criteria premises claimed``; ``test`` is for the sweep. Of two settings of one name the later
wins: config, method, overlays, grid; then `settings` of study, method, record of `tune`, grid.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml

from fl_lightning.config.near_names import nearest, short_name
from fl_lightning.config.settings import is_under
from fl_lightning.errors import InputError
from fl_lightning.study.metric_names import (
    CLASSIFICATION,
    CLOCKS,
    KNOWN,
    MEASURES,
    PACKAGE_FAMILIES,
    TaskMetrics,
    higher_is_better,
    may_be_of_named,
    task_columns,
)
from fl_lightning.study.plan.criteria import Criterion, check_needs, parse
from fl_lightning.study.plan.entries import (
    PATHS,
    SETTINGS,
    as_entry,
    read_claims,
    read_degradation,
    read_test,
    registered_claims,
)
from fl_lightning.study.plan.published import PublishedStudy, read_published, registered_marks
from fl_lightning.study.plan.schema import absolute, as_given, entries, entry, same, written
from fl_lightning.study.plan.selection import Selection, for_primary, selected_metric, selection_of
from fl_lightning.study.plan.spec_file import Seed, Share, SpecFile
from fl_lightning.study.plan.stopping import StoppingRule, check_rule, stopping_rule
from fl_lightning.study.plan.tuned import (
    Tuned,
    TunedByLevel,
    check_levels,
    method_hash,
    runs_hash,
    tuned_record,
    tuned_settings,
)
from fl_lightning.study.plan.variations import (
    Variation,
    grid_names,
    grid_of_names,
    read_grid,
    read_methods,
)
from fl_lightning.support.redaction import redact_settings

METRICS = [
    *(column.metric for column in (*KNOWN, *CLOCKS)),
    *(column.metric for primary in MEASURES for column in task_columns(TaskMetrics(primary))),
    *(f"final/{form}_{primary}" for primary in MEASURES for form in ("best_val", "last5_val")),
    "total/wasted_bytes",
]
MAX_CELLS = 10_000
"""Runs of one study."""


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


def _seeds(file: SpecFile, given: list[int], key: str) -> list[int]:
    if not given:
        raise file.wrong(Study, key, given)
    repeated = len({*given}) < len(given)
    file.require(
        not repeated, f"{key}: {given}", "each seed is run once", "remove the repeated one"
    )
    return [int(seed) for seed in given]


def _finite(file: SpecFile, given: float, key: str) -> float:
    if not math.isfinite(given):
        raise file.wrong(Study, key, given)
    return float(given)


def _metric(file: SpecFile, metric: str, key: str) -> str:
    """Refuse unknown metrics of groups that only this program writes; others may come from methods
    and callbacks."""
    _check_metric(file, metric, f"metric: {metric}", "write metric: ")
    return metric


def _check_metric(file: SpecFile, metric: str, given: str, write: str) -> None:
    known = (
        metric in METRICS
        or ("/" in metric and not metric.startswith(("final/", "total/", "target/")))
        or may_be_of_named(metric)
    )
    near = nearest(metric, METRICS) or selected_metric("last5")
    file.require(known, given, "no run has such a metric", f"{write}{near}")


CLAIM = (
    "it is a list of texts, or of mappings with a key 'criterion'",
    "[accuracy(A) - accuracy(B) >= 0.01]",
)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study, as its file describes it: the one place that says what a key of the file is.

    Args:
        name: the name of the study, of its folder of runs and of its MLflow experiment.
        path: the study file.
        seeds: the seeds of every method, each once.
        methods: label -> its changes.
        configs: the configurations that all cells share before the method's.
        settings: the settings that all cells share before the method's.
        overlays: the configurations on top of every method's.
        grid: axis -> level -> its changes.
        test: the flags of the ``test`` that is run on every finished cell; None: no test is run.
        selection: the model that all tables hold, and what ``primary(L)`` stands for: ``last5``,
            the last round's model and the mean of the last five evaluated rounds; ``best_val``, the
            model of the round that validation chose; ``last``, the last round's.
        metric: the primary metric of the report; by default that of the task, of the selected
            model.
        proposed: the labels that are not baselines.
        alone: the label of the method in which every client trains alone, for negative transfer;
            empty: the one of the class ``LocalOnly``.
        controls: the labels whose clients may hold other examples than those of the other methods,
            such as an IID control.
        degradation: ``axis``, ``stressed`` and ``clean``: the levels whose difference is reported,
            paired by seed.
        target_accuracy: an accuracy in (0, 1]; rounds and megabytes to it are reported.
        target: the same for any task: a value of its primary metric; None: there is none, or it is
            ``target_accuracy``.
        criteria: the claims about the results, each a text or a mapping as in the study file.
        premises: what must occur for the criteria to be tested, in the same form.
        claimed: figures that were claimed elsewhere; only the report reads them.
        until: the rule by which seeds are added to ``seeds``; None: these are all.
        tuned: what ``tune`` chose for each method, at each level of an axis or at all; None:
            nothing.
        published: published studies, whose runs are compared with those of this one and are not run
            again.
        task: the task of the runs; no part of the study file, since it follows from the data.
    """

    path: Path
    task: TaskMetrics = CLASSIFICATION
    name: str = entry(
        "it is a string", "my_study", key="study", read=SpecFile.name, register=same, compared=False
    )
    seeds: list[int] = entry(
        "it is a list of integers, 0 or more, below 2^63, at least one",
        "[0, 1, 2]",
        list[Seed],
        read=_seeds,
        register=list,
        compared=False,  # the stopping rule compares them
    )
    configs: tuple[Path, ...] = entry(
        *PATHS, str | list[str], default=(), key="config", read=SpecFile.configs
    )
    settings: Mapping[str, Any] = entry(
        *SETTINGS, dict[str, Any], factory=dict, read=SpecFile.settings
    )
    methods: Mapping[str, Variation] = entry(
        "it is a mapping with at least one entry", "{FedMPQ: {}}", dict[str, Any], read=read_methods
    )
    overlays: tuple[Path, ...] = entry(*PATHS, str | list[str], default=(), read=SpecFile.configs)
    grid: Mapping[str, Mapping[str, Variation]] = entry(
        "it is a mapping",
        "{noise: {on: {}, off: {}}}",
        dict[str, Any],
        factory=dict,
        read=read_grid,
        register=grid_names,
        restore=grid_of_names,
    )
    test: Mapping[str, Any] | None = entry(
        "it is true, a list of probes, or a mapping of flags",
        "[clean, corruptions]",
        bool | list[str] | dict[str, Any],
        default=None,
        read=read_test,
        write=lambda flags: flags or True,
    )
    selection: Selection = entry(
        "it is one of last5, best_val, last", "last5", default="last5", register=same
    )
    metric: str = entry(
        "it is a string",
        "final/best_val_accuracy",
        default=selected_metric("last5"),
        read=_metric,
        register=same,
    )
    proposed: list[str] = entry(
        "it is a list of strings", "[FedMPQKD]", factory=list, register=list
    )
    alone: str = entry(
        "it is the label of the method in which every client trains alone",
        example="LocalOnly",
        default="",
        register=same,
        later=True,
    )
    controls: list[str] = entry(
        "it is a list of labels of methods", "[FedAvg IID]", factory=list, register=list, later=True
    )
    degradation: Mapping[str, str] | None = entry(
        "it is a mapping",
        "{axis: noise, stressed: on, clean: off}",
        dict[str, Any],
        default=None,
        read=read_degradation,
        register=dict,
    )
    target_accuracy: float | None = entry(
        "it is a share in (0, 1]", "0.9", Share, default=None, read=_finite, register=same
    )
    target: float | None = entry(
        "it is a number, a value of the primary metric",
        example="8.0",
        default=None,
        read=_finite,
        register=same,
        later=True,
    )
    criteria: list[str | dict[str, Any]] = entry(
        *CLAIM, factory=list, read=read_claims, register=registered_claims
    )
    premises: list[str | dict[str, Any]] = entry(
        *CLAIM, factory=list, read=read_claims, register=registered_claims
    )
    claimed: Any = entry("it is whatever was claimed", "{FedMPQKD: 0.8}", default=None)
    until: StoppingRule | None = entry(
        "it is decided, or a mapping of max_seeds and max_hours",
        "{max_seeds: 40, max_hours: 6}",
        Literal["decided"] | dict[str, Any],
        default=None,
        read=stopping_rule,
    )
    tuned: Tuned | None = entry(
        "it is the path of a record of tune, or such a path for each level of one axis",
        "tuned/my_study.yaml",
        str | dict[str, Any],
        default=None,
        read=tuned_record,
    )
    published: tuple[PublishedStudy, ...] = entry(
        "it is the folder of a report of compare, or a list of folders",
        "docs/results/leaderboard_digits",
        str | list[str],
        default=(),
        read=read_published,
        register=registered_marks,
        restore=None,
        later=True,
    )

    @property
    def labels(self) -> list[str]:
        """The labels of all methods that are compared: those that are run, and those that are
        published."""
        return list(
            dict.fromkeys(
                [*self.methods, *(label for one in self.published for label in one.labels)]
            )
        )

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
        return replace(
            self, task=task, metric=for_primary(self.metric, self.selection, task.primary)
        )

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

    def is_timing(self, criterion: Criterion) -> bool:
        """Return whether a clock decides a criterion, itself or by one of its premises."""
        premises = [one for one in self.parsed_premises() if one.is_premise_of(criterion)]
        return any(one.is_timing(self.metric) for one in (criterion, *premises))

    def _parsed(self, entries: Sequence[str | dict[str, Any]]) -> list[Criterion]:
        return [
            parse(**entry, labels=self.labels, grid=self.grid) for entry in map(as_entry, entries)
        ]

    @classmethod
    def read(cls, path: str | Path, find_configs: bool = True, with_record: bool = True) -> Study:
        """Read a study file.

        Args:
            path: the file.
            find_configs: whether the configurations that it names must exist; a report of finished
                runs needs none.
            with_record: whether the record of ``tune`` that it names is read; it need not be there
                before ``tune`` has written it.

        Raises:
            InputError: it cannot be read, or something in it is wrong; the message names the file
                and the key.
        """
        file = SpecFile(Path(path), find_configs)
        given = dict(vars(file.read(as_given(cls), "study file")))  # type: ignore[arg-type]
        if not with_record:
            given["tuned"] = None
        values: dict[str, Any] = {"path": file.path}
        for key, one, known in entries(cls):
            if given[key] is not None:
                values[one.name] = known.read(file, given[key], key)
        study = cls(**values | _selected(file, values))
        _check(file, study)
        return study

    @property
    def seed_order(self) -> list[int]:
        """All seeds that may be run, in the order in which they are run and looked at."""
        return self.seeds if self.until is None else self.until.seeds(self.seeds)

    def cells(self) -> list[Cell]:
        """Return every run, seed by seed, so that a sweep that is stopped early has whole
        comparisons."""
        count = len(self.seeds) * len(self.methods) * math.prod(map(len, self.grid.values()))
        if count > MAX_CELLS:
            grid = f"a grid of {len(self.grid)} axes"
            parts = f"{len(self.methods)} methods, {len(self.seeds)} seeds and {grid}"
            given = f"{self.path}: {count} cells of {parts}"
            rule = f"a study has at most {MAX_CELLS}"
            raise InputError(given, rule, "leave axes or levels out")
        return [
            self._cell(label, seed, levels if method.in_grid else {})
            for seed in self.seeds
            for place, levels in enumerate(self.combinations())
            for label, method in self.methods.items()
            if method.in_grid or place == 0
        ]

    def combinations(self) -> list[dict[str, str]]:
        """Return every combination of levels, axis -> level; one without levels where there is no
        grid."""
        return [
            dict(zip(self.grid, levels, strict=True)) for levels in product(*self.grid.values())
        ]

    def compared_at(self, cell: Cell) -> list[Mapping[str, str]]:
        """Return the combinations of levels at which the run of a cell is compared."""
        return [cell.levels] if self.methods[cell.method].in_grid else [*self.combinations()]

    def runs_hash(self, label: str) -> str:
        """Return the hash of what all runs of a method have in common beside its own settings: what
        their configuration files say, and the study's settings."""
        configs = (*self.configs, *self.methods[label].configs, *self.overlays)
        return runs_hash(configs, self.settings)

    def set_by_levels(self, keys: Iterable[str]) -> str:
        """Return which of these settings a level of the grid sets, or a part or the whole of, in
        one line; empty where there is none."""
        levels = [level for axis in self.grid.values() for level in axis.values()]
        # what a level appends to a list takes no other's place
        set_there = [key for level in levels for key in level.settings if not key.endswith("+")]
        own = [*map(short_name, set_there)]
        short = {key: short_name(key.rstrip("+")) for key in keys}
        taken = (
            key
            for key, name in short.items()
            if is_under(name, own) or any(is_under(one, [name]) for one in own)
        )
        return ", ".join(sorted(taken))

    def _cell(self, label: str, seed: int, levels: dict[str, str]) -> Cell:
        method = self.methods[label]
        chosen = [self.grid[axis][level] for axis, level in levels.items()]
        configs = [
            *self.configs,
            *method.configs,
            *self.overlays,
            *(path for level in chosen for path in level.configs),
        ]
        settings = [
            self.settings,
            method.settings,
            tuned_settings(self.tuned, label, levels),
            *(level.settings for level in chosen),
        ]
        return Cell(label, seed, levels, as_arguments(configs, settings, seed))

    def to_yaml(self, path: Callable[[Path], str] = absolute) -> str:
        """Return the study file.

        Args:
            path: returns the text that a path is written as; by default it is absolute, so that a
                copy can be read anywhere on this machine.
        """
        document = {
            key: known.write(value) if known.write else written(value, path)
            for key, one, known in entries(type(self))
            if (value := getattr(self, one.name)) is not None
        }
        given = {key: value for key, value in document.items() if value not in (None, [], {}, "")}
        return yaml.safe_dump(
            redact_settings(given), sort_keys=False, allow_unicode=True, width=130
        )


def as_arguments(
    configs: Sequence[Path], parts: Sequence[Mapping[str, Any]], seed: int
) -> list[str]:
    """Return the arguments of ``fit``.

    Args:
        configs: the configurations, each on top of those before.
        parts: mappings of dotted settings. They are flags one after another, as if they had been
            typed, so that ``+`` appends, the last one wins, and what a class was given stays while
            the class does. A setting that is given again takes the place of the first, unless a
            part of it was set apart.
        seed: of the run.

    >>> as_arguments([], [{"a": {"b": 1}}, {"a": {"c": 2}}, {"a.c": 3}, {"a": {"d": 4}}], 0)
    ['--a={"c": 2}', '--a.c=3', '--a={"d": 4}', '--seed_everything=0']
    """
    given: list[tuple[str, Any]] = []
    for key, value in (item for part in parts for item in part.items()):
        if not key.endswith("+") and not any(one.startswith(f"{key}.") for one, _ in given):
            given = [one for one in given if one[0] != key]
        given.append((key, value))
    layered = [part for path in configs for part in ("--config", str(path))]
    flags = [f"--{key}={as_flag(value)}" for key, value in given]
    return [*layered, *flags, f"--seed_everything={seed}"]


def as_flag(value: Any) -> str:
    """Return a setting as it is written after ``--name=``.

    >>> as_flag(True), as_flag(None), as_flag(float("inf")), as_flag([1, 2]), as_flag("1e-4")
    ('true', 'null', '.inf', '[1, 2]', '1e-4')
    """
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    return value if isinstance(value, str) else json.dumps(value)


def _check(file: SpecFile, study: Study) -> None:
    """Check what the entries mean together."""
    rule, instead = "both are the value that rounds are counted to", "leave one of them out"
    both = study.target_accuracy is not None and study.target is not None
    file.require(not both, "target_accuracy and target", rule, instead)
    alone = [study.alone] if study.alone else []
    for key, labels in (
        ("proposed", study.proposed),
        ("alone", alone),
        ("controls", study.controls),
    ):
        for label in labels:
            file.one_of(label, study.labels, key)
            rule = "each label is given once"
            file.require(labels.count(label) == 1, f"{key}: {label}, twice", rule, "leave one out")
    if study.degradation is not None:
        _check_degradation(file, study.degradation, study.grid)
    taken = {*study.methods}
    for published in study.published:
        twice = published.label_among(taken)
        given, rule = f"methods: {twice}", f"a method of that name is published in {published.name}"
        file.require(not twice, given, rule, f"write {twice} here, or another name")
        published.check(f"{file.path}: ", study.seeds, study.combinations(), study.selection)
        taken |= {*published.labels}
    check_published_seeds(file, study)
    if study.until is not None:
        check_rule(study.until, study.seeds, study.criteria, f"{file.path}: ")
    if isinstance(study.tuned, TunedByLevel):
        check_levels(file, study.tuned, study)
    if study.tuned is not None:
        hashes = {
            label: method_hash(one.configs, one.settings) for label, one in study.methods.items()
        }
        runs = {label: study.runs_hash(label) for label in hashes} if file.find_configs else None
        for _, record in study.tuned.parts:
            record.check(f"{file.path}: ", hashes, study.seed_order, runs)
    rule = "each is compared with it, and clients hold other examples in a control"
    instead = "leave it out"
    file.require(
        study.alone not in study.controls, f"controls: {study.alone} is alone too", rule, instead
    )
    check_cells(file, study)
    _check_criteria(file, study)  # hours before the report finds it
    # of a metric of another family, or that was named, the runs will say which way is better
    family = study.metric.partition("/")[0]
    if family in PACKAGE_FAMILIES and not may_be_of_named(study.metric):
        higher_is_better(study.metric)


def check_published_seeds(file: SpecFile, study: Study) -> None:
    """Refuse seeds that are added beside published runs."""
    rule = "seeds are added in every method, and those of published runs are fixed"
    file.require(
        not (study.published and study.until), "until with published", rule, "leave one of them out"
    )


def check_cells(file: SpecFile, study: Study) -> None:
    """Check the number and the names of all cells that a study may have.

    Raises:
        InputError: they are too many, or a folder cannot have such a name.
    """
    if study.until is not None:
        rule = f"a study has at most {MAX_CELLS} cells"
        given = f"until: max_seeds: {study.until.max_seeds}"
        file.require(study.until.max_seeds <= MAX_CELLS, given, rule, "write fewer seeds")
    first: dict[str, str] = {}
    for name in (cell.name for cell in replace(study, seeds=study.seed_order).cells()):
        file.name(name, "cell")
        same = first.setdefault(name.lower(), name)  # some file systems do not tell A from a
        rule = "their names must differ, in more than case"
        file.require(same is name, f"cells {same} and {name}", rule, "rename a method or a level")


def _check_degradation(
    file: SpecFile, given: Mapping[str, str], grid: Mapping[str, Mapping[str, Variation]]
) -> None:
    levels = grid[file.one_of(given["axis"], grid, "degradation.axis")]
    for key in ("stressed", "clean"):
        file.one_of(given[key], levels, f"degradation.{key}")
    other = next((level for level in levels if level != given["clean"]), "another level")
    same = f"degradation: stressed and clean are both {given['clean']}"
    rule = "it is the difference of two levels"
    file.require(given["stressed"] != given["clean"], same, rule, f"write stressed: {other}")


def _check_criteria(file: SpecFile, study: Study) -> None:
    """Check what criteria and premises say, and that their names fit together."""
    criteria, premises = study.parsed_criteria(), study.parsed_premises()
    for criterion in (*criteria, *premises):
        check_needs(criterion, study.degradation, study.target_value, study.alone, study.controls)
        for metric in (one.arguments[0] for one in criterion.quantities if one.name == "metric"):
            _check_metric(file, metric, f"{criterion.text}: {metric}", "write ")
    names = [criterion.name for criterion in (*criteria, *premises) if criterion.name]
    for name in names:
        file.require(
            names.count(name) == 1, f"name: {name}", "each name is given once", "write another"
        )
    for key, claims in (("criteria", criteria), ("premises", premises)):
        asked = [(" ".join(it.text.split()), it.name, it.share, it.needed_by) for it in claims]
        for one in asked:
            rule, instead = "each is judged once", "leave one out, or give each a name"
            file.require(asked.count(one) == 1, f"{key}: {one[0]}, twice", rule, instead)
    known = [criterion.name for criterion in criteria if criterion.name]
    for premise in premises:
        for name in premise.needed_by:
            near = nearest(name, known) or "one of them, or give a criterion that name"
            rule = f"it is the name of a criterion: {', '.join(known) or 'none has a name'}"
            file.require(name in known, f"premises.needed_by: {name}", rule, f"write {near}")


def _selected(file: SpecFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``selection``, ``metric`` and ``test``, which must be about one model.

    A study whose runs are made already is read as it was written: what ``test`` measured of another
    round is then left out of its report, and listed.
    """
    metric, test = given.get("metric"), given.get("test")
    tested = (test or {}).get("checkpoint")
    of_test: Selection = "best_val" if tested == "best" else "last5"
    selection = given.get("selection") or selection_of(metric or "") or of_test
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
