"""What an entry of a study file or a search file is, said once: beside the field that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints


def same(value: Any) -> Any:
    """Return the value."""
    return value


def absolute(path: Path) -> str:
    return str(path.resolve())


def written(value: Any, path: Callable[[Path], str] = absolute) -> Any:
    """Return a value as a study file has it.

    Args:
        value: the value.
        path: returns the text that a path is written as.
    """
    if hasattr(value, "document"):
        return written(value.document(), path)
    if isinstance(value, Mapping):
        return {key: written(one, path) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [written(one, path) for one in value]
    return path(value) if isinstance(value, Path) else value


@dataclass(frozen=True)
class Entry:
    """What is known of one entry. Reading, writing, registering and comparing follow from it.

    Args:
        rule: what it has to be, for the message that refuses something else.
        example: for the same message.
        given: its type in the file, where that is another one than the field's.
        key: its key in the file; empty: the name of the field.
        read: makes the field's value of the file, what it says, and the key.
        write: makes what a file says of the field's value; None: :func:`written` does.
        register: makes what is registered of the value, as JSON; None: the entry is no part of the
            question.
        restore: makes the value of what was registered; None: that of the study as it is now is
            taken.
        later: whether it came after the first registrations, whose hashes do not have it: it is
            registered where it has another value than its default.
        compared: whether a report says that it is another one than was registered.
    """

    rule: str
    example: str
    given: Any = None
    key: str = ""
    read: Callable[[Any, Any, str], Any] = lambda file, given, key: given
    write: Callable[[Any], Any] | None = None
    register: Callable[[Any], Any] | None = None
    restore: Callable[[Any], Any] | None = same
    later: bool = False
    compared: bool = True


def entry(
    rule: str,
    example: str,
    given: Any = None,
    *,
    default: Any = MISSING,
    factory: Any = MISSING,
    **more: Any,
) -> Any:
    """Return a dataclass's field with its :class:`Entry`; without a default, it must be given."""
    known = {"entry": Entry(rule, example, given, **more)}
    return field(default=default, default_factory=factory, metadata=known)  # type: ignore[call-overload]


def entries(schema: Any) -> Iterator[tuple[str, Field, Entry]]:
    """Yield key, field and entry of each field that a file can have."""
    for one in fields(schema):
        if known := one.metadata.get("entry"):
            yield known.key or one.name, one, known


def default_of(one: Field) -> Any:
    """Return the default of a field."""
    return one.default if one.default_factory is MISSING else one.default_factory()


@cache
def as_given(schema: type) -> type:
    """Return the dataclass of what a file says, in the types in which it says it; None: it says
    nothing."""
    hints, needed, others = get_type_hints(schema), [], []
    for key, one, known in entries(schema):
        kind = known.given or hints[one.name]
        if one.default is one.default_factory is MISSING:
            needed.append((key, kind, field(metadata=one.metadata)))
        else:
            others.append((key, kind | None, field(default=None, metadata=one.metadata)))
    return make_dataclass(f"{schema.__name__}Entries", [*needed, *others])
