"""jsonargparse's error messages, rewritten as one line: what was given; the rule; what to write
instead.

jsonargparse reports nested problems as indented text. This module picks out the keys, the class and
the value. The rule comes from the type of the setting, and the suggestion is the nearest valid
name.
"""

from __future__ import annotations

import re
import sys
from argparse import Action
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from types import NoneType
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.cli.refusals import (
    UserInput,
    bad_value,
    not_given,
    unknown_flag,
    unknown_key,
    without_value,
)
from fl_lightning.cli.types import (
    describe,
    example_of,
    hint_of,
    import_class,
    members,
    settings_of,
    type_in_words,
)
from fl_lightning.config.near_names import nearest
from fl_lightning.errors import InputError

KEY = re.compile(r'Parser key "([^"]+)"')
OWNER = re.compile(r"class_path[ =]'([^']+)'")
COMPLAINT = re.compile(
    r"^ *- (?:Problem with given class_path '[^']+':)?\s*(.+?)(?=\n *- |\n *Given value|\Z)",
    re.MULTILINE | re.DOTALL,
)
UNKNOWN_KEY = re.compile(
    r"Option '(?P<key>[^']+)' is not accepted|"
    r"Group '(?P<group>[^']+)' does not accept option '(?P<option>[^']+)'"
)
UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (\S+)")
NO_VALUE = re.compile(r"argument (?:-c/)?(--\S+): expected")
REQUIRED = re.compile(r"arguments are required: (\S+)")
VALUES = (
    re.compile(r"NestedArg\(key='[^']*', val='?([^')]*)"),
    re.compile(r"dot import path string: (\S+)"),
    re.compile(
        r"Import path (\S+) does not|class, but (\S+) is|"
        r"Problem with given class_path '([^']+)':\s+(?:No module|module)"
    ),
    re.compile(r"(?:Got|Given) value: (.+?)(?:\. Got value.*)?$", re.MULTILINE),
    re.compile(r"base 10: '(.*)'|: (\S+) does not conform|: (\S+) not a number"),
    re.compile(r"Unable to load config '([^']*)'"),
)
REASONS = (
    (
        re.compile(r"No module named '[^']+'|module '[^']+' has no attribute '[^']+'"),
        "it cannot be imported ({})",
    ),
    (re.compile(r"is abstract"), "it {}"),
    (re.compile(r"Multiple subclasses with name"), "several classes have that name"),
)
NO_MAPPING = re.compile(
    r"Namespace\(class_path='(?P<name>[^']+)', init_args=(?!Namespace)(?P<given>.+?)\)?$"
)
ONE_OF_THEM = re.compile(r"to avoid ambiguity: ([\w.]+\w)")
NOT_IN_MODULE = re.compile(r"module '(?P<module>[^']+)' has no attribute '(?P<name>[^']+)'")
UNTYPED = re.compile(r"Parameter '(?P<name>\w+)' from '(?P<owner>[^']+)' does not specify a type")


def explain(
    message: str, parser: ArgumentParser, given: UserInput, flags: Iterable[str] = ()
) -> InputError:
    """Return the error in three parts for a message of jsonargparse.

    Args:
        message: the message.
        parser: the parser that raised it.
        given: the command line and the files that were parsed.
        flags: dotted settings that exist beside the parser's own, those of classes that may be
            named.
    """
    settings = {**dict.fromkeys(flags), **settings_of(parser)}
    if found := UNKNOWN_FLAG.search(message):
        return unknown_flag(found[1], settings)
    if found := UNTYPED.search(message):
        owner = found["owner"].removesuffix(".__init__")
        return InputError(
            f"parameter {found['name']} of {owner} has no type",
            "a setting needs one",
            f"write {found['name']}: int, or what it is",
        )
    keys = [key for key, _ in groupby(KEY.findall(message)) if key != "config"]
    owners = OWNER.findall(message)
    if found := REQUIRED.search(message):
        name = found[1].rstrip(".,")
        path = ".".join([*keys, name])
        return not_given(path, describe(_action_of(name, owners) or settings.get(path)))
    if found := NO_VALUE.search(message):
        flag = found[1].partition("/")[0]
        last = given.args[-1] if given.args else flag
        if last.startswith(f"{flag}."):  # a setting of the class that the flag gives
            return without_value(last, None)
        return without_value(
            last if last == f"{flag}+" else flag, describe(settings.get(flag.lstrip("-")))
        )
    if found := UNKNOWN_KEY.search(message):
        name = found["key"] or f"{found['group']}.{found['option']}"
        return _unknown_key(keys, name, owners, settings, given)
    if keys:
        return _bad_value(keys, owners, message, settings, given)
    return InputError(" ".join(message.split())[:300], "", f"see {parser.prog} --help")


