"""jsonargparse's complaints, rewritten as one line in three parts: what was given; the rule; what to write instead.

jsonargparse reports nested problems as indented text. What is needed of it (keys, class, value) is picked out here, the rule
comes from the type of the setting, and the suggestion is the nearest valid name.
"""

from __future__ import annotations

import inspect
import re
from argparse import Action
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt

from fl_lightning.cli_input import line_of

KEY = re.compile(r'Parser key "([^"]+)"')
OWNER = re.compile(r"class_path[ =]'([^']+)'")
COMPLAINT = re.compile(
    r"^ *- (?:Problem with given class_path '[^']+':)?\s*(.+?)(?=\n *- |\n *Given value|\Z)", re.MULTILINE | re.DOTALL
)
UNKNOWN_KEY = re.compile(
    r"Option '(?P<key>[^']+)' is not accepted|Group '(?P<group>[^']+)' does not accept option '(?P<option>[^']+)'"
)
UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (\S+)")
NO_VALUE = re.compile(r"argument (?:-c/)?(--\S+): expected")
REQUIRED = re.compile(r"arguments are required: (\S+)")
VALUES = (
    re.compile(r"NestedArg\(key='[^']*', val='?([^')]*)"),
    re.compile(r"dot import path string: (\S+)"),
    re.compile(r"Import path (\S+) does not|class, but (\S+) is|Problem with given class_path '([^']+)':\s+(?:No module|module)"),
    re.compile(r"(?:Got|Given) value: (.+?)(?:\. Got value.*)?$", re.MULTILINE),
    re.compile(r"base 10: '(.*)'|: (\S+) does not conform|: (\S+) not a number"),
    re.compile(r"Unable to load config '([^']*)'"),
)
REASONS = (
    (re.compile(r"No module named '[^']+'|module '[^']+' has no attribute '[^']+'"), "it cannot be imported ({})"),
    (re.compile(r"is abstract"), "it {}"),
    (re.compile(r"Multiple subclasses with name [^.]+"), "there are {}"),
)
WORDS: dict[Any, str] = {
    int: "an int",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    NonNegativeInt: "an int >= 0",
}
EXAMPLES: dict[Any, str] = {int: "1", float: "0.5", bool: "true", NonNegativeInt: "0"}
MANY = 20  # more classes than this are not listed
FROM_DATA = {"num_classes", "image_size"}


@dataclass(frozen=True)
class Given:
    """What the user gave on this call.

    Args:
        args: the command line after the command.
        texts: path and text of the configuration files.
    """

    args: list[str]
    texts: Mapping[str, str]

    def flag_value(self, path: str) -> str | None:
        """The value of the last ``--path VALUE`` or ``--path=VALUE`` of the command line."""
        value = None
        for arg, following in zip(self.args, [*self.args[1:], ""], strict=True):
            name, equals, rest = arg.partition("=")
            if name.rstrip("+").replace(".init_args", "").removesuffix(".class_path") == f"--{path}":
                value = rest if equals else following
        return value

    def in_file(self, token: str) -> str:
        """``" (FILE, line N)"`` of the last file that says ``token``, else nothing."""
        for path, text in reversed(self.texts.items()):
            line = line_of(token, text)
            if line is not None:
                return f" ({path}, line {line})"
        return ""


def explain(message: str, parser: ArgumentParser, given: Given, flags: Iterable[str] = ()) -> str:
    """The one line for jsonargparse's ``message``.

    Args:
        flags: settings that exist beside the parser's own: those of the classes that may be named.
    """
    settings = {**dict.fromkeys(flags), **settings_of(parser)}
    if found := UNKNOWN_FLAG.search(message):
        return _unknown_flag(found[1], settings)
    keys = [key for key, _ in groupby(KEY.findall(message)) if key != "config"]
    owners = OWNER.findall(message)
    if found := REQUIRED.search(message):
        path = ".".join([*keys, found[1]])
        action = _action_of(found[1], owners) or settings.get(path)
        example = " or --config configs/kd_default.yaml" if path == "model" else ""
        return f"no {path} given; it is required; write --{path} {_example(action)}{example}"
    if found := NO_VALUE.search(message):
        example = "FILE" if found[1] == "--config" else _example(settings.get(found[1].lstrip("-").rstrip("+")))
        return f"{found[1]} without a value; it needs one; write {found[1]} {example}"
    if found := UNKNOWN_KEY.search(message):
        name = found["key"] or f"{found['group']}.{found['option']}"
        return _unknown_key(keys, name, owners, settings, given)
    if keys:
        return _bad_value(keys, owners, message, settings, given)
    return f"{' '.join(message.split())[:300]}; see {parser.prog} --help"


