"""The record of a search over all methods of a study: which settings were chosen for each, and how.

``tune`` writes it beside the study, and a study reads it by ``tuned: tuned/my_study.yaml``. The
settings of a label are layered over those of its method. A record is refused where a method of the
study is not in it, or where the search or a method was changed after it was made: nobody then knows
where its numbers come from.

    tuned: {epochs: {"1": tuned/my_study_e1.yaml, "5": tuned/my_study_e5.yaml}}

reads a record for each level of an axis of the study's grid: each of a search file of its own,
whose ``record`` it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.config.documents import document_hash
from fl_lightning.config.packaged import layers
from fl_lightning.errors import InputError, require
from fl_lightning.study.plan.spec_file import SpecFile
from fl_lightning.support.redaction import redact_settings

HEAD = """\
# What `tune` chose for each method of a study, by {metric}; the test set chose nothing. Made by
#   python -m fl_lightning tune --config {search}
# A study reads it by `tuned:` and refuses it when the search, or the method's entry in the study, has
# changed since. Not to be edited.
"""


@dataclass(frozen=True)
class TunedMethod:
    """What was chosen for one method.

    Args:
        settings: dotted setting -> the chosen value.
        value: the metric of the search, on validation, of the best trial; of several seeds the
            mean.
        trial: the number of the best trial.
        finished, pruned, failed: the trials of this method, by how they ended.
        method_sha256: the hash of the method's entry in the study, see :func:`method_hash`.
        runs_sha256: the hash of what all its runs in the study share, see :func:`runs_hash`; empty
            in a record of before.
        values: the metric at each of several seeds; empty where there is one.
    """

    settings: Mapping[str, Any]
    value: float
    trial: int
    finished: int
    pruned: int
    failed: int
    method_sha256: str
    runs_sha256: str = ""
    values: Sequence[float] = ()


@dataclass(frozen=True)
class TunedRecord:
    """The record of a search over all methods of a study.

    Args:
        study: the name of the study.
        search: the search file, relative to the record.
        search_sha256: the hash of what the search file says, see :func:`search_hash`.
        date: the day on which the last trial ended.
        version: the version of this program.
        metric, direction, trials, seed: as in the search file; ``trials`` is the number for each
            method.
        space: the values that each setting may have, the same for every method.
        settings: the settings of every trial, beside those of the study.
        chosen: label -> what was chosen.
        sha256: the hash of all this; empty in a record of before.
        seeds: those that each trial ran with, ``seed`` the first of them; empty where it is alone.
        path: the file that it was read from; None: it stands in the study file.
    """

    study: str
    search: str
    search_sha256: str
    date: str
    version: str
    metric: str
    direction: str
    trials: int
    seed: int
    space: Mapping[str, Any]
    settings: Mapping[str, Any]
    chosen: Mapping[str, TunedMethod]
    sha256: str = ""
    seeds: Sequence[int] = ()
    path: Path | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, document: Any, where: str, path: Path | None = None) -> TunedRecord:
        """Return the record that a YAML document describes.

        Raises:
            InputError: it is none.
        """
        known = {one.name for one in fields(cls)} - {"path"}
        of_method = {one.name for one in fields(TunedMethod)}
        rule, instead = "it is no record of tune", "write the path of a file that tune has written"
        right = isinstance(document, Mapping) and {*document, "sha256", "seeds"} == known
        require(right and isinstance(document["chosen"], Mapping), where, rule, instead)
        for label, method in document["chosen"].items():
            right = isinstance(method, Mapping) and {*method, "runs_sha256", "values"} == of_method
            require(
                right and isinstance(method["settings"], Mapping),
                f"{where}: {label}",
                rule,
                instead,
            )
        require(
            document.get("sha256", "") in ("", _own_hash(document)),
            where,
            "it was changed after tune had written it, and nobody knows where its values come from",
            "run tune again, or write your values as settings of the methods and leave 'tuned' out",
        )
        chosen = {label: TunedMethod(**method) for label, method in document["chosen"].items()}
        return cls(**{**document, "chosen": chosen}, path=path)

    @classmethod
    def read(cls, path: Path) -> TunedRecord:
        """Read a record.

        Raises:
            InputError: it cannot be read, or is none.
        """
        return cls.parse(SpecFile(path).load("record of tune"), str(path), path)

    @property
    def parts(self) -> list[tuple[str, TunedRecord]]:
        """Each record with the level that it is of; empty: of all."""
        return [("", self)]

    def document(self) -> dict[str, Any]:
        """Return the record as it is written."""
        written = {key: value for key, value in asdict(self).items() if key != "path"}
        for part, keys in (
            (written, ("sha256", "seeds")),
            *((method, ("runs_sha256", "values")) for method in written["chosen"].values()),
        ):
            for key in keys:
                if not part[key]:
                    del part[key]
        return written

    def sealed(self) -> TunedRecord:
        """Return the record with its own hash."""
        return replace(self, sha256=_own_hash(redact_settings(self.document())))

    def to_yaml(self) -> str:
        text = yaml.safe_dump(
            redact_settings(self.document()), sort_keys=False, allow_unicode=True, width=110
        )
        return HEAD.format(search=self.search, metric=self.metric) + text

    def check_seeds(self, where: str, seeds: Sequence[int]) -> str:
        """Check that the search had none of these seeds, and return how a message names the
        record.

        Raises:
            InputError: it had one.
        """
        given = f"{where}tuned{f': {self.path}' if self.path else ''}"
        judged = next((seed for seed in (self.seed, *self.seeds) if seed in seeds), None)
        require(
            judged is None,
            f"{given}, whose trials have seed {judged} of the study",
            "its settings would be chosen on what they are judged by",
            f"leave seed {judged} out, or tune with another one",
        )
        return given

    def check(
        self,
        where: str,
        methods: Mapping[str, str],
        seeds: Sequence[int],
        runs: Mapping[str, str] | None = None,
    ) -> None:
        """Check that the record is about these methods as they are now, and of the search as it is
        now.

        Args:
            where: the beginning of a message.
            methods: label -> the hash of its entry.
            seeds: all that the study may run.
            runs: label -> the hash of what its runs share; None: their files may be elsewhere.

        Raises:
            InputError: a method is missing, one or the search was changed, or the search had a seed
                of the study.
        """
        again = "run tune again, or leave 'tuned' out"
        given = self.check_seeds(where, seeds)
        missing = [label for label in methods if label not in self.chosen]
        require(
            not missing, f"{given}; {', '.join(missing)}", "the record has no such method", again
        )
        changed = [
            label for label, hash in methods.items() if hash != self.chosen[label].method_sha256
        ]
        rule = "the method was changed in the study after it was tuned"
        require(not changed, f"{given}; {', '.join(changed)}", rule, again)
        known = {label: self.chosen[label].runs_sha256 for label in runs or {}}
        changed = [label for label, hash in (runs or {}).items() if known[label] not in ("", hash)]
        rule = "the study's settings or a configuration file were changed after it was tuned"
        require(not changed, f"{given}; {', '.join(changed)}", rule, again)
        search = self.path.parent / self.search if self.path else None
        if search is not None and search.is_file():
            require(
                is_of_search(self, SpecFile(search, find_configs=runs is not None)),
                f"{given}; {self.search}",
                "the search, or a configuration that it layers, was changed since",
                again,
            )


@dataclass(frozen=True)
class TunedByLevel:
    """A record for each level of one axis of a study's grid.

    Args:
        axis: the axis.
        records: level -> the record of a search at it.
    """

    axis: str
    records: Mapping[str, TunedRecord]

    @property
    def parts(self) -> list[tuple[str, TunedRecord]]:
        """Each record with the level that it is of."""
        return [(f"{self.axis}={level}", record) for level, record in self.records.items()]

    def document(self) -> dict[str, Any]:
        """Return the records as they are written in a study file."""
        return {self.axis: {level: record.document() for level, record in self.records.items()}}


Tuned = TunedRecord | TunedByLevel


def tuned_settings(tuned: Tuned | None, label: str, levels: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the settings that ``tune`` chose for a method at some levels."""
    record = tuned.records[levels[tuned.axis]] if isinstance(tuned, TunedByLevel) else tuned
    return {} if record is None else record.chosen[label].settings


