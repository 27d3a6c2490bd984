"""The search file: the settings that ``tune`` may choose, and the metric that it optimises.

    study: exp2_embedded             # folder and experiment of the tuned run; trials: <study>-tune
    config: kd_default.yaml          # one `fit` configuration or a list, relative to this file
    settings: {trainer.max_rounds: 30}    # optional: of every trial and of the final run
    final: {trainer.max_rounds: 100}      # optional: settings of the final run alone
    space:                           # dotted setting -> range, or list of choices
      model.alpha: {low: 0.0, high: 1.0}
      model.optimizer.init_args.lr: {low: 1.0e-3, high: 1.0e-1, log: true}
      trainer.local_epochs: {low: 1, high: 5}
      model.temperature: [1.0, 2.0, 4.0]
    trials: 20                       # at most the number of combinations: none is tried twice
    metric: final/best_val_accuracy  # of validation or training, never of the test set; default:
                                     # the best validation of the primary metric of the runs
    direction: maximize              # default: as the metric's name, or the task of the runs, says
    seed: 0                          # of every run and of the search; or a list, with each of which
                                     # a trial runs: its metric is their mean
    prune: false                     # end trials early whose best round so far is worse than the
                                     # median of completed trials at the same round

Where ``study`` is the path of a study file, every method of the study is tuned, each with the same
space and the same number of trials; what a method alone has to set is searched within that number.
``config`` and ``settings`` are then layered over the method's, there is no ``final``, and the
outcome is a record that the study reads by ``tuned``:

    study: exp2_embedded.yaml
    config: overlays/noise_off.yaml  # optional: the level of the study's grid at which it is tuned
    space_of:                        # optional: settings that one method alone has as well
      FedMPQKD: {model.alpha: {low: 0.0, high: 1.0}}
    record: tuned/exp2_embedded.yaml # optional; the default has the study's name, and the folder of
                                     # trials has the record's
    seed: 1000                       # none of the study's seeds
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import TPESampler

from fl_lightning.config.near_names import nearest, short_name
from fl_lightning.rng import stream
from fl_lightning.study.metric_names import (
    MEASURES,
    TaskMetrics,
    direction,
    is_of_test_set,
    may_be_of_named,
)
from fl_lightning.study.plan.entries import PATHS, SETTINGS
from fl_lightning.study.plan.schema import entry
from fl_lightning.study.plan.spec_file import Seed, SpecFile
from fl_lightning.study.plan.study import Study, as_arguments
from fl_lightning.study.plan.tuned import method_hash

METRIC = "final/best_val_accuracy"
"""What is optimised where a search file names no metric and the runs are of classification."""
OF_VALIDATION = [
    f"final/{form}_{primary}" for primary in MEASURES for form in ("best_val", "last5_val")
]
"""Metrics of the end of a run that the test set has no part in."""
Direction = Literal["maximize", "minimize"]


@dataclass
class SearchEntries:
    """The entries of a search file, with their types."""

    study: str = entry("it is a string", "my_study")
    space: dict[str, Any] = entry(
        "it is a mapping with at least one entry", "{model.alpha: {low: 0.0, high: 1.0}}"
    )
    trials: Seed = entry("it is an integer, 1 or more", "20")  # type: ignore[valid-type]
    config: str | list[str] | None = entry(*PATHS, default=None)
    settings: dict[str, Any] = entry(*SETTINGS, factory=dict)
    final: dict[str, Any] = entry(*SETTINGS, factory=dict)
    metric: str | None = entry("it is a string", "final/best_val_accuracy", default=None)
    direction: Direction | None = entry("it is one of maximize, minimize", "maximize", default=None)
    seed: Seed | list[Seed] = entry(  # type: ignore[valid-type]
        "it is an integer, 0 or more, below 2^63, or a list of such", "0", default=0
    )
    prune: bool = entry("it is true or false", "true", default=False)
    record: str | None = entry("it is a path", "tuned/my_study.yaml", default=None)
    space_of: dict[str, dict[str, Any]] = entry(
        "it is a mapping of labels of methods",
        "{FedMPQKD: {model.alpha: [0.5, 1.0]}}",
        factory=dict,
    )


@dataclass
class RangeEntries:
    """The entries of a range in a search file."""

    low: int | float = entry("it is a number", "0.1")
    high: int | float = entry("it is a number", "0.1")
    log: bool = entry("it is true or false", "true", default=False)


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, both included; integers if both are.

    Args:
        low, high: the ends.
        log: whether numbers are drawn evenly on a logarithmic scale.
    """

    low: float
    high: float
    log: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True)
