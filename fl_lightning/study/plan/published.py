"""Published runs that a study names: a folder with ``report.json`` and ``runs.csv``, as ``compare``
writes.

    published: docs/results/leaderboard_digits      # or its name alone, or a list

Their methods are methods of the study in its report, paired by seed with its own, and none of them
is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from fl_lightning.config.packaged import configs_folder
from fl_lightning.errors import InputError, as_bad_input, require
from fl_lightning.study.metric_names import TaskMetrics
from fl_lightning.study.plan.spec_file import SpecFile

REPORT, RUNS, PLAN = "report.json", "runs.csv", "study.yaml"
SEQUENCE = "confidence sequence"
"""The ``interval`` of a report whose seeds were added until its criteria were decided."""
MARK_LENGTH = 16
"""Characters of the hash that is registered."""
OF_LEVEL = "protocol", "partition_sha256", "files_sha256", "data_sha256"
"""Mappings that a report has of each level; one of before may lack some."""
AGAIN = "make the report again with compare of this release, from the runs"


@dataclass(frozen=True)
class PublishedStudy:
    """A published study.

    Args:
        path: its folder.
        report: what ``report.json`` says.
        sha256: the hash of ``runs.csv``.
    """

    path: Path
    report: Mapping[str, Any] = field(compare=False, repr=False)
    sha256: str

    @classmethod
    def read(cls, path: Path, where: str) -> PublishedStudy:
        """Read a folder.

        Args:
            path: the folder.
            where: what named it, for the message.

        Raises:
            InputError: it is no folder that ``compare`` wrote.
        """
        rule = f"it is a folder with {REPORT} and {RUNS}, as compare writes it"
        instead = "name a folder in docs/results, or the --out of a compare"
        errors = OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError
        with as_bad_input(where, rule, instead, *errors):
            report = json.loads((path / REPORT).read_bytes())
            found = cls(path, report, sha256((path / RUNS).read_bytes()).hexdigest())
            texts = report["study"], report["selection"], *found.labels, *found.controls
            if {*map(type, texts)} != {str} or {*map(type, found.seeds)} != {int}:
                raise TypeError("names are texts, and seeds integers")
            _ = (
                found.levels[0],
                [one["levels"].items() for one in found.levels],
                [dict(one.get(key) or {}) for one in found.levels for key in OF_LEVEL],
                [
                    (run["name"], run["method"], run["seed"], run["rounds"])
                    for run in report["runs"]
                ],
                [(run["levels"].items(), run["metrics"].items()) for run in report["runs"]],
            )
        return found

    @property
    def name(self) -> str:
        return str(self.report["study"])

    @property
    def labels(self) -> list[str]:
        return list(self.report["methods"])

    def label_among(self, taken: Iterable[str]) -> str:
        """Return a label that is one of these but for case, which some file systems do not tell;
        empty if none is."""
        lower = {label.lower() for label in taken}
        return next((label for label in self.labels if label.lower() in lower), "")

    @property
    def seeds(self) -> list[int]:
        return list(self.report["seeds"])

    @property
    def controls(self) -> list[str]:
        return list(self.report.get("controls", []))

    @property
    def is_sequential(self) -> bool:
        """Whether its seeds were added until its criteria were decided."""
        return self.report.get("interval") == SEQUENCE

    @property
    def levels(self) -> list[Mapping[str, Any]]:
        """What the report says of each combination of levels."""
        return list(self.report["levels"])

    @property
    def task(self) -> TaskMetrics:
        return TaskMetrics.of_run({"task": self.report.get("task")})

    @property
    def mark(self) -> str:
        """Name and hash, as they are registered."""
        return f"{self.name} {self.sha256[:MARK_LENGTH]}"

    def document(self) -> Path:
        """Return what a study file says of it."""
        return self.path

    def check(
        self,
        where: str,
        seeds: Sequence[int],
        combinations: Sequence[Mapping[str, str]],
        selection: str,
    ) -> None:
        """Check that runs of a study can be paired with these, as far as its file tells.

        Args:
            where: the beginning of a message.
            seeds: the seeds of the study.
            combinations: its combinations of levels.
            selection: its selection.

        Raises:
            InputError: they cannot; the message names what differs.
        """
        given = f"{where}published: {self.name}"
        rule = (
            f"its report has no protocol_sha256: {self.path} was written by an earlier release, or of runs "
            "without settings; it can be read, and nothing can be paired with it"
        )
        require(all(one.get("protocol_sha256") for one in self.levels), given, rule, AGAIN)
        known = ", ".join(map(str, self.seeds))
        other = [one for one in seeds if one not in self.seeds]
        said = f"{given}; seeds {', '.join(map(str, other))} are not published"
        require(
            not other,
            said,
            f"runs are paired by seed; published are {known}",
            f"write seeds: [{known}]",
        )
        for levels in combinations:
            self.level(levels, given)
        of = self.report["selection"]
        said = f"{given}; selection: {of} is published, {selection} is asked"
        rule = "one model is compared"
        require(selection == of, said, rule, f"write selection: {of}")

    def level(self, levels: Mapping[str, str], where: str) -> Mapping[str, Any]:
        """Return what the report says at some levels.

        Raises:
            InputError: they are not published.
        """
        found = next((one for one in self.levels if dict(one["levels"]) == dict(levels)), None)
        if found is None:
            shown = [_in_words(one["levels"]) for one in self.levels]
            rule = f"the levels of the grid are those that are published: {'; '.join(shown)}"
            raise InputError(f"{where}; {_in_words(levels)}", rule, f"write {shown[0]}")
        return found


def _in_words(levels: Mapping[str, str]) -> str:
    return ",".join(f"{axis}={level}" for axis, level in levels.items()) or "no grid"


def find_published(name: str, folder: Path = Path()) -> Path:
    """Return the folder that a name means: a path, or a report of that name that comes with the
    project.

    Args:
        name: what was given.
        folder: what a relative path is relative to; the working directory is looked in too.
    """
    places = [folder / name, Path(name), configs_folder().parent / "docs/results" / name]
    return next((place for place in places if place.is_dir()), places[0])


def read_published(file: SpecFile, given: str | list[str], key: str) -> tuple[PublishedStudy, ...]:
    """Return the published studies that an entry of a study file names."""
    names = [given] if isinstance(given, str) else given
    folder = file.path.parent
    return tuple(
        PublishedStudy.read(find_published(one, folder), f"{file.path}: {key}: {one}")
        for one in names
    )


def registered_marks(published: Sequence[PublishedStudy]) -> list[str]:
    return [one.mark for one in published]