def check_levels(file: SpecFile, tuned: TunedByLevel, study: Any) -> None:
    """Check that there is a record for each level of the axis, and that every method has a level.

    Args:
        file: the study file.
        tuned: its records.
        study: the study; its ``grid`` and ``methods`` are read.

    Raises:
        InputError: one is missing, or too many.
    """
    levels = study.grid[file.one_of(tuned.axis, study.grid, "tuned")]
    missing = ", ".join([*({*levels} ^ {*tuned.records})])
    rule = f"each level of {tuned.axis} has a record, and no other: {', '.join(levels)}"
    file.require(not missing, f"tuned.{tuned.axis}: {missing}", rule, "name a record for each")
    for level, record in tuned.records.items():
        of_level = study.grid[tuned.axis][level].settings
        other = [
            key for key in of_level if record.settings.get(key, of_level[key]) != of_level[key]
        ]
        given = f"tuned.{tuned.axis}.{level}: its trials have {', '.join(other)} of another level"
        file.require(not other, given, f"a record is of its level of {tuned.axis}", "exchange them")
    outside = next((label for label, one in study.methods.items() if not one.in_grid), "")
    rule = "its runs have no level of the grid, and settings are tuned for each"
    file.require(
        not outside, f"methods.{outside}: grid: false", rule, "tune one record for all levels"
    )