class Search:
    """A search, as its file describes it.

    Args:
        study: the study that the tuned run belongs to.
        path: the search file.
        configs: ``fit`` configurations, layered.
        settings: the dotted settings of every run.
        final: the dotted settings of the final run alone.
        space: dotted setting -> the values that it may have.
        trials: the number of trials, those that fail or are pruned among them.
        metric: the metric that is optimised; None: the best validation of the runs' primary metric.
        direction: ``maximize`` or ``minimize``; None: as the primary metric of the runs is better.
        seeds: those that each trial runs with, one after another; the first is also that of the
            search and of the final run.
        prune: whether trials may be ended early, by the rounds of the first seed.
        label: the method of the study that is tuned; empty: the configuration of the file.
        parts: the searches of all methods of a study; empty where there is one alone.
        record: the file that the outcome of all parts is written to; None where there are none.
        beneath: the settings of the study and of the method that is tuned, over which ``settings``
            are layered.
    """

    study: str
    path: Path
    configs: tuple[Path, ...]
    settings: Mapping[str, Any]
    final: Mapping[str, Any]
    space: Mapping[str, Range | list[Any]]
    trials: int
    metric: str | None = None
    direction: Direction | None = None
    seeds: tuple[int, ...] = (0,)
    prune: bool = False
    label: str = ""
    parts: tuple[MethodSearch, ...] = ()
    record: Path | None = None
    beneath: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> Search:
        """Read a search file.

        Raises:
            InputError: it cannot be read, or something in it is wrong; the message names the file
                and the key.
        """
        file = SpecFile(Path(path))
        return _search(file, file.read(SearchEntries, "search file"))

    def metric_of(self, task: TaskMetrics) -> str:
        """Return the metric that is optimised where runs are of this task."""
        return self.metric or f"final/best_val_{task.primary}"

    def direction_of(self, task: TaskMetrics) -> Direction:
        """Return the direction in which it is optimised where runs are of this task."""
        return self.direction or ("maximize" if task.higher_is_better else "minimize")

    @property
    def name(self) -> str:
        """The name of the folder and of the experiment of the trials."""
        return f"{self.study}-tune"

    @property
    def seed(self) -> int:
        """The first of the seeds."""
        return self.seeds[0]

    def args(
        self, chosen: Mapping[str, Any], *, final: bool = False, seed: int | None = None
    ) -> list[str]:
        """Return the arguments of ``fit`` with these values of the space, at the first seed or
        another."""
        settings = [*self.beneath, self.settings, self.final if final else {}, chosen]
        return as_arguments(self.configs, settings, self.seed if seed is None else seed)

    def corners(self) -> list[dict[str, Any]]:
        """Return combinations in which each end of each range and each choice occurs.

        The other settings have their first value.
        """
        values = {
            key: [allowed.low, allowed.high] if isinstance(allowed, Range) else allowed
            for key, allowed in self.space.items()
        }
        first = {key: allowed[0] for key, allowed in values.items()}
        others = [first | {key: value} for key, allowed in values.items() for value in allowed[1:]]
        return [first, *others]

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the space as Optuna's distributions."""
        return {name: _distribution(allowed) for name, allowed in self.space.items()}

    @property
    def wanted(self) -> int:
        """The trials that are to be made: no more than there are combinations of values."""
        sizes = [len(set(map(repr, _values(allowed)))) or inf for allowed in self.space.values()]
        return int(min(self.trials, prod(sizes)))

    def untried(self, tried: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any] | None:
        """Return a combination of values that no trial has had, for trial ``number``; None where
        values are drawn from a range without an end."""
        draws = stream(self.seed, "tune/untried", number)
        values = [
            draws.permutation(np.array(_values(allowed), object)) for allowed in self.space.values()
        ]
        points = (dict(zip(self.space, point, strict=True)) for point in product(*values))
        return next((point for point in points if point not in tried), None)

    def sampler(self, number: int) -> TPESampler:
        """Return the sampler of trial ``number``."""
        return TPESampler(seed=int(stream(self.seed, "tune", number).integers(2**32)))


