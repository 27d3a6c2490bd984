"""``--model.help FedAvg``: the settings of one class, on one screen."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, get_origin

from fl_lightning.cli.flags import flags_in
from fl_lightning.cli.types import (
    concrete_classes,
    hint_of,
    import_class,
    members,
    settings_of,
    type_in_words,
)
from fl_lightning.config.near_names import nearest
from fl_lightning.errors import InputError


def class_help(args: list[str], settings: Mapping[str, Any]) -> str | None:
    """Return the text for the first ``--SETTING.help NAME`` of a command line; None if it has none.

    Args:
        args: the command line after the command.
        settings: the parser's settings, by dotted name.

    Raises:
        InputError: there is no class of that name for that setting.
    """
    for flag, value in flags_in(args):
        path = flag.removeprefix("--").removesuffix(".help")
        known = _known_classes(path, settings) if flag.endswith(".help") else {}
        if not known:
            continue
        name = "" if value.startswith("-") else value
        cls = known.get(name) or import_class(name)
        if cls is not None:
            return "\n".join(_class_lines(path, cls)) + "\n"
        if name:
            near = nearest(name, known) or "NAME with one of these"
            raise InputError(
                f"{flag} {name}",
                f"it is one of {', '.join(sorted(known))}, or an import path",
                f"write {flag} {near}",
            )
        return "\n".join(_choice_lines(path, known)) + "\n"
    return None


def _known_classes(path: str, settings: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes that a setting may be, by name; the setting may be one of a class, as in
    ``model.optimizer``."""
    if path in settings:
        hint = hint_of(settings[path])
    else:
        group, _, leaf = path.rpartition(".")
        owners = _known_classes(group, settings).values() if group else ()
        hints = (hint_of(own[leaf]) for own in map(settings_of, owners) if leaf in own)
        hint = next(hints, None)
    return {cls.__name__: cls for member in _classes(hint) for cls in concrete_classes(member)}


def _classes(hint: Any) -> Iterator[type]:
    """Yield the classes that a type names, those inside of lists and unions too."""
    for member in members(hint):
        if (
            inspect.isclass(member)
            and not getattr(member, "__args__", ())
            and member.__module__ != "builtins"
        ):
            yield member
        else:
            parts = getattr(member, "__args__", ())
            # a function, such as one that makes an optimiser, may be the class that it returns
            parts = parts[-1:] if get_origin(member) is Callable else parts
            yield from (cls for part in parts for cls in _classes(part))


def _class_lines(path: str, cls: type) -> Iterator[str]:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    yield f"--{path} {cls.__name__}"
    yield from textwrap.wrap(_first_paragraph(cls), width)
    for name, action in settings_of(cls).items():
        if "." in name or (
            name == "optimizer" and action.required
        ):  # a scheduler's, which is given
            continue
        default = (
            ""
            if action.default == "==SUPPRESS==" or action.required
            else f"; default {_shown(action.default)}"
        )
        rule = type_in_words(hint_of(action)) if hint_of(action) is not None else "any"
        if default.endswith(" null"):  # which says that it may be
            rule = rule.removesuffix(" or null").removeprefix("null or ")
        yield from textwrap.wrap(
            f"--{path}.{name}  {rule}{default}",
            width,
            initial_indent="  ",
            subsequent_indent="      ",
        )
        help = action.help if isinstance(action.help, str) else ""
        text = " ".join(help.replace("%%", "%").split())
        yield from textwrap.wrap(text, width, initial_indent="      ", subsequent_indent="      ")


def _choice_lines(path: str, known: Mapping[str, type]) -> Iterator[str]:
    by_kind = sorted((getattr(cls, "kind", ""), name) for name, cls in known.items())
    for kind, group in groupby(by_kind, key=itemgetter(0)):
        if kind:
            yield f"{kind}:"
        for _, name in group:
            line = f"{'  ' * bool(kind)}{name:<24}"
            yield f"{line} {textwrap.shorten(_first_paragraph(known[name]), 134, placeholder=' ...')}"
    yield f"--{path}.help NAME shows the settings of one of them."


def _first_paragraph(cls: type) -> str:
    """Return it as plain text: roles of a reference become the names that they show."""
    text = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    return re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"\1", text).replace("``", "")


def _shown(default: Any) -> str:
    if isinstance(default, bool | None):
        return {True: "true", False: "false", None: "null"}[default]
    if isinstance(default, int | float | str | list | tuple | dict):
        return str(default)
    return getattr(default, "__qualname__", type(default).__name__)
