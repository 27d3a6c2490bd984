"""In which points two plans of a study differ, in clauses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def different(key: str, before: Any, after: Any) -> list[str]:
    """Compare what is registered of one entry."""
    items = [*before, *after] if isinstance(before, list) and isinstance(after, list) else []
    if any(isinstance(item, Mapping) for item in items):
        return _different_claims(key, before, after)
    if key == "grid":
        axes = dict.fromkeys([*before, *after])
        found = [
            different_names(f"{key}.{axis}", before.get(axis, []), after.get(axis, []))
            for axis in axes
        ]
        return [clause for some in found for clause in some]
    if items:
        return different_names(key, before, after)
    return [] if before == after else [f"{key}: registered {before}, now {after}"]


def different_names(key: str, before: Sequence[Any], after: Sequence[Any]) -> list[str]:
    added, removed = (
        [str(name) for name in some if name not in others]
        for some, others in ((after, before), (before, after))
    )
    parts = [f"{', '.join(added)} added"] if added else []
    parts += [f"{', '.join(removed)} removed"] if removed else []
    return [f"{key}: {', '.join(parts)}"] if parts else []


def _different_claims(name: str, before: Sequence[Mapping], after: Sequence[Mapping]) -> list[str]:
    what = {"criteria": "criterion", "premises": "premise"}[name]

    def by_title(entries: Sequence[Mapping]) -> dict[tuple[str, int], Mapping]:
        titles = [entry.get("name") or entry["criterion"] for entry in entries]
        # one text may be there several times, with other shares
        keys = [(title, titles[:number].count(title)) for number, title in enumerate(titles)]
        return dict(zip(keys, entries, strict=True))

    old, new, found = by_title(before), by_title(after), []
    for key, entry in old.items():
        if key not in new:
            found.append(f"{what} `{entry['criterion']}` removed")
        elif new[key] != entry:
            found.append(f"{what} {key[0]}: registered {_written(entry)}, now {_written(new[key])}")
    return [*found, *(f"{what} `{new[key]['criterion']}` added" for key in new if key not in old)]


def _written(entry: Mapping[str, Any]) -> str:
    rest = ", ".join(
        f"{key} {value}" for key, value in entry.items() if key not in ("criterion", "name")
    )
    return f"`{entry['criterion']}`{f' ({rest})' if rest else ''}"