def method_hash(configs: Sequence[Path], settings: Mapping[str, Any]) -> str:
    """Return the hash of a method's entry in a study: the names of its configurations, and its
    settings."""
    return document_hash({"config": [path.name for path in configs], "settings": dict(settings)})


def runs_hash(configs: Sequence[Path], settings: Mapping[str, Any]) -> str:
    """Return the hash of what configuration files and those that they are based on say, and of the
    settings that all methods of a study share; comments and the order of keys do not count."""
    files = [SpecFile(part).load("configuration") for path in configs for part in layers(path)]
    return document_hash({"files": files, "settings": dict(settings)})


def file_hash(file: SpecFile) -> str:
    """Return the hash of what a search file says; comments and the order of keys do not count."""
    return document_hash(file.load("search file"))


def search_hash(file: SpecFile) -> str:
    """Return the hash of what a search file says, and of what the configurations say that it layers
    over its study: where it has none, that of the file.

    Raises:
        InputError: a configuration is not there, or cannot be read.
    """
    said = file.load("search file")
    given = said.get("config") if isinstance(said, Mapping) else None
    configs = file.configs(given, "config") if isinstance(given, (str, list)) else ()
    return runs_hash(configs, said) if configs else document_hash(said)


def is_of_search(record: TunedRecord, file: SpecFile) -> bool:
    """Return whether a record was made by a search as its file says it now; where its
    configurations are not there to be read, this is not known, and true."""
    if record.search_sha256 == file_hash(file):  # without configurations, or a record of before
        return True
    try:
        return record.search_sha256 == search_hash(file)
    except InputError:
        return not file.find_configs


def _own_hash(document: Mapping[str, Any]) -> str:
    return document_hash({key: value for key, value in document.items() if key != "sha256"})


def tuned_record(file: SpecFile, given: str | Mapping[str, Any], key: str) -> Tuned | None:
    """Return the record that the entry ``tuned`` of a study file names, or is, or that of each
    level.

    Args:
        file: the study file.
        given: the path of a record, relative to the study file, or a record; or axis -> level ->
            one of these.
        key: of the entry.

    Returns:
        None where a record is not there and need not be.

    Raises:
        InputError: it is none.
    """
    if (
        isinstance(given, Mapping)
        and len(given) == 1
        and isinstance(next(iter(given.values())), Mapping)
    ):
        ((axis, levels),) = given.items()
        found = {
            str(level): _record(file, one, f"{key}.{axis}.{level}") for level, one in levels.items()
        }
        records = {level: record for level, record in found.items() if record is not None}
        return TunedByLevel(str(axis), records) if len(records) == len(found) else None
    return _record(file, given, key)


def _record(file: SpecFile, given: str | Mapping[str, Any], key: str) -> TunedRecord | None:
    if isinstance(given, Mapping):
        return TunedRecord.parse(given, f"{file.path}: {key}")
    path = file.path.parent / given
    if not path.is_file():
        rule = f"there is no such record in {path.parent}"
        instead = "run python -m fl_lightning tune with the search file of this study"
        if file.find_configs:
            raise InputError(f"{file.path}: {key}: {given}", rule, instead)
        return None
    return TunedRecord.read(path)
