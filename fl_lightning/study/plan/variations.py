"""The changes that methods and levels make to a study's common configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.study.plan.entries import MethodEntries, VariationEntries
from fl_lightning.study.plan.spec_file import SpecFile

RESERVED = (
    *(
        "study",
        "label",
        "method",
        "seed",
        "dataset",
        "commit",
        "dirty",
        "run_dir",
        "partition_sha256",
    ),
    *("registration", "content_sha256", "protocol_sha256"),
)
"""Tags that every run has: none of them can name an axis."""
COLUMNS = ("run", "rounds")
"""What ``runs.csv`` says of each run beside its tags, axes and metrics."""


@dataclass(frozen=True)
class Variation:
    """The changes that a method or a level of an axis makes.

    Args:
        configs: ``fit`` configurations, layered.
        settings: dotted ``fit`` settings.
        in_grid: False for a method that has no level of the grid: it is run once for each seed, and
            this run is compared at every level.
    """

    configs: tuple[Path, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    in_grid: bool = True

    def document(self) -> dict[str, Any]:
        """Return the entry as it is written in a study file; its files are paths."""
        document = {"config": list(self.configs), "settings": dict(self.settings)}
        given = {key: value for key, value in document.items() if value}
        return given if self.in_grid else {**given, "grid": False}


def variations_in(
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


def read_methods(file: SpecFile, given: Any, key: str) -> dict[str, Variation]:
    return variations_in(file, given, key, MethodEntries)


def read_grid(
    file: SpecFile, given: Mapping[str, Any], key: str
) -> dict[str, dict[str, Variation]]:
    grid = {}
    for axis, levels in given.items():
        file.name(axis, key)
        taken = axis in RESERVED or axis.startswith("mlflow.")
        file.require(
            not taken, f"{key}.{axis}", "every run has a tag of that name", f"write {axis}_axis"
        )
        taken = axis in COLUMNS and file.find_configs  # studies of before are still reported
        rule = "runs.csv of a report has a column of that name"
        file.require(not taken, f"{key}.{axis}", rule, f"write {axis}_axis")
        grid[axis] = variations_in(file, levels, f"{key}.{axis}")
    return grid


def grid_names(grid: Mapping[str, Any]) -> dict[str, list[str]]:
    return {axis: list(levels) for axis, levels in grid.items()}


def grid_of_names(grid: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Variation]]:
    return {axis: {level: Variation() for level in levels} for axis, levels in grid.items()}
