"""The entries within entries of a study file, with the types that they are checked for, and how
they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.probing import PROBES
from fl_lightning.study.plan.schema import entry
from fl_lightning.study.plan.spec_file import Share, SpecFile

PATHS = "it is a path or a list of paths", "kd_default.yaml"
SETTINGS = "it is a mapping of dotted settings", "{trainer.max_rounds: 3}"
CRITERION = "it is a text", "accuracy(A) - accuracy(B) >= 0.01"
NAME = "it is a string", "gain"


@dataclass
class VariationEntries:
    """The entries of a level in a study file."""

    config: str | list[str] | None = entry(*PATHS, default=None)
    settings: dict[str, Any] = entry(*SETTINGS, factory=dict)


@dataclass
class MethodEntries(VariationEntries):
    """The entries of a method in a study file."""

    grid: bool = entry("it is true or false", "false", default=True)


@dataclass
class CriterionEntries:
    """The entries of a criterion in a study file, where it is a mapping."""

    criterion: str = entry(*CRITERION)
    name: str = entry(*NAME, default="")
    text: str = entry(*NAME, default="")
    share: Share | None = entry(
        "it is a share of the grid's levels, in (0, 1]", "0.8", default=None
    )  # type: ignore[valid-type]


@dataclass
class PremiseEntries:
    """The entries of a premise in a study file, where it is a mapping."""

    criterion: str = entry(*CRITERION)
    name: str = entry(*NAME, default="")
    text: str = entry(*NAME, default="")
    needed_by: list[str] = entry("it is a list of names of criteria", "[gain]", factory=list)


@dataclass
class DegradationEntries:
    """The entries of ``degradation`` in a study file."""

    axis: str = entry("it is an axis of the grid", "noise")
    stressed: str = entry("it is a level of the axis", "on")
    clean: str = entry("it is a level of the axis", "off")


@dataclass
class ProbingEntries:
    """The entries of ``test`` in a study file, where it is a mapping."""

    probes: str | list[str] | None = entry(
        "it is a list of strings, at least one; leave it out for all",
        "[clean, corruptions]",
        default=None,
    )
    checkpoint: str | None = entry(
        "it is last, best or a name like round_000060", "best", default=None
    )


def as_entry(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a criterion or premise of a study file as the arguments of :func:`parse`."""
    if isinstance(given, str):
        return {"text": given}
    names = {"criterion": "text", "text": "claim"}
    return {names.get(key, key): value for key, value in given.items()}


def as_document(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a criterion or premise as the mapping that it can be in a study file."""
    return {"criterion": given} if isinstance(given, str) else dict(given)


CLAIMS = {"criteria": CriterionEntries, "premises": PremiseEntries}


def read_claims(file: SpecFile, given: list[Any], key: str) -> list[str | dict[str, Any]]:
    """Check the form of criteria or premises; what they say is checked later."""
    return [one if isinstance(one, str) else _claim(file, one, key, CLAIMS[key]) for one in given]


def _claim(file: SpecFile, given: Any, where: str, schema: type) -> dict[str, Any]:
    entries = dict(vars(file.parse(schema, given, f"{where}.")))
    if entries.get("share") is not None:
        entries["share"] = float(entries["share"])
    return {key: value for key, value in entries.items() if value not in (None, "", [])}


def registered_claims(given: Sequence[str | Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [as_document(one) for one in given]


def read_test(
    file: SpecFile, given: bool | list[str] | dict[str, Any], key: str
) -> dict[str, Any] | None:
    """Return the flags of ``test``, or None where no test is asked for."""
    if isinstance(given, bool):
        return {} if given else None
    entries = (
        ProbingEntries(given)
        if isinstance(given, list)
        else file.parse(ProbingEntries, given, "test.")
    )
    probes, flags = entries.probes, {}
    if probes is not None:
        if not probes:
            raise file.wrong(ProbingEntries, "probes", probes, "test.")
        names = [
            name.strip() for name in (probes.split(",") if isinstance(probes, str) else probes)
        ]
        flags["probes"] = ",".join(file.one_of(name, PROBES, "test") for name in names)
    if entries.checkpoint is not None:
        if not re.fullmatch(r"last|best|round_\d{6}", entries.checkpoint):
            raise file.wrong(ProbingEntries, "checkpoint", entries.checkpoint, "test.")
        flags["checkpoint"] = entries.checkpoint
    return flags


def read_degradation(file: SpecFile, given: dict[str, Any], key: str) -> dict[str, str]:
    return vars(file.parse(DegradationEntries, given, f"{key}."))