MOST_VALUES = 10_000
"""A range of more integers than these is searched like a range of real numbers: its combinations
are not counted, and one may be tried twice."""


def _values(allowed: Range | list[Any]) -> Sequence[Any]:
    """Return the values of a setting one by one; none of a range that is drawn from without an
    end."""
    if not isinstance(allowed, Range):
        return allowed
    if not allowed.is_whole or allowed.high - allowed.low >= MOST_VALUES:
        return ()
    return range(int(allowed.low), int(allowed.high) + 1)


def _distribution(allowed: Range | list[Any]) -> BaseDistribution:
    if not isinstance(allowed, Range):
        return CategoricalDistribution(allowed)
    if allowed.is_whole:
        return IntDistribution(int(allowed.low), int(allowed.high), log=allowed.log)
    return FloatDistribution(allowed.low, allowed.high, log=allowed.log)


@dataclass(frozen=True)
class MethodSearch(Search):
    """The search of one method of a study.

    Args:
        method_sha256: the hash of the method's entry in the study.
        runs_sha256: that of what its runs share there.
    """

    method_sha256: str = ""
    runs_sha256: str = ""


def _search(file: SpecFile, given: SearchEntries) -> Search:
    """Check what the entries mean together."""
    for key in ("trials", "space"):
        if not getattr(given, key):
            raise file.wrong(SearchEntries, key, getattr(given, key))
    metric, way = given.metric, given.direction
    if metric is not None:
        of_named = re.match("final/(best|last5)_val_(?!test_)", metric) and may_be_of_named(metric)
        of_rounds = metric.startswith(("val/", "train/", "comm/", "bits/"))
        of_rounds = of_rounds and not is_of_test_set(metric)
        allowed = metric in OF_VALIDATION or of_named or of_rounds
        near = nearest(metric, OF_VALIDATION) or METRIC
        rule = "it is none of validation or training, and the test set must not choose settings"
        instead = f"write metric: {near}, or one of val/*"
        file.require(allowed, f"metric: {metric}", rule, instead)
        rule = "its name does not tell whether more of it is better"
        better = direction(metric)
        instead = "write direction: maximize, or minimize"
        file.require(way or better, f"metric: {metric}, without a direction", rule, instead)
        way = way or ("maximize" if better == 1 else "minimize")
    tuned = [*given.space, *(key for own in given.space_of.values() for key in own)]
    for key in tuned:
        file.setting(key, "space")
    shared: dict[str, Any] = {
        "path": file.path,
        "space": _space(file, given.space, "space"),
        "trials": int(given.trials),
        "metric": metric,
        "direction": way,
        "seeds": _seeds(file, given.seed),
        "prune": given.prune,
    }
    configs = file.configs(given.config, "config")
    settings = file.settings(given.settings, "settings")
    final = file.settings(given.final, "final")
    for where, fixed in (("settings", settings), ("final", final)):
        twice = _also_in(fixed, tuned)
        rule = "it is in space as well, and what is tuned has the values of trials"
        file.require(not twice, f"{where}: {twice}", rule, "leave one of them out")
    if Path(given.study).suffix in (".yaml", ".yml"):
        return _search_of_study(file, given, shared, configs, settings)
    rule = "one configuration is tuned, of which there is no record"
    instead = "write study: my_study.yaml"
    file.require(given.record is None, f"record: {given.record}", rule, instead)
    rule, instead = "one configuration is tuned, with one space", "write its settings under space"
    file.require(not given.space_of, "space_of", rule, instead)
    return Search(
        study=file.name(given.study, "study"),
        configs=configs,
        settings=settings,
        final=final,
        **shared,
    )


def _seeds(file: SpecFile, given: int | list[int]) -> tuple[int, ...]:
    seeds = tuple(map(int, given)) if isinstance(given, list) else (int(given),)
    rule = "a trial runs once with each of its seeds, and with one at least"
    file.require(
        seeds and len({*seeds}) == len(seeds), f"seed: {given}", rule, "write seed: [0, 1, 2]"
    )
    return seeds


