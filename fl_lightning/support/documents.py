"""How large a YAML or JSON document may be, held before anything is built from it.

A file of 400 bytes can stand for ten thousand million values, by ten lists that each name the one before ten
times. What counts is therefore the size after all aliases are written out; it is found from the events of the
parser, in time linear in the text.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from fl_lightning.errors import InputError

MAX_VALUES = 10_000  # scalars, lists and mappings, keys included; a whole configuration has about 200
MAX_DEPTH = 100  # levels; libyaml overflows the stack of the process at some 10 000
MAX_BYTES = 2**20

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_document(path: Path, given: str) -> str:
    """The text of a YAML file.

    Args:
        path: the file.
        given: how the user named it, for the message.

    Raises:
        InputError: it has more than ``MAX_BYTES`` bytes, or is one that :func:`check_size` refuses.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)  # and not its size: a device or a pipe has none
    if len(data) > MAX_BYTES:
        raise InputError(f"{given}, which has more than {MAX_BYTES // 2**20} MiB", *_RULE)
    text = data.decode()
    check_size(text, given)
    return text


def check_size(text: str, given: str) -> None:
    """Refuse a document that is too large once its aliases are written out. One that is not valid YAML is
    left to its reader.

    Raises:
        InputError: it has more than ``MAX_VALUES`` values, more than ``MAX_DEPTH`` levels, or contains
            itself.
    """
    if "*" not in text and 2 * len(text) + 2 <= MAX_VALUES:  # no text has more values than that
        return
    sizes: dict[str, int] = {}  # of the anchors that are complete
    open_: list[
        tuple[str | None, int]
    ] = []  # anchor and size of each list and mapping around the current event
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
                    f"{given}, which has more than {MAX_VALUES} values, its aliases written out", *_RULE
                )
    except yaml.YAMLError:
        return


_RULE = (
    f"a configuration has at most {MAX_VALUES} values in {MAX_DEPTH} levels and {MAX_BYTES // 2**20} MiB",
    "write the settings alone, and keep data in files of its own",
)
