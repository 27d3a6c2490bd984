"""Instruction records as they stand in files, and hashes of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fl_lightning.data.json_text import load_json
from fl_lightning.data.text.prompts import Prompt
from fl_lightning.data.text.tokens import Record
from fl_lightning.errors import InputError, as_bad_input, require
from fl_lightning.rng import key

T = TypeVar("T")

JSON_SUFFIXES = (".jsonl", ".json")

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which JSON can write and UTF-8 cannot."""


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InputError: it cannot be read, is not UTF-8, or is empty.
    """
    with as_bad_input(f"{path}", "it cannot be read", "check the file", OSError):
        data = path.read_bytes()
    with as_bad_input(
        f"{path}", "it is not UTF-8", "convert the file to UTF-8", UnicodeDecodeError
    ):
        text = data.decode("utf-8-sig")
    require(text.strip(), f"{path}", "the file is empty", "remove it or fill it")
    return text


def check_text(value: Any, key: str, place: str) -> None:
    """Refuse the value of a key that is no text, or holds half a character."""
    is_text = isinstance(value, str) and not SURROGATE.search(value)
    require(is_text, place, f"the value of {key} is no text", f'write "{key}": "..."')


class FieldSources:
    """Where the texts of a record stand in a line or row.

    Args:
        columns: names of keys or columns that are not those of the fields, by field; None: those of
            the fields.
        constants: texts of fields that no key or column has, by field; None: none.

    Raises:
        InputError: a field is none of a record's, or has a column and a text.
    """

    def __init__(
        self, columns: Mapping[str, str] | None = None, constants: Mapping[str, str] | None = None
    ) -> None:
        self.constants = dict(constants or {})
        foreign = {*self.constants, *(columns or {})} - {*Record._fields}
        both = {*self.constants} & {*(columns or {})}
        require(
            not foreign and not both,
            f"columns={columns}, constants={constants}",
            f"a record has the fields {', '.join(Record._fields)}, and a field one column or one text",
            "write e.g. columns: {inputs: article, targets: highlights}",
        )
        own = {name: name for name in Record._fields if name not in self.constants}
        self.columns = own | dict(columns or {})

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that a row has, under their names, beside its other values."""
        named = {name: row[column] for name, column in self.columns.items() if column in row}
        other = {name: value for name, value in row.items() if name not in Record._fields}
        return other | self.constants | named

    def checked(self, row: Mapping[str, Any], place: str, *more: str) -> Record:
        """Return the record with the texts of a line or row.

        Args:
            row: values by name.
            place: where it stands, for messages.
            more: names that it has to have beside those of a record.

        Raises:
            InputError: it lacks a name, a value is no text, or there is no answer.
        """
        entry = self.of(row)
        called = {name: self.columns.get(name, name) for name in [*Record._fields, *more]}
        missing = [column for name, column in called.items() if name not in entry]
        if missing:
            keys = (
                f"the key {missing[0]} is"
                if len(missing) == 1
                else f"the keys {', '.join(missing)} are"
            )
            added = ", ".join(f'"{column}": "..."' for column in missing)
            say = "say with --data.columns which keys they are"
            say += ", or with --data.constants what all lines have"
            raise InputError(place, f"{keys} missing", f"add {added}, or {say}")
        for name in Record._fields:
            check_text(entry[name], called[name], place)
        empty = f"{called['targets']} is empty: there is nothing to learn"
        require(entry["targets"], place, empty, "remove the line")
        return Record(*(entry[name] for name in Record._fields))