def constructor_message(message: str) -> str:
    """Return what a constructor said, without the text that jsonargparse puts around it.

    For a union, also one within another, that is the first complaint which is not about a type.
    """
    complaints = COMPLAINT.findall(message) if "Union subtypes" in message else []
    of_types = ("Expected a ", "Does not validate against any of the Union subtypes")
    return next((text for text in complaints if not text.startswith(of_types)), message)


def _unknown_key(
    keys: list[str], name: str, owners: list[str], settings: Mapping[str, Any], given: UserInput
) -> InputError:
    owner = import_class(owners[-1]) if owners and keys else None
    own = settings_of(owner) if owner else ()
    return unknown_key(".".join(keys), name, owner.__name__ if owner else "", own, settings, given)


def _bad_value(
    keys: list[str], owners: list[str], message: str, settings: Mapping[str, Any], given: UserInput
) -> InputError:
    path, value = ".".join(keys), _value(message)
    if listed := NO_MAPPING.match(value):
        return InputError(
            f"{path}.init_args: {listed['given']}{given.in_file(path)}",
            f"it is a mapping of the settings of {listed['name']}",
            "write for example init_args: {lr: 0.1}",
        )
    action = _action_of(keys[-1], owners) if len(keys) > 1 else settings.get(path)
    reason = next(
        (
            words.format(found[0])
            for pattern, words in REASONS
            if (found := pattern.search(message))
        ),
        "",
    )
    missing = NOT_IN_MODULE.search(message)
    near = missing and nearest(missing["name"], dir(sys.modules.get(missing["module"])))
    one_of_them = ONE_OF_THEM.search(message)
    described = {
        name: describe(one) for name, one in settings.items() if name.startswith(f"{path}.")
    }
    return bad_value(
        path,
        None if action is None else describe(action),
        value,
        reason,
        described,
        given,
        f"{missing['module']}.{near}" if missing and near else one_of_them and one_of_them[1],
    )


def wrong_nulls(
    config: Namespace, settings: Mapping[str, Action], path: str = ""
) -> Iterator[tuple[str, Action]]:
    """Yield the path and action of every setting that is null against its type.

    jsonargparse accepts null for any setting.
    """
    for name, action in settings.items():
        value = config.get(name)
        hint = hint_of(action)
        if (
            value is None
            and hint not in (None, Any)
            and action.default is not None
            and NoneType not in members(hint)
        ):
            yield f"{path}{name}", action
        for spec in value if isinstance(value, list) else [value]:
            if (
                isinstance(spec, Namespace)
                and "init_args" in spec
                and (cls := import_class(spec.class_path)) is not None
            ):
                yield from wrong_nulls(spec.init_args, settings_of(cls), f"{path}{name}.")


def explain_null(path: str, action: Action, given: UserInput) -> InputError:
    """Return the error in three parts for a setting that is null against its type."""
    rule = f"it must be {type_in_words(hint_of(action))}"
    return InputError(
        f"{path}: null{given.in_file(path, 'null')}", rule, f"write {path}: {example_of(action)}"
    )


def _action_of(name: str, owners: list[str]) -> Action | None:
    """Return the argument ``name`` of the innermost class that has it; None if none has."""
    for owner in map(import_class, reversed(owners)):
        if owner is not None and name in (actions := settings_of(owner)):
            return actions[name]
    return None


def _value(message: str) -> str:
    """Return the value that a message of jsonargparse is about; empty if it names none."""
    for pattern in VALUES:
        if found := pattern.search(message):
            return next(group for group in found.groups() if group is not None)
    return ""
