"""Tables of costs as JSON files. Numbers keep all digits, so a table that is read equals the
written one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fl_lightning.config.packaged import cost_table, table_text
from fl_lightning.energy.cost_shapes import MeasuredCost, measured_from_json
from fl_lightning.energy.costs import CostTable, Removal
from fl_lightning.energy.options import OPTIONS
from fl_lightning.errors import InputError, as_bad_input, require

FORMAT = 1
"""Number of the file's form; a reader refuses others."""
KEYS = {"format", "label", "device", "scope", "context", "rest", "costs", "groups", "removed"}
LATER_KEYS = {"high", "adapter"}
"""Keys that tables of before do not have: their *high* is float32, and nobody said what adapters
they are of."""
CONTROLLER = "controller"
"""Key of what choosing levels costs, in tables of branches where it was measured."""


def to_json(table: CostTable) -> str:
    """Return the text of a table. Groups of equal cost share one entry of ``costs``."""
    costs: list[Mapping[str, MeasuredCost]] = []
    places = {}
    for name, options in table.groups.items():
        if options not in costs:
            costs.append(options)
        places[name] = costs.index(options)
    document = {
        "format": FORMAT,
        "label": table.label,
        "device": table.device,
        "scope": table.scope,
        "high": table.high,
        "adapter": table.adapter,
        "context": table.context,
        "rest": asdict(table.rest),
        "costs": [{option: asdict(options[option]) for option in OPTIONS} for options in costs],
        "groups": places,
        "removed": [vars(removal) for removal in table.removed],
    }
    if table.controller is not None:
        document[CONTROLLER] = asdict(table.controller)
    return json.dumps(document, indent=1) + "\n"


def from_json(text: str, given: str = "the table") -> CostTable:
    """Return the table that a text holds.

    Args:
        text: JSON, as :func:`to_json` writes it.
        given: how the user named it, for messages.

    Raises:
        InputError: it is not JSON, lacks a part, or a part is not what :class:`CostTable` takes.
    """
    with as_bad_input(given, "a table is JSON", "calibrate again", ValueError, RecursionError):
        document = json.loads(text)
    _require_form(document, given)
    try:
        costs = [
            {
                option: measured_from_json(one, f"costs[{index}].{option}")
                for option, one in options.items()
            }
            for index, options in enumerate(document["costs"])
        ]
        groups = {}
        for name, place in document["groups"].items():
            require(
                type(place) is int and 0 <= place < len(costs),
                f"group {name} at {place}",
                f"a group names one of the {len(costs)} costs by its place, counted from 0",
                "calibrate again",
            )
            groups[name] = costs[place]
        return CostTable(
            document["label"],
            document["device"],
            document["scope"],
            document["context"],
            groups,
            measured_from_json(document["rest"], "rest"),
            tuple(_removal(entry) for entry in document["removed"]),
            document.get("high", "float32"),
            document.get("adapter", ""),
            measured_from_json(document[CONTROLLER], CONTROLLER)
            if CONTROLLER in document
            else None,
        )
    except InputError as error:
        raise error.within(given) from None


def _require_form(document: Any, given: str) -> None:
    keys = set(document) if isinstance(document, Mapping) else set()
    rule = f"a table has the keys {', '.join(sorted(KEYS))}, and {', '.join(sorted(LATER_KEYS))}"
    is_table = bool(keys & {"costs", "groups"})  # a run's metadata.json has a device too
    require(
        is_table, given, f"it is no table of costs: {rule}", "name what --calibrate --out wrote"
    )
    for wrong, word in (
        (KEYS - keys, "without"),
        (keys - KEYS - LATER_KEYS - {CONTROLLER}, "with"),
    ):
        require(not wrong, f"{given} {word} {', '.join(sorted(wrong))}", rule, "calibrate again")
    lists = all(isinstance(document[key], list) for key in ("costs", "removed"))
    mappings = lists and all(
        isinstance(one, Mapping) for one in (document["groups"], *document["costs"])
    )
    numbers = (
        document["format"] == FORMAT
        and type(document["context"]) is int
        and document["context"] >= 0
    )
    rule = f"it is of format {FORMAT}, with lists, mappings and numbers in their places"
    require(lists and mappings and numbers, given, rule, "calibrate again")


def _removal(value: object) -> Removal:
    try:
        removal = Removal(**value)  # type: ignore[arg-type]
        valid = (
            isinstance(removal.group, str)
            and removal.first >= 1
            and (removal.last is None or removal.last >= removal.first)
        )
    except TypeError:
        valid = False
    require(valid, f"removed: {value}", "it has group, option, first and last", "calibrate again")
    return removal


def read_table(path: Path | str) -> CostTable:
    """Return the table of a file.

    Raises:
        InputError: the file cannot be read, or holds no table.
    """
    return from_json(table_text(path), str(path))


def shipped_table(network: str = "llama_tiny") -> CostTable:
    """Return the table of this name that comes with the package.

    Its joules are of the device that it names, not of yours.

    Raises:
        InputError: there is none of this name.
    """
    return read_table(cost_table(network))
