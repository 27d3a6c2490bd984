"""JSON in which no object has a key twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fl_lightning.errors import InputError, as_bad_input


def read_json(path: Path, expected: str, *, find: str = "check the file") -> Any:
    """Return what a file of JSON says.

    Args:
        path: the file.
        expected: what to write where it is something else.
        find: what to do where it cannot be read.

    Raises:
        InputError: it cannot be read, is not JSON, or an object has a key twice.
    """
    with as_bad_input(f"{path}", "it cannot be read", find, OSError):
        data = path.read_bytes()
    with as_bad_input(f"{path}", "it is not JSON", expected, ValueError, RecursionError):
        return load_json(data.decode("utf-8-sig"), f"{path}")


def load_json(text: str, place: str) -> Any:
    """Return what a text of JSON says.

    Args:
        place: where it stands, for messages.

    Raises:
        InputError: an object has a key twice, of which Python would take the last without a word.
        ValueError: it is not JSON.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            given, instead = f"{place}, key {twice!r}", "join the two, or leave one out"
            raise InputError(given, "an object has it twice", instead)
        return found

    return json.loads(text, object_pairs_hook=once)