def _search_of_study(
    file: SpecFile,
    given: SearchEntries,
    shared: Mapping[str, Any],
    configs: tuple[Path, ...],
    settings: Mapping[str, Any],
) -> Search:
    """Return the search over every method of a study."""
    rule = "what is chosen goes to the record, and the study runs with it"
    file.require(not given.final, "final", rule, "leave it out")
    (path,) = file.configs(given.study, "study")
    study = Study.read(path, with_record=False)
    rule = f"the study {study.name} runs this seed: settings would be chosen on what they are judged by"
    free = max(study.seed_order) + 1000
    judged = next((seed for seed in shared["seeds"] if seed in study.seed_order), None)
    file.require(judged is None, f"seed: {judged}", rule, f"write seed: {free}")
    rule, instead = "it is in space as well, which every method has", "leave it out of one of them"
    for label, own_space in given.space_of.items():
        twice = _also_in(own_space, given.space)
        file.require(not twice, f"space_of.{label}.{twice}", rule, instead)
    foreign = min(set(given.space_of) - set(study.methods), default=None)
    rule = f"the study {study.name} has no such method"
    instead = f"write one of {', '.join(study.methods)}"
    file.require(foreign is None, f"space_of.{foreign}", rule, instead)
    record = file.path.parent / (given.record or f"tuned/{study.name}.yaml")
    name = file.name(record.stem, "record")  # several searches of one study have a folder each
    own = {label: _space(file, each, f"space_of.{label}") for label, each in given.space_of.items()}
    parts = tuple(
        MethodSearch(
            study=name,
            configs=(*study.configs, *method.configs, *study.overlays, *configs),
            settings=settings,
            final={},
            beneath=(study.settings, method.settings),
            label=label,
            method_sha256=method_hash(method.configs, method.settings),
            runs_sha256=study.runs_hash(label),
            **{**shared, "space": {**shared["space"], **own.get(label, {})}},
        )
        for label, method in study.methods.items()
    )
    fewest = min(parts, key=lambda part: part.wanted)
    few = f"trials: {given.trials}; {fewest.label} has {fewest.wanted} combinations of values"
    rule = "every method has as many trials"
    instead = f"write trials: {fewest.wanted}, or more values"
    file.require(len({part.wanted for part in parts}) == 1, few, rule, instead)
    return Search(
        study=name,
        configs=configs,
        settings=settings,
        final={},
        parts=parts,
        record=record,
        **shared,
    )


def _also_in(keys: Iterable[str], others: Iterable[str]) -> str:
    """Return a key of a setting that is among others, however both are spelt; empty without one."""
    names = {*map(short_name, others)}
    return min((key for key in keys if short_name(key) in names), default="")


def _space(file: SpecFile, given: Mapping[str, Any], where: str) -> dict[str, Range | list[Any]]:
    first: dict[str, str] = {}
    for key in given:
        same = first.setdefault(short_name(key), key)
        rule = f"it is {same}, spelt another way"
        file.require(same == key, f"{where}: {key}", rule, "leave one of them out")
    return {key: _allowed(file, value, f"{where}.{key}") for key, value in given.items()}


def _allowed(file: SpecFile, given: Any, where: str) -> Range | list[Any]:
    """Return the values that a setting may have."""
    if isinstance(given, list):
        plain = given and all(
            isinstance(item, (bool, int, float, str, type(None))) for item in given
        )
        rule = "choices are numbers, strings, true, false or null"
        file.require(plain, f"{where}: {given!r}", rule, f"write {where}: [0.1, 0.2]")
        twice = next((item for item in given if [*map(repr, given)].count(repr(item)) > 1), None)
        rule = "a choice that stands twice would be tried twice"
        file.require(twice is None, f"{where}: {twice!r}, twice", rule, "leave one of them out")
        equal = [item for item in given if given.count(item) > 1]
        shown = f"{where}: {' and '.join(map(repr, equal))}"
        rule = "choices that are equal, such as 1 and true, are one to Optuna"
        file.require(not equal, shown, rule, "leave one of them out")
        return given
    example = f"write {where}: {{low: 0.1, high: 1.0}}, or a list of choices"
    ends = file.parse(RangeEntries, given, f"{where}.", example)
    shown = f"{where}: {ends.low} to {ends.high}"
    file.require(ends.low > -inf and ends.high < inf, shown, "the ends are finite numbers", example)
    file.require(ends.low < ends.high, shown, "low is less than high", example)
    file.require(not ends.log or ends.low > 0, shown, "a logarithmic range is above 0", "raise low")
    return Range(**vars(ends))
