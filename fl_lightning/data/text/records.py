"""Instruction records as they stand in files, and hashes of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_lightning.data.text.tokens import Record
from fl_lightning.errors import InputError, require
from fl_lightning.rng import key

SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which JSON can write and UTF-8 cannot."""


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InputError: it cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}", f"it cannot be read ({error.strerror})", "check the file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}", f"byte {error.start} is not UTF-8", "convert the file to UTF-8") from None
    require(text.strip(), f"{path}", "the file is empty", "remove it or fill it")
    return text


def json_records(path: Path, text: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the object of each line of a file of JSON lines, with its place for messages.

    Raises:
        InputError: a line is not JSON, or no object.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", type(error).__name__)
            raise InputError(
                place, f"it is not JSON ({reason})", "write one JSON object a line, without line breaks"
            ) from None
        require(isinstance(entry, dict), place, "it is no JSON object", 'write {"KEY": VALUE, ...}')
        yield entry, place


def name_under(key: str, entry: Mapping[str, Any], place: str) -> str:
    """Return the client or group that a line names.

    Args:
        key: under which.
        entry: values by name; it has the key.
        place: where it stands, for messages.

    Raises:
        InputError: it is null, or holds half a character, which no file of a run can.
    """
    require(entry[key] is not None, place, f"the value of {key} is null", "say whose it is")
    name = str(entry[key])
    require(not SURROGATE.search(name), place, f"the value of {key} is no text", "write another name")
    return name


def checked_record(entry: Mapping[str, Any], place: str, *more: str) -> Record:
    """Return the record with the texts of a line or row.

    Args:
        entry: values by name.
        place: where it stands, for messages.
        more: names that it has to have beside those of a record.

    Raises:
        InputError: it lacks a name, a value is no text, or there is no answer.
    """
    for name in dict.fromkeys([*Record._fields, *more]):
        require(name in entry, place, f"the key {name} is missing", f'add "{name}": "..."')
    for name in Record._fields:
        is_text = isinstance(entry[name], str) and not SURROGATE.search(entry[name])
        require(is_text, place, f"the value of {name} is no text", f'write "{name}": "..."')
    require(entry["targets"], place, "targets is empty: there is nothing to learn", "remove the line")
    return Record(*(entry[name] for name in Record._fields))


def prompt_place(record: Record, purpose: str = "place") -> float:
    """Return a number in [0, 1) that is a hash of a record's prompt: equal prompts are never held apart."""
    digest = key(0, f"text/{purpose}/" + "\0".join(record[:3]))
    return int.from_bytes(digest[:6], "little") / 2**48


def records_sha256(records: Iterable[Record]) -> str:
    """Return the SHA-256 over the fields of all records in UTF-8, each followed by a zero byte."""
    digest = hashlib.sha256()
    for text in (text for record in records for text in record):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()
