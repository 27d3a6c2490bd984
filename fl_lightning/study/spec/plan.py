"""A study file: methods x seeds x grid, and what shall be asked of the results.

    study: exp2_embedded              # folder under default_root_dir, and experiment in MLflow
    config: kd_default.yaml           # one `fit` configuration or a list, layered; relative to the study file
    methods:                          # label -> what differs
      FedMPQKD: {}
      FedMPQ: {config: fedmpq.yaml}
      FedMPQKD a=1: {settings: {model.alpha: 1.0}}
    overlays: big_network.yaml        # optional: layered on top of every method's configuration
    grid:                             # optional: axis -> level -> the same form; every combination is run
      noise: {on: {}, off: {config: overlays/noise_off.yaml}}
    settings: {trainer.max_rounds: 100}   # optional: dotted `fit` settings of every cell
    seeds: [0, 1, 2]

The rest is for the report: ``metric proposed degradation target_accuracy criteria claimed``; ``test`` is for
the sweep. Of two settings of one name the later wins: config, method, overlays, grid; then `settings` of
study, method, grid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import InputError
from fl_lightning.probing import PROBES
from fl_lightning.study.metric_names import CLOCKS, KNOWN, higher_is_better
from fl_lightning.study.spec.criteria import check_needs, parse
from fl_lightning.study.spec.yaml_checks import Checks, read_mapping
from fl_lightning.support.redaction import redact_settings

KEYS = (
    "study",
    "config",
    "settings",
    "seeds",
    "methods",
    "overlays",
    "grid",
    "test",
    "metric",
    "proposed",
    "degradation",
    "target_accuracy",
    "criteria",
    "claimed",
)
RESERVED = ("study", "label", "method", "seed", "dataset", "commit", "dirty", "run_dir", "partition_sha256")
"""Tags that a run has anyway: no name for an axis."""
METRICS = [
    *(column.metric for column in (*KNOWN, *CLOCKS)),
    "final/best_val_accuracy",
    "final/best_val_round",
    "total/wasted_bytes",
]

MAX_CELLS = 10_000  # runs of one study


@dataclass(frozen=True)
class Variation:
    """What a method or a level of an axis changes.

    Args:
        configs: ``fit`` configurations, layered.
        settings: dotted ``fit`` settings.
    """

    configs: tuple[Path, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As it is written in a study file, with absolute paths."""
        document = {"config": [str(path.resolve()) for path in self.configs], "settings": dict(self.settings)}
        return {key: value for key, value in document.items() if value}


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Args:
        method: label of its method.
        seed: its seed.
        levels: axis -> level.
        args: arguments of ``fit``, without those that the sweep adds.
    """

    method: str
    seed: int
    levels: Mapping[str, str]
    args: list[str]

    @property
    def name(self) -> str:
        """Name of the run and of its folder.

        >>> Cell("FedMPQ", 0, {"noise": "on"}, []).name
        'FedMPQ-noise=on-seed0'
        """
        return "-".join(
            [self.method, *(f"{axis}={level}" for axis, level in self.levels.items()), f"seed{self.seed}"]
        )


@dataclass(frozen=True)
class Study:
    """What a study file says; :meth:`read` it.

    Args:
        name: of the study, of its folder of runs and of its MLflow experiment.
        path: the study file.
        seeds: seeds of every method, each once.
        methods: label -> what it changes.
        common: what all cells share before the method.
        overlays: configurations on top of every method's.
        grid: axis -> level -> what it changes.
        test: flags of the ``test`` that is run on every finished cell; None: none is.
        metric: primary metric of the report.
        proposed: labels that are not baselines.
        degradation: ``axis``, ``stressed`` and ``clean``: levels whose difference is reported, paired by
            seed.
        target_accuracy: in (0, 1]; rounds and megabytes to it are reported.
        criteria: what is claimed of the results, as text.
        claimed: figures that were claimed elsewhere; nothing but the report reads them.
    """

    name: str
    path: Path
    seeds: list[int]
    methods: Mapping[str, Variation]
    common: Variation = Variation()
    overlays: tuple[Path, ...] = ()
    grid: Mapping[str, Mapping[str, Variation]] = field(default_factory=dict)
    test: Mapping[str, Any] | None = None
    metric: str = "final/accuracy"
    proposed: list[str] = field(default_factory=list)
    degradation: Mapping[str, str] | None = None
    target_accuracy: float | None = None
    criteria: list[str] = field(default_factory=list)
    claimed: Any = None

    @classmethod
    def read(cls, path: str | Path, find_configs: bool = True) -> Study:
        """The study in a YAML file.

        Args:
            path: the file.
            find_configs: whether the configurations that it names must be there; a report of finished runs
                needs none.

        Raises:
            InputError: it cannot be read, or something in it is wrong; the message names the file and the
                key.
        """
        path = Path(path)
        return _study(Checks(path, find_configs), read_mapping(path, "study file", "study: my_study"))

    def cells(self) -> list[Cell]:
        """Every run, seed by seed, so that a sweep that is stopped early has whole comparisons."""
        axes = list(self.grid)
        count = len(self.seeds) * len(self.methods) * math.prod(map(len, self.grid.values()))
        if count > MAX_CELLS:
            raise InputError(
                f"{self.path}: {count} cells of {len(self.methods)} methods, {len(self.seeds)} seeds "
                f"and a grid of {len(axes)} axes",
                f"a study has at most {MAX_CELLS}",
                "leave axes or levels out",
            )
        return [
            self._cell(label, seed, dict(zip(axes, levels, strict=True)))
            for seed in self.seeds
            for levels in product(*self.grid.values())
            for label in self.methods
        ]

    def _cell(self, label: str, seed: int, levels: dict[str, str]) -> Cell:
        method = self.methods[label]
        chosen = [self.grid[axis][level] for axis, level in levels.items()]
        configs = [
            *self.common.configs,
            *method.configs,
            *self.overlays,
            *(path for level in chosen for path in level.configs),
        ]
        settings = {**self.common.settings, **method.settings}
        for level in chosen:
            settings |= level.settings
        return Cell(label, seed, levels, as_arguments(configs, settings, seed))

    def to_yaml(self) -> str:
        """The study file again, with absolute paths, so that a copy of it can be read anywhere on this
        machine."""
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
            "metric": self.metric,
            "proposed": self.proposed,
            "degradation": self.degradation,
            "target_accuracy": self.target_accuracy,
            "criteria": self.criteria,
            "claimed": self.claimed,
        }
        given = {key: value for key, value in document.items() if value not in (None, [], {})}
        return yaml.safe_dump(redact_settings(given), sort_keys=False, allow_unicode=True, width=130)


def as_arguments(configs: Sequence[Path], settings: Mapping[str, Any], seed: int) -> list[str]:
    """Arguments of ``fit``."""
    layered = [part for path in configs for part in ("--config", str(path))]
    return [
        *layered,
        *(f"--{key}={as_flag(value)}" for key, value in settings.items()),
        f"--seed_everything={seed}",
    ]


def as_flag(value: Any) -> str:
    """A setting as it is written after ``--name=``.

    >>> as_flag(True), as_flag(None), as_flag(float("inf")), as_flag([1, 2]), as_flag("1e-4")
    ('true', 'null', '.inf', '[1, 2]', '1e-4')
    """
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    return value if isinstance(value, str) else json.dumps(value)


def _study(check: Checks, document: Mapping[str, Any]) -> Study:
    check.keys(document, KEYS, needed=("study", "seeds", "methods"))
    methods = _variations(check, document["methods"], "methods")
    grid = {}
    for axis, levels in check.mapping(document.get("grid"), "grid", empty=True).items():
        check.plain(axis, "grid")
        taken = axis in RESERVED or axis.startswith("mlflow.")
        check.require(not taken, f"grid.{axis}", "every run has a tag of that name", f"write {axis}_axis")
        grid[axis] = _variations(check, levels, f"grid.{axis}")
    target = document.get("target_accuracy")
    study = Study(
        name=check.plain(document["study"], "study"),
        path=check.path,
        seeds=check.seeds(document["seeds"]),
        methods=methods,
        common=_variation(
            check, {key: document[key] for key in ("config", "settings") if key in document}, ""
        ),
        overlays=check.configs(document.get("overlays"), "overlays"),
        grid=grid,
        test=_test(check, document.get("test", False)),
        metric=_metric(check, document.get("metric", "final/accuracy")),
        proposed=[
            check.one_of(label, methods, "proposed")
            for label in check.texts(document.get("proposed", []), "proposed", "FedMPQKD")
        ],
        degradation=_degradation(check, document.get("degradation"), grid),
        target_accuracy=None if target is None else check.share(target, "target_accuracy"),
        criteria=check.texts(document.get("criteria", []), "criteria", "accuracy(A) - accuracy(B) >= 0.01"),
        claimed=document.get("claimed"),
    )
    seen: dict[str, str] = {}
    for name in (cell.name for cell in study.cells()):
        check.short(name, "cell")
        first = seen.setdefault(name.lower(), name)  # some file systems do not tell A from a
        check.require(
            first is name,
            f"cells {first} and {name}",
            "their names must differ, in more than case",
            "rename a method or a level",
        )
    for text in study.criteria:
        check_needs(
            parse(text, list(methods)), study.degradation, study.target_accuracy
        )  # hours before the report finds it
    higher_is_better(study.metric)
    return study


def _test(check: Checks, value: Any) -> dict[str, Any] | None:
    """``true``, a list of probes, or a mapping of flags."""
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, list):
        return {"probes": _probes(check, value, "test")}
    near = [value] if isinstance(value, str) and value in PROBES else ["clean", "corruptions"]
    flags = check.mapping(value, "test", instead=f"write test: true, or test: [{', '.join(near)}]")
    check.keys(flags, ("probes", "checkpoint"), "test.")
    if "probes" in flags:
        flags["probes"] = _probes(check, flags["probes"], "test.probes")
    which = flags.get("checkpoint", "last")
    good = isinstance(which, str) and (which in ("last", "best") or re.fullmatch(r"round_\d{6}", which))
    check.require(
        good,
        f"test.checkpoint: {which!r}",
        "it is last, best or a name like round_000060",
        "write test: {checkpoint: best}",
    )
    return flags


def _probes(check: Checks, value: Any, where: str) -> str:
    names = check.texts(value.split(",") if isinstance(value, str) else value, where, "clean, corruptions")
    check.require(
        names, f"{where}: []", "it names a probe or more", f"leave it out for all, or write {where}: [clean]"
    )
    return ",".join(check.one_of(name.strip(), PROBES, where) for name in names)


def _metric(check: Checks, value: Any) -> str:
    """Groups that only this program writes are known whole; methods and callbacks may add to the others."""
    metric = check.text(value, "metric", "final/accuracy")
    known = metric in METRICS or ("/" in metric and not metric.startswith(("final/", "total/", "target/")))
    near = get_close_matches(metric, METRICS, n=1) or ["final/accuracy"]
    check.require(known, f"metric: {metric}", "no run has such a metric", f"write metric: {near[0]}")
    return metric


def _variations(check: Checks, value: Any, where: str) -> dict[str, Variation]:
    return {
        check.plain(name, where): _variation(check, entry, f"{where}.{name}.")
        for name, entry in check.mapping(value, where).items()
    }


def _variation(check: Checks, value: Any, where: str) -> Variation:
    entry = check.mapping(value, where.rstrip("."), empty=True)
    check.keys(entry, ("config", "settings"), where)
    return Variation(
        check.configs(entry.get("config"), f"{where}config"),
        check.settings(entry.get("settings"), f"{where}settings"),
    )


def _degradation(
    check: Checks, value: Any, grid: Mapping[str, Mapping[str, Variation]]
) -> dict[str, str] | None:
    if value is None:
        return None
    parts = ("axis", "stressed", "clean")
    entry = check.mapping(value, "degradation")
    check.keys(entry, parts, "degradation.", needed=parts)
    axis = check.one_of(entry["axis"], grid, "degradation.axis")
    levels = {part: check.one_of(entry[part], grid[axis], f"degradation.{part}") for part in parts[1:]}
    other = next((level for level in grid[axis] if level != levels["clean"]), "another level")
    check.require(
        levels["stressed"] != levels["clean"],
        f"degradation: stressed and clean are both {levels['clean']}",
        "it is the difference of two levels",
        f"write stressed: {other}",
    )
    return {"axis": axis} | levels
