"""Pre-registration: what a study asks, written down with a hash and a date before its first cell is
run.

``registration.json`` in the folder of the study holds the first plan for ever, and every later one
as an amendment with its date. It is no proof against somebody who writes a new file, but every run
carries the hash of the plan that it was made under, so that a new file does not fit the runs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fl_lightning.config.documents import document_hash
from fl_lightning.config.settings import has_hash, result_settings, settings_hash
from fl_lightning.errors import as_bad_input
from fl_lightning.run.directory import to_json
from fl_lightning.run.metadata import now
from fl_lightning.study.metric_names import CLASSIFICATION
from fl_lightning.study.plan.differences import different, different_names
from fl_lightning.study.plan.schema import default_of, entries
from fl_lightning.study.plan.stopping import StoppingRule
from fl_lightning.study.plan.study import Study
from fl_lightning.study.plan.variations import Variation
from fl_lightning.support.disk import replace

FILE = "registration.json"
TAG = "registration"
"""The tag of a run with the beginning of the hash of the plan that it was made under."""
TAG_LENGTH = 16
SEED = "seed_everything"
OUT_OF_GRID = ""
"""The key of the hash of a method that is not in the grid, and of every method where there is no
grid."""
FIXED = {"rule": "fixed"}
"""What is registered of the stopping rule of a study whose seeds are fixed."""


@dataclass(frozen=True)
class Entry:
    """One plan of a study, and when it was written down.

    Args:
        date: UTC, ISO 8601.
        sha256: the hash of ``plan``.
        runs: the runs that the folder held at that time, finished or not.
        plan: see :func:`plan_of`.
    """

    date: str
    sha256: str
    runs: int
    plan: Mapping[str, Any]

    @property
    def is_intact(self) -> bool:
        return document_hash(self.plan) == self.sha256

    @property
    def stopping(self) -> StoppingRule | None:
        """The rule by which seeds are added; None: the seeds are fixed."""
        return StoppingRule.from_registered(self.plan["stopping"])


@dataclass(frozen=True)
class Registration:
    """The content of ``registration.json``.

    Args:
        entries: the plan that was registered, and its amendments, in the order of their dates.
    """

    entries: tuple[Entry, ...]

    @property
    def first(self) -> Entry:
        """The plan that the study is held to."""
        return self.entries[0]

    @property
    def tag(self) -> str:
        """The mark of runs that are made now."""
        return self.entries[-1].sha256[:TAG_LENGTH]

    @property
    def tags(self) -> set[str]:
        """The marks that runs of this study can carry."""
        return {entry.sha256[:TAG_LENGTH] for entry in self.entries}

    @classmethod
    def read(cls, folder: Path) -> Registration | None:
        """Read the registration in the folder of a study; None where there is none.

        Raises:
            InputError: there is one that cannot be read.
        """
        path = folder / FILE
        if not path.exists():
            return None
        rule = "it is the registration of the study and cannot be read"
        instead = "put it back; without it the study counts as not registered"
        errors = OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError
        with as_bad_input(f"{path}", rule, instead, *errors):
            entries = json.loads(path.read_bytes())["entries"]
            found = cls(tuple(Entry(**entry) for entry in entries))
            for entry in (found.first, *found.entries[1:]):
                _require_complete(entry)
            return found

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        replace(
            folder / FILE, to_json({"entries": [asdict(entry) for entry in self.entries]}).encode()
        )


def _require_complete(entry: Entry) -> None:
    """Raise KeyError, TypeError or AttributeError where something is missing that a report
    reads."""
    first = [key for key, _, known in entries(Study) if known.register and not known.later]
    missing = [key for key in (*first, "stopping", "methods") if key not in entry.plan]
    missing += [
        label for label, method in entry.plan.get("methods", {}).items() if "sha256" not in method
    ]
    if missing or not (isinstance(entry.date, str) and isinstance(entry.sha256, str)):
        raise KeyError(", ".join(missing) or "date")
    StoppingRule.from_registered(entry.plan["stopping"])


def register(folder: Path, plan: Mapping[str, Any], runs: int) -> Registration:
    """Write the plan down, unless it is the one that was written down last. What is there stays.

    Args:
        folder: the folder of the study.
        plan: what the study asks now, from :func:`plan_of`.
        runs: the runs that the folder holds already.

    Raises:
        InputError: there is a registration that cannot be read.
    """
    before = Registration.read(folder)
    if before is not None and before.entries[-1].sha256 == document_hash(plan):
        return before
    entry = Entry(now(), document_hash(plan), runs, plan)
    registration = Registration((*(before.entries if before else ()), entry))
    registration.write(folder)
    return registration


def plan_of(
    study: Study,
    cells: Iterable[tuple[str, Mapping[str, str], Mapping[str, Any]]],
    last: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what is registered of a study, fit for JSON.

    Args:
        study: the study.
        cells: of every cell the label, the levels, and the resolved configuration with dotted keys.
        last: the plan that was registered last, whose methods stay as they were written down, maybe
            by an earlier version, where none has other settings.
    """
    resolved = {
        (label, level_key(levels)): {key: value for key, value in config.items() if key != SEED}
        for label, levels, config in cells
    }
    methods = {
        label: {"changes": _changes(label, resolved), "sha256": _hashes(label, resolved)}
        for label in study.methods
    }
    if last is not None and _are_of(last["methods"], study, resolved):
        methods = last["methods"]
    return {**question_of(study), "stopping": _stopping(study), "methods": methods}


