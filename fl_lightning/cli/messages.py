"""jsonargparse's error messages, rewritten as one line: what was given; the rule; what to write instead.

jsonargparse reports nested problems as indented text. This module picks out the keys, the class and the
value. The rule comes from the type of the setting, and the suggestion is the nearest valid name.
"""

from __future__ import annotations

import os
import re
from argparse import Action
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from fl_lightning.cli.configs import beside_class_path, line_of, variable_of
from fl_lightning.cli.types import (
    FOREIGN_NAMES,
    choices,
    example_of,
    hint_of,
    import_class,
    intended_setting,
    is_list,
    members,
    nearest,
    settings_of,
    type_in_words,
)
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
    (re.compile(r"Multiple subclasses with name [^.]+"), "there are {}"),
)
UNTYPED = re.compile(r"Parameter '(?P<name>\w+)' from '(?P<owner>[^']+)' does not specify a type")
FROM_DATA = {"num_classes", "image_size"}  # arguments that users try to set and the data determines


@dataclass(frozen=True)
class UserInput:
    """The command line and the configuration files of one call.

    Args:
        args: the command line after the command.
        texts: the text of each configuration file, by its path.
    """

    args: list[str]
    texts: Mapping[str, str]

    def flag_value(self, path: str) -> str | None:
        """Return the value of the last ``--path VALUE`` or ``--path=VALUE``; None if there is none."""
        value = None
        for arg, following in zip(self.args, [*self.args[1:], ""], strict=False):
            name, equals, rest = arg.partition("=")
            if name.rstrip("+").replace(".init_args", "").removesuffix(".class_path") == f"--{path}":
                value = rest if equals else following
        return value

    def flag_below(self, path: str, value: str) -> str | None:
        """Return the flag that gives a setting inside of ``path`` this value, as ``--path.init_args.KEY``."""
        for arg, following in zip(self.args, [*self.args[1:], ""], strict=False):
            name, equals, rest = arg.partition("=")
            if name.startswith(f"--{path}.") and (rest if equals else following) == value:
                return name
        return None

    def source_of(self, document: str) -> str:
        """Return where a YAML text was given, shortened: ``--flag VALUE`` or an environment variable.

        The flag's value may be the text or name a file with it. If the text is found nowhere, the beginning
        of the text is returned.
        """
        for arg, following in zip(self.args, [*self.args[1:], ""], strict=False):
            name, equals, rest = arg.partition("=")
            value = rest if equals else following
            with suppress(OSError, ValueError):  # a value that is no path
                if value == document or Path(value).read_text() == document:
                    return f"{name} {_shortened(value)}"
        variable = next(
            (
                f"environment variable {name}={value}"
                for name, value in os.environ.items()
                if value == document
            ),
            document,
        )
        return _shortened(variable)

    def variable(self, path: str, value: str) -> str | None:
        """Return the environment variable that gives a setting this value, alone or with its group."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            name = variable_of(".".join(parts[:length]))
            if name in os.environ and (
                os.environ[name] == value or (length < len(parts) and value in os.environ[name])
            ):
                return name if length == len(parts) or not self.in_file(path) else None
        return None

    @staticmethod
    def is_whole(variable: str, path: str) -> bool:
        """Return whether an environment variable holds the setting and not a group of settings."""
        return variable == variable_of(path)

    def beside_class_path(self) -> tuple[str, str] | None:
        """Return the path and the key of the first wrong key beside a ``class_path``; None without one."""
        return next(
            (found for text in self.texts.values() for found in beside_class_path(yaml.safe_load(text))), None
        )

    def in_file(self, path: str) -> str:
        """Return ``" (FILE, line N)"`` for the last file that has the setting; empty if none has it."""
        for file, text in reversed(list(self.texts.items())):
            if line := line_of(path, text):
                return f" ({file}, line {line})"
        return ""


def _shortened(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:60]}..."


def explain(message: str, parser: ArgumentParser, given: UserInput, flags: Iterable[str] = ()) -> InputError:
    """Return the error in three parts for a message of jsonargparse.

    Args:
        message: the message.
        parser: the parser that raised it.
        given: the command line and the files that were parsed.
        flags: dotted settings that exist beside the parser's own, those of classes that may be named.
    """
    settings = {**dict.fromkeys(flags), **settings_of(parser)}
    if found := UNKNOWN_FLAG.search(message):
        return _unknown_flag(found[1], settings)
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
        action = _action_of(name, owners) or settings.get(path)
        example = " or --config configs/kd_default.yaml" if path == "model" else ""
        return InputError(
            f"no {path} given", "it is required", f"write --{path} {example_of(action)}{example}"
        )
    if found := NO_VALUE.search(message):
        example = (
            "FILE" if found[1] == "--config" else example_of(settings.get(found[1].lstrip("-").rstrip("+")))
        )
        return InputError(f"{found[1]} without a value", "it needs one", f"write {found[1]} {example}")
    if found := UNKNOWN_KEY.search(message):
        name = found["key"] or f"{found['group']}.{found['option']}"
        return _unknown_key(keys, name, owners, settings, given)
    if keys:
        return _bad_value(keys, owners, message, settings, given)
    return InputError(" ".join(message.split())[:300], "", f"see {parser.prog} --help")


def constructor_message(message: str) -> str:
    """Return what a constructor said, without the text that jsonargparse puts around it.

    For a union that is the first complaint which is not about a type.
    """
    complaints = COMPLAINT.findall(message) if "Union subtypes" in message else []
    return next((text for text in complaints if not text.startswith("Expected a ")), message)


def _unknown_flag(token: str, settings: Mapping[str, Any]) -> InputError:
    flag = token.partition("=")[0]
    if not flag.startswith("-"):
        return InputError(
            token,
            "settings are given as --name value",
            f"write --config {token} if it is a configuration file",
        )
    near = intended_setting(flag.lstrip("-").rstrip("+"), settings)
    instead = f"write --{near}" if near else "see --help for all of them"
    return InputError(flag, "there is no such flag", instead)


def _unknown_key(
    keys: list[str], name: str, owners: list[str], settings: Mapping[str, Any], given: UserInput
) -> InputError:
    path = ".".join([*keys, name])
    leaf = name.rpartition(".")[2]
    flagged = given.flag_value(path) is not None
    shown = f"--{path} {given.flag_value(path)}" if flagged else f"{path}{given.in_file(path)}"
    if leaf in FROM_DATA and path.startswith("model"):
        return InputError(
            shown, f"{leaf} comes from the data", "leave it out and choose the data with --data.dataset"
        )
    if leaf == "class_path" and (found := given.beside_class_path()):
        group, extra = found
        return InputError(
            f"{group}.{extra}{given.in_file(f'{group}.{extra}')}",
            "beside class_path stands init_args alone",
            f"write {extra} under init_args",
        )
    owner = import_class(owners[-1]) if owners and keys else None
    valid = settings_of(owner) if owner else settings
    near = nearest(name, valid) if owner else intended_setting(name, valid)
    rule = f"{owner.__name__} has no setting {leaf}" if owner else "there is no such setting"
    if near is None and (ours := FOREIGN_NAMES.get(path) or FOREIGN_NAMES.get(leaf)) is not None:
        near, owner = ours, None
    if near is None:
        names = [option for option in valid if not owner or "." not in option]
        return InputError(shown, rule, f"write one of {', '.join(sorted(names)[:20])}")
    near = ".".join([*keys, near]) if owner else near
    instead = f"--{near} {given.flag_value(path)}".strip() if flagged else near
    return InputError(shown, rule, f"write {instead}")


def _bad_value(
    keys: list[str], owners: list[str], message: str, settings: Mapping[str, Any], given: UserInput
) -> InputError:
    path = ".".join(keys)
    action = _action_of(keys[-1], owners) if len(keys) > 1 else settings.get(path)
    hint = hint_of(action)
    flagged = given.flag_value(path)
    value = flagged if flagged is not None else _value(message)
    short = _shortened(value)
    below = given.flag_below(path, value) if flagged is None else None
    if below is not None:
        known = "LlamaTiny" if keys[-1] == "network" else "THE_CLASS"
        return InputError(
            f"{below} {short}",
            f"{path} is a name here{given.in_file(path)}, and only a class has settings",
            f"write --{path} {known} {below} {short}",
        )
    variable = given.variable(path, value) if flagged is None else None
    shown = (
        f"--{path} {short or repr(short)}" if flagged is not None else f"{path}: {short}{given.in_file(path)}"
    )
    if variable:
        shown = f"environment variable {variable}={_shortened(os.environ[variable])}"
    if action is not None and action.metavar == "CONFIG":  # a group, such as trainer
        inner = next(name for name in settings if name.startswith(f"{path}."))
        return InputError(
            shown, f"{path} is a group of settings", f"write --{inner} {example_of(settings[inner])}"
        )
    reason = next(
        (words.format(found[0]) for pattern, words in REASONS if (found := pattern.search(message))), ""
    )
    near = nearest(value.rpartition(".")[2], choices(hint))
    instead = near or example_of(action)
    if near is None and is_list(hint) and _names_a_class(value):
        instead = f"--{path}+=NAME with one of these names, or with the import path of a class of yours"
    elif variable:
        instead = (
            f"{variable}={instead}"
            if given.is_whole(variable, path)
            else f"{path.rpartition('.')[2]}: {instead} in it"
        )
    elif flagged is None:
        instead = f"{path}: [{instead}]" if is_list(hint) else f"{path}: {instead}"
    else:
        instead = f"--{path}+={instead}" if is_list(hint) else f"--{path} {instead}"
    rule = f"it must be {type_in_words(hint)}" if hint is not None else "it is not a valid value"
    return InputError(shown, f"{reason}, and {rule}" if reason else rule, f"write {instead}")


def _names_a_class(value: str) -> bool:
    return value.replace(".", "_").isidentifier()


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
    return InputError(f"{path}: null{given.in_file(path)}", rule, f"write {path}: {example_of(action)}")


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