def json_records(
    path: Path, text: str, lists: Collection[str] = ()
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects of a file of JSON with their places for messages: one on each line; those
    of one list; or those of one object whose values are lists, a client's under its name, which
    each of them then has as ``client``.

    Args:
        path: the file, for messages.
        text: its content.
        lists: keys under which a record has lists of objects itself.

    Raises:
        InputError: a line is not JSON, or no object; a record of a client's list names another.
    """
    whole = _whole_document(path, text)
    if whole is not None and not (isinstance(whole, dict) and {*lists} & whole.keys()):
        by_client = whole if isinstance(whole, dict) else {None: whole}
        for name, entries in by_client.items():
            for number, entry in enumerate(entries, 1):
                place = f"{path}, record {number}" + ("" if name is None else f" of {name}")
                own = entry.get("client", name)
                require(
                    name is None or own == name,
                    place,
                    f"its client is {own!r}",
                    "leave client out, or put it into that client's list",
                )
                yield (entry if name is None else {"client": name} | entry), place
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        instead = "write one JSON object a line, without line breaks"
        with as_bad_input(place, "it is not JSON", instead, ValueError, RecursionError):
            entry = load_json(line, place)
        require(isinstance(entry, dict), place, "it is no JSON object", 'write {"KEY": VALUE, ...}')
        yield entry, place


def _whole_document(path: Path, text: str) -> dict[str, list[Any]] | list[Any] | None:
    """Return the list of objects, or the object of such lists, that a text is as a whole; None: it
    is something else, such as lines."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        found = load_json(text, str(path))  # it stops at the second line of JSON lines
    except InputError:
        raise
    except (ValueError, RecursionError):
        return None
    lists = [*found.values()] if isinstance(found, dict) else [found]
    objects = all(
        isinstance(some, list) and all(isinstance(one, dict) for one in some) for some in lists
    )
    return found if objects and any(lists) else None


def name_under(key: str, entry: Mapping[str, Any], place: str, seen: dict[str, Any]) -> str:
    """Return the client or group that a line names.

    Args:
        key: under which.
        entry: values by name; it has the key.
        place: where it stands, for messages.
        seen: what the lines before have under the key, by text; the value is put into it.

    Raises:
        InputError: it is null, no text and no number, or holds half a character, which no file of a
            run can; or a line before has, say, ``1`` where this one has ``"1"`` or ``1.0``.
    """
    value = entry[key]
    require(value is not None, place, f"the value of {key} is null", "say whose it is")
    name, given = str(value), f"the value of {key} is {json.dumps(value)[:40]}"
    finite = isinstance(value, (str, bool, int)) or (isinstance(value, float) and isfinite(value))
    require(finite, place, given, f'a name is a text: write "{key}": "..."')
    require(
        not SURROGATE.search(name), place, f"the value of {key} is no text", "write another name"
    )
    whole = isinstance(value, float) and value.is_integer()
    same = [seen.setdefault(each, value) for each in {name, str(int(value)) if whole else name}]
    first = next((each for each in same if type(each) is not type(value)), value)
    before = f"and {json.dumps(first)} on a line before"
    say = "write one client in one way, or two with different texts"
    require(type(first) is type(value), place, f"{given} {before}", say)
    return name


@dataclass(frozen=True)
class Line:
    """An entry of a file.

    Args:
        content: its record, pair of answers or turns.
        place: file and line, for messages.
        client: whose it is.
        group: its group.
    """

    content: Any
    place: str
    client: str
    group: str


def line_of(
    content: Any, entry: Mapping[str, Any], place: str, key: str | None, seen: dict[str, Any]
) -> Line:
    """Return an entry whose group is its client.

    Args:
        content: what it holds.
        entry: its values by name.
        place: where it stands, for messages.
        key: under which its client stands; None: all entries are of one.
        seen: as of :func:`name_under`.
    """
    if key is None:
        return Line(content, place, "all", "all")
    require(key in entry, place, f"the key {key} is missing", f'add "{key}": "..."')
    client = name_under(key, entry, place, seen)
    return Line(content, place, client, client)


def unit_hash(seed: int, text: str) -> float:
    """Return a number in [0, 1) that is a hash of seed and text."""
    return int.from_bytes(key(seed, f"text/{text}")[:6], "little") / 2**48


def prompt_place(record: Record, purpose: str = "place") -> float:
    """Return a number in [0, 1) that is a hash of a record's task, definition and inputs."""
    return unit_hash(0, f"{purpose}/" + "\0".join(record[:3]))


def places_by_prompt(records: Iterable[Record], prompt: Prompt) -> Callable[[Record], float]:
    """Return a function that gives each of some records its place: all that a network reads as the
    same prompt have that of their first in sorted order, so that they are never held apart.

    The place of such a prompt depends on which of its records are here: of two nodes with some of
    them each, one may train on it and the other validate.

    Args:
        records: those of all splits.
        prompt: what a network reads of a record.
    """

    def shown(record: Record) -> bytes:
        return key(0, "text/shown/" + "".join(prompt.parts(record)[:2]))

    first: dict[bytes, Record] = {}
    for record in records:
        one = shown(record)
        first[one] = min(first.get(one, record), record)
    return lambda record: prompt_place(first[shown(record)])


def split_by_hash(
    entries: Sequence[T],
    tests: Sequence[T] | None,
    place: Callable[[T], float],
    test_fraction: float,
    val_fraction: float,
) -> tuple[list[T], list[T], np.ndarray]:
    """Return entries for training and validation, entries for the test, and whether each of the
    former is for validation, bool ``[N]``: those of one prompt are never held apart.

    Args:
        entries: for training, validation and, if ``tests`` is None, the test.
        tests: entries for the test, of which those with a prompt of ``entries`` are left out.
        place: a number in [0, 1) that is a hash of an entry's prompt.
        test_fraction: share of the prompts that is for the test if ``tests`` is None, in [0, 1).
        val_fraction: share of the other prompts that is for validation, in [0, 1).
    """
    places = np.array([place(entry) for entry in entries], np.float64)
    first = 0.0 if tests is not None else test_fraction
    if tests is None:
        test = [entry for entry, at in zip(entries, places, strict=True) if at < first]
    else:
        seen = {*places.tolist()}
        test = [entry for entry in tests if place(entry) not in seen]
    train = [entry for entry, at in zip(entries, places, strict=True) if at >= first]
    share = first + (1 - first) * val_fraction
    return train, test, places[places >= first] < share


def texts_sha256(texts: Iterable[str]) -> str:
    """Return the SHA-256 over texts in UTF-8, each followed by a zero byte."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()