def _are_of(
    methods: Mapping[str, Any], study: Study, resolved: Mapping[tuple[str, str], Mapping[str, Any]]
) -> bool:
    """Return whether registered methods are those of a study, with their settings."""
    hashes = {
        (label, level): hash
        for label, method in methods.items()
        for level, hash in method["sha256"].items()
    }
    return (
        [*methods] == [*study.methods]
        and hashes.keys() == resolved.keys()
        and all(has_hash(settings, hashes[key]) for key, settings in resolved.items())
    )


def _stopping(study: Study) -> dict[str, Any]:
    return FIXED if study.until is None else study.until.registered()


def _hashes(label: str, resolved: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, str]:
    """Return the hash of a method's settings at each level."""
    return {
        level: settings_hash(config) for (own, level), config in resolved.items() if own == label
    }


def registered_hash(plan: Mapping[str, Any], label: str, levels: Mapping[str, str]) -> str | None:
    """Return the registered hash of a method's settings at some levels, without the seed.

    Args:
        plan: the registered plan.
        label: the method.
        levels: axis -> level.

    Returns:
        the hash; None where the method or the level was not registered.
    """
    hashes = plan["methods"].get(label, {}).get("sha256", {})
    return hashes.get(level_key(levels), hashes.get(OUT_OF_GRID))


def question_of(study: Study) -> dict[str, Any]:
    """Return the part of the plan that a study file alone tells, without its methods."""
    found = {}
    for key, one, known in entries(study):
        value = getattr(study, one.name)
        if known.register and not (known.later and value == default_of(one)):
            found[key] = None if value is None else known.register(value)
    return found


def level_key(levels: Mapping[str, str]) -> str:
    """Return levels as one text: ``noise=on,bits=4``; empty without a grid."""
    return ",".join(f"{axis}={level}" for axis, level in levels.items())


def has_registered_hash(settings: Mapping[str, Any], hash: object) -> bool:
    """Return whether a registered hash is that of the settings of a run, without its seed."""
    return has_hash({key: value for key, value in settings.items() if key != SEED}, hash)


def _changes(label: str, resolved: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of a method in which it differs from some other method, at the first
    level."""
    first: dict[str, Mapping[str, Any]] = {}
    for (own, _), config in resolved.items():
        first.setdefault(own, config)
    settings = {own: result_settings(config) for own, config in first.items()}
    mine, absent = settings.get(label, {}), "not set"
    return {
        key: mine.get(key, absent)
        for key in sorted({key for other in settings.values() for key in other})
        if any(
            repr(other.get(key, absent)) != repr(mine.get(key, absent))
            for other in settings.values()
        )
    }


def registered_study(study: Study, plan: Mapping[str, Any]) -> Study:
    """Return the study as it was registered, for a report: its methods and levels are names
    alone."""
    values = {
        one.name: known.restore(plan[key]) if key in plan else default_of(one)
        for key, one, known in entries(study)
        if known.register and known.restore
    }
    methods = {
        label: Variation(in_grid=not plan["grid"] or OUT_OF_GRID not in method["sha256"])
        for label, method in plan["methods"].items()
    }
    until = StoppingRule.from_registered(plan["stopping"])
    registered = dataclasses.replace(
        study, **values | {"name": study.name}, methods=methods, until=until, task=CLASSIFICATION
    )
    return registered.with_task(study.task)


def differences(plan: Mapping[str, Any], study: Study) -> list[str]:
    """Return in which points a study file differs from a registered plan, one clause each.

    The plan was made before there were runs, so that its metric is read for the task that they
    have.
    """
    plan = {**plan, "metric": registered_study(study, plan).metric}
    asked = {**question_of(study), "stopping": _stopping(study), "methods": dict(study.methods)}
    return _differences(plan, asked, type(study))


def plan_differences(plan: Mapping[str, Any], later: Mapping[str, Any]) -> list[str]:
    """Return in which points a later plan differs from a registered one, one clause each."""
    found = _differences(plan, later)
    both = [label for label in plan["methods"] if label in later["methods"]]
    changed = [
        label
        for label in both
        if plan["methods"][label]["sha256"] != later["methods"][label]["sha256"]
    ]
    return [*found, *(f"methods: the settings of {label} are others" for label in changed)]


def _differences(
    plan: Mapping[str, Any], later: Mapping[str, Any], schema: type[Study] = Study
) -> list[str]:
    found = []
    for key, _, known in entries(schema):
        if known.register and known.compared:
            found += different(key, plan.get(key), later.get(key))
    found += different_names("methods", list(plan["methods"]), list(later["methods"]))
    found += _different_stopping(plan["stopping"], later["stopping"])
    return found + _different_seeds(plan, later)


def _different_stopping(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [f"stopping {key}: registered {before.get(key)}, now {after.get(key)}" for key in keys]


def _different_seeds(plan: Mapping[str, Any], later: Mapping[str, Any]) -> list[str]:
    """Compare the seeds; where seeds are added, those of a report are the ones that count, in
    order."""
    rule, seeds = StoppingRule.from_registered(plan["stopping"]), list(later["seeds"])
    if rule is None or later["stopping"] == FIXED:
        return different_names("seeds", plan["seeds"], seeds)
    order = dataclasses.replace(rule, max_seeds=len(seeds)).seeds(plan["seeds"])
    if seeds == order[: len(seeds)]:
        return []
    registered, now = (", ".join(map(str, some)) for some in (order[: len(seeds)], seeds))
    return [f"seeds: registered in the order {registered}, now {now}"]