def condense(message: str) -> str:
    """What a constructor said, without jsonargparse's frame around it: the first complaint that is not about another type."""
    complaints = COMPLAINT.findall(message) if "Union subtypes" in message else []
    return next((text for text in complaints if not text.startswith("Expected a ")), message)


def settings_of(target: ArgumentParser | Callable[..., Any]) -> dict[str, Action]:
    """Name and action of every setting of a parser, or of every argument of a class."""
    if not isinstance(target, ArgumentParser):
        parser = ArgumentParser(exit_on_error=False)
        add = parser.add_class_arguments if inspect.isclass(target) else parser.add_function_arguments
        add(target, fail_untyped=False)
        return {name: action for name, action in settings_of(parser).items() if name != "params"}
    return {action.dest: action for action in target._actions if re.fullmatch(r"(?!help$)[\w.]+(?<!\.help)", action.dest)}


def _unknown_flag(token: str, settings: Mapping[str, Any]) -> str:
    flag = token.partition("=")[0]
    if not flag.startswith("-"):
        return f"{token}; settings are given as --name value; write --config {token} if it is a configuration file"
    near = nearest(flag.lstrip("-").rstrip("+"), settings)
    return f"{flag}; there is no such flag; " + (f"write --{near}" if near else "see --help for all of them")


def _unknown_key(keys: list[str], name: str, owners: list[str], settings: Mapping[str, Any], given: Given) -> str:
    path = ".".join([*keys, name])
    leaf = name.rpartition(".")[2]
    flagged = given.flag_value(path) is not None
    shown = (
        f"--{path} {given.flag_value(path)}"
        if flagged
        else f"{path}{given.in_file(name if owners else _mistaken(name, settings))}"
    )
    if leaf in FROM_DATA and path.startswith("model"):
        return f"{shown}; {leaf} comes from the data; leave it out and choose the data with --data.dataset"
    owner = _import(owners[-1]) if owners and keys else None
    valid = settings_of(owner) if owner else settings
    near = nearest(name, valid)
    rule = f"{owner.__name__} has no setting {leaf}" if owner else "there is no such setting"
    if near is None:
        names = [option for option in valid if not owner or "." not in option]
        return f"{shown}; {rule}; write one of {', '.join(sorted(names)[:20])}"
    near = ".".join([*keys, near]) if owner else near
    return f"{shown}; {rule}; write " + (f"--{near} {given.flag_value(path)}".strip() if flagged else near)


def _mistaken(name: str, settings: Iterable[str]) -> str:
    """The part of a dotted name that is wrong: the group, if there is none of that name, else the last part."""
    group = name.partition(".")[0]
    return name.rpartition(".")[2] if any(setting.startswith(f"{group}.") for setting in settings) else group


def _bad_value(keys: list[str], owners: list[str], message: str, settings: Mapping[str, Any], given: Given) -> str:
    path = ".".join(keys)
    action = _action_of(keys[-1], owners) if len(keys) > 1 else settings.get(path)
    hint = getattr(action, "_typehint", None) or getattr(action, "type", None)
    flagged = given.flag_value(path)
    value = flagged if flagged is not None else _value(message)
    line = given.in_file(value) or given.in_file(value.lower()) or given.in_file(keys[-1].rpartition(".")[2])
    shown = f"--{path} {value or repr(value)}" if flagged is not None else f"{path}: {value}{line}"
    if action is not None and action.metavar == "CONFIG":  # a group, such as trainer
        inner = next(name for name in settings if name.startswith(f"{path}."))
        return f"{shown}; {path} is a group of settings; write --{inner} {_example(settings[inner])}"
    reason = next((words.format(found[0]) for pattern, words in REASONS if (found := pattern.search(message))), "")
    near = nearest(value.rpartition(".")[2], choices(hint))
    instead = near or _example(action)
    if flagged is None:
        instead = f"{path}: [{instead}]" if is_list(hint) else f"{path}: {instead}"
    else:
        instead = f"--{path}+={instead}" if is_list(hint) else f"--{path} {instead}"
    rule = f"it must be {describe(hint)}" if hint is not None else "it is not a valid value"
    return f"{shown}; {reason + ', and ' if reason else ''}{rule}; write {instead}"


