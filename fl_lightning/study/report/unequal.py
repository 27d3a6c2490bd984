"""What differs between the runs of a comparison beside the method and the seed, and what they lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from fl_lightning.config.settings import is_free, result_settings
from fl_lightning.study.plan.registration import level_key
from fl_lightning.study.report.comparison import Comparison

SEED = "seed_everything"
MOST_SETTINGS = 5
"""Settings that are named."""


def unequal_methods(comparison: Comparison) -> str:
    """Return which settings that are no method's own differ between methods; empty where none
    does."""
    differing: dict[str, str] = {}
    for levels in comparison.levels:
        found: dict[str, Mapping[str, Any]] = {}
        for run in comparison.results.runs:
            is_first = run.levels == levels and run.label not in found
            if is_first and run.label not in comparison.study.controls and run.protocol:
                found[run.label] = run.protocol
        differing = _differing(found) | differing
    return _sentence("Methods differ in settings that are not their own", differing)


def unequal_seeds(comparison: Comparison) -> Iterator[str]:
    """Yield of each method whose seeds have other settings, at one combination of levels, which
    these are."""
    for label in comparison.study.methods:
        differing: dict[str, str] = {}
        for levels in comparison.levels:
            found = {
                f"seed {run.seed}": run.record.settings
                for run in comparison.results.runs
                if run.label == label and run.levels == levels and run.record.settings
            }
            one = next(iter(found.values()), {})
            if all(is_free(key, one) or key == SEED for key in _differing(found)):
                continue
            found = {name: {**result_settings(each), SEED: 0} for name, each in found.items()}
            differing = _differing(found) | differing
        if differing:
            yield _sentence(f"The runs of {label} differ in more than the seed", differing)


def unequal_code(comparison: Comparison) -> Iterator[str]:
    """Yield of each of a user's files of which several versions trained the runs, whose these
    are."""
    versions: dict[str, dict[str, set[str]]] = {}
    for run in comparison.results.runs:
        about = run.record.metadata
        for code in (about, *(about.get("resumed") or [])):
            for module, sha in {
                **(code.get("code_before") or {}),
                **(code.get("code") or {}),
            }.items():
                versions.setdefault(module, {}).setdefault(sha, set()).add(run.label)
    for module, found in versions.items():
        labels = sorted(set().union(*found.values()))
        if len(found) > 1 and len(labels) == 1:
            yield f"The runs of {labels[0]} were trained by several versions of {module}."
        elif len(found) > 1:
            yield (
                f"The runs of {', '.join(labels)} were trained by several versions of "
                f"{module}: they differ in more than the method and the seed."
            )


def lost_uploads(comparison: Comparison) -> Iterator[str]:
    """Yield of how many runs of each method uploads were refused, and of how many a round used no
    upload: such a method is compared at settings at which it does not train as it could."""
    runs = comparison.results.distinct
    for what, lost in (
        ("Uploads were refused", lambda row: row.get("clients/rejected", 0) > 0),
        ("A round or more used no upload", lambda row: row.get("clients/trained", 1) == 0),
    ):
        found = Counter(run.label for run in runs if any(map(lost, run.record.history)))
        if found:
            each = ", ".join(f"{label} {count}" for label, count in found.items())
            yield (
                f"{what} in {found.total()} of {len(runs)} runs ({each}); "
                "their `ledger.csv` and `run.log` say why."
            )


def missing_seeds(comparison: Comparison) -> str:
    """Return which methods lack seeds that others have at the same combination of levels, and at
    which; empty where none does."""
    missing: dict[str, list[str]] = {}
    for levels in comparison.levels:
        table = comparison.table(comparison.study.metric, levels).dropna(how="all")
        for label, column in table.items():
            lacking, runs = table.index[column.isna()], comparison.runs(str(label), levels)
            if len(lacking) < len(column):
                without = [str(seed) for seed in lacking if seed not in runs]
                others = [str(seed) for seed in lacking if seed in runs]
                for what, seeds in (("none", without), ("no number", others)):
                    if seeds:
                        said = f"{label} has {what} of seed {', '.join(seeds)}"
                        missing.setdefault(said, []).append(level_key(levels))
    every = len(comparison.levels)
    each = [
        said + (f" at {' and '.join(where)}" if len(where) < every else "")
        for said, where in missing.items()
    ]
    of_which = "Means are over each method's own seeds, places over those that both of a pair have"
    if every > 1:
        of_which += ", and places over all settings over those that all have in all settings"
    return f"{of_which}: {'; '.join(each)}." if each else ""


def _differing(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return of each setting in which those of several names differ what most have, and who has
    what else."""
    found = {}
    for key in dict.fromkeys(key for each in settings.values() for key in each):
        values = {name: str(each.get(key, "not set")) for name, each in settings.items()}
        usual = Counter(values.values()).most_common(1)[0][0]
        if others := [f"{name}: {value}" for name, value in values.items() if value != usual]:
            found[key] = f"`{key}` ({usual}; {', '.join(others)})"
    return found


def _sentence(what: str, differing: Mapping[str, str]) -> str:
    if not differing:
        return ""
    more = f" and {len(differing) - MOST_SETTINGS} more" if len(differing) > MOST_SETTINGS else ""
    return f"{what}: {', '.join([*differing.values()][:MOST_SETTINGS])}{more}."
