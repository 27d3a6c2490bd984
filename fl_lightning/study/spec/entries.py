"""The entries of a study file, with the types that they are checked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.study.spec.selection import Selection
from fl_lightning.study.spec.spec_file import Seed, Share


@dataclass
class StudyEntries:
    """The entries of a study file, with their types."""

    study: str
    seeds: list[Seed]  # type: ignore[valid-type]
    methods: dict[str, Any]
    config: str | list[str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    overlays: str | list[str] | None = None
    grid: dict[str, Any] = field(default_factory=dict)
    test: bool | list[str] | dict[str, Any] = False
    selection: Selection | None = None
    metric: str | None = None
    proposed: list[str] = field(default_factory=list)
    alone: str | None = None
    controls: list[str] = field(default_factory=list)
    degradation: dict[str, Any] | None = None
    target_accuracy: Share | None = None  # type: ignore[valid-type]
    target: float | None = None
    criteria: list[str | dict[str, Any]] = field(default_factory=list)
    premises: list[str | dict[str, Any]] = field(default_factory=list)
    claimed: Any = None
    until: str | dict[str, Any] | None = None
    tuned: str | dict[str, Any] | None = None


@dataclass
class VariationEntries:
    """The entries of a level in a study file."""

    config: str | list[str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class MethodEntries(VariationEntries):
    """The entries of a method in a study file."""

    grid: bool = True


@dataclass
class CriterionEntries:
    """The entries of a criterion in a study file, where it is a mapping."""

    criterion: str
    name: str = ""
    text: str = ""
    share: Share | None = None  # type: ignore[valid-type]


@dataclass
class PremiseEntries:
    """The entries of a premise in a study file, where it is a mapping."""

    criterion: str
    name: str = ""
    text: str = ""
    needed_by: list[str] = field(default_factory=list)


@dataclass
class DegradationEntries:
    """The entries of ``degradation`` in a study file."""

    axis: str
    stressed: str
    clean: str


@dataclass
class ProbingEntries:
    """The entries of ``test`` in a study file, where it is a mapping."""

    probes: str | list[str] | None = None
    checkpoint: str | None = None


def as_entry(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a criterion or premise of a study file as the arguments of :func:`parse`."""
    if isinstance(given, str):
        return {"text": given}
    names = {"criterion": "text", "text": "claim"}
    return {names.get(key, key): value for key, value in given.items()}


def as_document(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a criterion or premise as the mapping that it can be in a study file."""
    return {"criterion": given} if isinstance(given, str) else dict(given)