def _action_of(name: str, owners: list[str]) -> Action | None:
    """The argument ``name`` of the innermost class that has it."""
    for owner in map(_import, reversed(owners)):
        if owner is not None and name in (actions := settings_of(owner)):
            return actions[name]
    return None


def _value(message: str) -> str:
    for pattern in VALUES:
        if found := pattern.search(message):
            return next(group for group in found.groups() if group is not None)
    return ""


def _import(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(__import__(module, fromlist=[name]), name)
    except (ImportError, AttributeError, ValueError):
        return None


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to ``name``, compared whole, then by the last part of dotted names.

    >>> nearest("max_round", ["trainer.max_rounds", "seed_everything"])
    'trainer.max_rounds'
    """
    valid = list(valid)
    lowered = {option.lower(): option for option in valid}
    if near := get_close_matches(name.lower(), lowered, n=1, cutoff=0.75):
        return lowered[near[0]]
    leaves = {option.rpartition(".")[2].lower(): option for option in reversed(valid)}
    near = get_close_matches(name.rpartition(".")[2].lower(), leaves, n=1)
    return leaves[near[0]] if near else None


def members(hint: Any) -> Iterator[Any]:
    """The members of a union, flattened, or the type itself."""
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from members(member)
    else:
        yield hint


def is_list(hint: Any) -> bool:
    return {get_origin(member) for member in members(hint) if member is not NoneType} == {list}


def _class_of(hint: Any) -> type | None:
    """The class whose subclasses may be named: ``C``, ``list[C]`` or ``Callable[..., C]``."""
    if get_origin(hint) is list:
        hint = get_args(hint)[0]
    elif get_origin(hint) is not None and get_args(hint) and get_origin(hint) is not Literal:
        hint = get_args(hint)[-1]
    return hint if inspect.isclass(hint) and hint not in WORDS else None


def choices(hint: Any) -> list[str]:
    """Names that may be written for a setting: literals and short class names."""
    names: dict[str, None] = {}
    for member in members(hint):
        if get_origin(member) is Literal:
            names.update(dict.fromkeys(map(str, get_args(member))))
        elif (cls := _class_of(member)) is not None:
            subclasses = {c.__name__ for c in concrete(cls) if c is not cls}
            names.update(dict.fromkeys(sorted(subclasses) or [cls.__name__]))
    return list(names)


def concrete(cls: type) -> Iterator[type]:
    """``cls`` and its subclasses, those that can be built."""
    if not inspect.isabstract(cls) and not cls.__name__.startswith("_"):
        yield cls
    for subclass in cls.__subclasses__():
        yield from concrete(subclass)


def describe(hint: Any) -> str:
    """The rule of a type in words.

    >>> describe(Literal["a", "b"] | None)
    'a, b or null'
    """
    words: dict[str, None] = {}
    for member in sorted(members(hint), key=lambda member: get_origin(member) is list):
        cls = _class_of(member)
        names = choices(member)
        if len(names) > MANY and cls is not None:
            names = [f"a class of {cls.__name__}"]
        if get_origin(member) is list:
            names = [f"a list of {', '.join(names) or describe(get_args(member)[0])}"]
        words.update(dict.fromkeys([WORDS[member]] if member in WORDS else names or [getattr(member, "__name__", str(member))]))
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _example(action: Any) -> str:
    """Something valid to write for a setting: its default, else an example of its type."""
    default = getattr(action, "default", None)
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float | str) and default != "==SUPPRESS==":
        return str(default)
    hint = getattr(action, "_typehint", None) or getattr(action, "type", None)
    for member in members(hint):
        if example := EXAMPLES.get(member) or next(iter(choices(member)), None):
            return example
    return "VALUE"
