"""YAML and JSON documents: a limit on their size, checked before anything is built from them, and a
hash.

A file of 400 bytes can stand for ten thousand million values, with ten lists of which each names
the one before it ten times. The limit is therefore on the size after all aliases are written out.
That size is computed from the parser's events, in time linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import InputError

# scalars, lists and mappings, keys included; a whole configuration has about 200
MAX_VALUES = 10_000
MAX_DEPTH = 100  # levels; libyaml overflows the stack of the process at some 10 000
MAX_BYTES = 2**20

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def document_hash(document: Any) -> str:
    """Return the SHA-256 of a document, whatever the order of its keys."""
    return sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text; libyaml takes a tenth of the time of ``yaml.safe_load``."""
    return yaml.load(text, Loader=_Loader)


def as_yaml(value: Any) -> str:
    """Return a value as a YAML text; libyaml takes a tenth of the time of ``yaml.safe_dump``."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False))


ODD_NUMBER = re.compile(r"[-+]?(?:0[0-7_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)$")
"""A number that YAML 1.1 reads to the base 8, as ``010``, or 60, as ``1:30``."""


def odd_numbers(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    """Yield the numbers of a document that YAML 1.1 does not read as decimal ones."""
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from (found for one in pair for found in odd_numbers(one))
    elif isinstance(node, yaml.SequenceNode):
        yield from (found for one in node.value for found in odd_numbers(one))
    elif (
        isinstance(node, yaml.ScalarNode)
        and node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        and ODD_NUMBER.match(node.value)
    ):
        yield node


def refuse_odd_numbers(path: Path, node: yaml.Node | None) -> None:
    """Refuse a number of a document that YAML 1.1 does not read as a decimal one, by its line."""
    for number in odd_numbers(node):
        raise InputError(
            f"{path}, line {number.start_mark.line + 1}: {number.value}",
            "YAML 1.1 reads it to the base 8 or 60",
            f"write a decimal number without leading zeros, or the text '{number.value}'",
        )


def read_document(path: Path, given: str) -> str:
    """Return the text of a YAML file.

    Args:
        path: the file.
        given: how the user named it, for the message.

    Raises:
        InputError: the file has more than ``MAX_BYTES`` bytes, or :func:`check_size` refuses it.
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)  # stat would not do: a device or a pipe has no size
    if len(data) > MAX_BYTES:
        raise InputError(f"{given}, which has more than {MAX_BYTES // 2**20} MiB", *_RULE)
    text = data.decode()
    check_size(text, given)
    return text


def check_size(text: str, given: str) -> None:
    """Refuse a YAML text that stands for too large a document when its aliases are written out.

    A text that is not valid YAML is accepted here, since the parser refuses it later.

    Args:
        text: the document.
        given: how the user named it, for the message.

    Raises:
        InputError: it has more than ``MAX_VALUES`` values or ``MAX_DEPTH`` levels, or contains
            itself.
    """
    # so short a text cannot have too many values
    if "*" not in text and 2 * len(text) + 2 <= MAX_VALUES:
        return
    sizes: dict[str, int] = {}  # values below each anchor that is complete
    # anchor, and values so far, of each list and mapping around the current event
    open_: list[tuple[str | None, int]] = []
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.CollectionStartEvent):
                open_.append((event.anchor, 1))
                if len(open_) > MAX_DEPTH:
                    raise InputError(f"{given}, which has more than {MAX_DEPTH} levels", *_RULE)
                continue
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, size = open_.pop()
            elif isinstance(event, yaml.AliasEvent):
                if any(event.anchor == anchor for anchor, _ in open_):
                    raise InputError(f"{given}, where '{event.anchor}' contains itself", *_RULE)
                anchor, size = None, sizes.get(event.anchor or "", 1)
            elif isinstance(event, yaml.ScalarEvent):
                anchor, size = event.anchor, 1
            else:
                continue
            if anchor:
                sizes[anchor] = size
            if open_:
                open_[-1] = open_[-1][0], open_[-1][1] + size
            if sum(size for _, size in open_) > MAX_VALUES:
                raise InputError(
                    f"{given}, which has more than {MAX_VALUES} values, its aliases written out",
                    *_RULE,
                )
    except yaml.YAMLError as error:
        # libyaml 0.2.6 refuses 1 000 levels before their first event
        if "nesting depth" in str(error):
            raise InputError(f"{given}, which has more than {MAX_DEPTH} levels", *_RULE) from None
        return


_RULE = (
    f"a configuration has at most {MAX_VALUES} values in {MAX_DEPTH} levels and {MAX_BYTES // 2**20} MiB",
    "write the settings alone, and keep data in files of its own",
)
