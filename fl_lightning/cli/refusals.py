"""Refusals of settings: what was given; the rule; what to write instead.

They are made of plain descriptions of the settings, so that a slip can be refused without importing
torch. ``messages.py`` makes them of what the parser complains about, ``early.py`` before there is a
parser.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.configs import beside_class_path, entry_of, variable_of
from fl_lightning.cli.flags import flags_in
from fl_lightning.config.constraints import Constraint
from fl_lightning.config.documents import load_yaml
from fl_lightning.config.near_names import (
    EPOCH_NAMES,
    EPOCHS,
    FOREIGN_NAMES,
    MOST_LISTED,
    listed,
    nearest,
    short_name,
)
from fl_lightning.errors import InputError

FROM_DATA = {"num_classes", "image_size"}  # arguments that users try to set and the data determines


@dataclass(frozen=True)
class Setting:
    """What a refusal says about one setting.

    Args:
        words: the values that its type allows, in words; None for a setting without a type.
        example: a valid value.
        choices: the names that may be written, of classes and literals.
        is_list: whether it takes a list of them.
        is_group: whether it is a group of settings, such as ``trainer``.
        has_example: whether ``example`` is the default, or a value that is of no particular choice.
        takes: its type for the check before torch is imported, one entry for each member of a
            union; see ``early.py``.
        required: whether a class cannot be built without it.
        default_class: the class path that it has if none is given; empty if it has none.
        constraint: what its values may be beside their type; None for whatever they are.
    """

    words: str | None
    example: str
    choices: tuple[str, ...] = ()
    is_list: bool = False
    is_group: bool = False
    has_example: bool = True
    takes: tuple[Any, ...] = ()
    required: bool = False
    default_class: str = ""
    constraint: Constraint | None = None


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
        """Return the value of the last ``--path VALUE`` or ``--path=VALUE``; None if there is
        none."""
        value = None
        for name, given in flags_in(self.args):
            if short_name(name.rstrip("+")) == f"--{path}":
                value = given
        return value

    def flag_below(self, path: str, value: str) -> str | None:
        """Return the flag that gives a setting inside of ``path`` this value, as
        ``--path.init_args.KEY``."""
        for name, given in flags_in(self.args):
            if name.startswith(f"--{path}.") and given == value:
                return name
        return None

    def source_of(self, document: str) -> str:
        """Return where a YAML text was given, shortened: ``--flag VALUE`` or an environment
        variable.

        The flag's value may be the text or name a file with it. If the text is found nowhere, the
        beginning of the text is returned.
        """
        for name, value in flags_in(self.args):
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
        """Return the environment variable that gives a setting this value, alone or with its
        group."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            name = variable_of(".".join(parts[:length]))
            if name in os.environ and (
                os.environ[name] == value or (length < len(parts) and value in os.environ[name])
            ):
                return name if length == len(parts) or not self.in_file(path) else None
        return None

    def beside_class_path(self) -> tuple[str, str] | None:
        """Return the path and the key of the first wrong key beside a ``class_path``; None without
        one."""
        return next(
            (found for text in self.texts.values() for found in beside_class_path(load_yaml(text))),
            None,
        )

    def in_file(self, path: str, value: str | None = None) -> str:
        """Return ``" (FILE, line N)"`` for the last file that gives the setting this value, or else
        for the last that has the setting; empty if none has it."""
        entries = [(file, entry_of(path, text)) for file, text in self.texts.items()]
        found = [(file, *entry) for file, entry in entries if entry]
        alike = [one for one in found if value is not None and _is_written(value, one[2])]
        return next((f" ({file}, line {line})" for file, line, _ in reversed(alike or found)), "")


def _is_written(value: str, text: str) -> bool:
    """Return whether a file's text gives the value, as 1e2 gives 100.0."""
    with suppress(ValueError):
        return float(value) == float(text)
    return value == text


def _shortened(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:60]}..."


def intended_setting(name: str, valid: Iterable[str]) -> str | None:
    """Return the setting that ``name`` probably means; None if there is no such setting.

    It is what other programs call so or one with the same last part, of the same group if there is
    one, or the setting of a group whose own group was left out, or else the nearest name.

    >>> intended_setting("trainer.name", ["data.name", "trainer.run_name"])
    'trainer.run_name'
    >>> intended_setting("trainer.gpus", ["trainer.tags"])
    'trainer.devices'
    >>> intended_setting("federation.rounds", ["trainer.rounds"])
    'trainer.max_rounds'
    >>> intended_setting("batch_size", ["data.batch_size", "data"])
    'data.batch_size'
    >>> intended_setting("partition.beta", ["data", "data.beta", "data.partition"])
    'data.partition.beta'
    """
    valid = list(valid)
    leaf = name.rpartition(".")[2]
    head, dot, rest = name.partition(".")
    if leaf in EPOCH_NAMES:
        return EPOCHS.format(rounds="trainer.max_rounds", epochs="--trainer.local_epochs")
    same = [option for option in valid if option.rpartition(".")[2] == leaf]
    alike = [*filter(None, [FOREIGN_NAMES.get(name), FOREIGN_NAMES.get(leaf)]), *same]
    of_group = [option for option in alike if option.startswith(f"{head}.")]
    inner = [f"{option}.{rest}" for option in valid if dot and option.endswith(f".{head}")]
    return next(iter(of_group or inner or alike), None) or nearest(name, valid)


def unknown_flag(token: str, settings: Iterable[str]) -> InputError:
    """Return the refusal of a word of the command line that is no flag.

    Args:
        token: the word, such as ``--trainer.max_round``.
        settings: the dotted names of all settings, those of classes that may be named too.
    """
    name, equals, value = token.partition("=")
    if name.lstrip("-") in WORDS:
        return InputError(name, "it is no flag", "write its values as words after the command")
    near = intended_setting(name.lstrip("-").rstrip("+"), settings)
    if not name.startswith("-"):
        instead = f"write --config {token} if it is a configuration file"
        if equals:
            instead = f"write --{near} {value}" if near else "see --help for all of them"
        return InputError(token, "settings are given as --name value", instead)
    instead = f"write --{near}" if near else "see --help for all of them"
    return InputError(name, "there is no such flag", instead)


def without_value(flag: str, setting: Setting | None) -> InputError:
    """Return the refusal of a flag at the end of the command line that needs a value."""
    example = "FILE" if flag == "--config" else "VALUE" if setting is None else setting.example
    return InputError(f"{flag} without a value", "it needs one", f"write {flag} {example}")


def not_given(path: str, setting: Setting | None) -> InputError:
    """Return the refusal of a call without a required setting."""
    example = "VALUE" if setting is None else setting.example
    if path in WORDS:
        return InputError(
            f"no {path} given", "they are required", "write them as words after the command"
        )
    if path == "model":
        # of check and rank, which build no run
        is_text = setting is not None and setting.words == "text"
        more = (
            ", or the import path of yours" if is_text else " or --config configs/kd_default.yaml"
        )
        example = f"FedAvg{more}"
    example = "FILE" if path == "config" else example
    return InputError(f"no {path} given", "it is required", f"write --{path} {example}")


def unknown_key(
    prefix: str,
    name: str,
    owner: str,
    own: Iterable[str],
    settings: Iterable[str],
    given: UserInput,
) -> InputError:
    """Return the refusal of a key that a class or the whole configuration does not have.

    Args:
        prefix: the dotted setting that the class is given for; empty for the configuration.
        name: the key, dotted from there on.
        owner: the name of the class; empty if there is none.
        own: the settings of the class.
        settings: the dotted names of all settings.
        given: the command line and the files.
    """
    path = ".".join(filter(None, [prefix, name]))
    leaf = name.rpartition(".")[2]
    flag_value = given.flag_value(path)
    shown = f"--{path} {flag_value}" if flag_value is not None else f"{path}{given.in_file(path)}"
    if leaf in FROM_DATA and path.startswith("model"):
        return InputError(
            shown,
            f"{leaf} comes from the data",
            "leave it out and choose the data with --data.dataset",
        )
    if leaf == "class_path" and (found := given.beside_class_path()):
        group, extra = found
        return InputError(
            f"{group}.{extra}{given.in_file(f'{group}.{extra}')}",
            "beside class_path stands init_args alone",
            f"write {extra} under init_args",
        )
    valid = list(() if owner in BASES else own if owner else settings)
    near = nearest(name, valid) if owner else intended_setting(name, valid)
    rule = f"{owner} has no setting {leaf}" if owner else "there is no such setting"
    if prefix == "model" and "network" not in own:
        return InputError(shown, rule, CLOSED)
    if near is not None and owner:
        near = f"{prefix}.{near}"
    foreign = FOREIGN_NAMES.get(path) or FOREIGN_NAMES.get(leaf, path)
    if near is None and foreign != path and (not owner or foreign.startswith(f"{prefix}.")):
        near = foreign
    if near is None:
        names = sorted(option for option in valid if not owner or "." not in option)
        # so far it is a base, which has no settings
        before = f"name the class of {prefix} before it"
        return InputError(shown, rule, f"write {listed(names)}" if names else before)
    instead = f"--{near} {flag_value}".strip() if flag_value is not None else near
    return InputError(shown, rule, f"write {instead}")


WORDS = {command.words for command in COMMANDS.values() if command.words}
"""What commands take as words that are no flags."""
CLOSED = "end its constructor with super().__init__(..., **settings), which gives it those of every method"
BASES = ("Optimizer", "LRScheduler")
"""Bases of torch's whose arguments nobody sets, since a class of theirs has to be named."""
LOGGER = "MLFlowLogger"
"""The class that ``trainer.logger: true`` stands for."""


def bad_value(
    path: str,
    setting: Setting | None,
    value: str,
    reason: str,
    settings: Mapping[str, Setting | None],
    given: UserInput,
    near: str | None = None,
) -> InputError:
    """Return the refusal of a value that is not of its setting's type.

    Args:
        path: the dotted setting.
        setting: what is known of it.
        value: what a file or the environment gives it; a flag's value is taken from the command
            line.
        reason: what is wrong with it beside its type; empty for nothing.
        settings: the settings of the parser, by dotted name.
        given: the command line and the files.
        near: the import path that was probably meant; None: the nearest choice is looked for.
    """
    flagged = given.flag_value(path)
    value = flagged if flagged is not None else value
    short = _shortened(value)
    below = given.flag_below(path, value) if flagged is None else None
    if below is not None:
        known = {"network": "LlamaTiny", "logger": LOGGER}.get(path.rpartition(".")[2], "THE_CLASS")
        has = "no class" if known == LOGGER else "a name"
        return InputError(
            f"{below} {short}",
            f"{path} is {has} here{given.in_file(path)}, and only a class has settings",
            f"write --{path} {known} {below} {short}",
        )
    variable = given.variable(path, value) if flagged is None else None
    shown = (
        f"--{path} {short or repr(short)}"
        if flagged is not None
        else f"{path}: {short}{given.in_file(path, value)}"
    )
    if variable:
        shown = f"environment variable {variable}={_shortened(os.environ[variable])}"
    if setting is not None and setting.is_group:
        inner = next(name for name in settings if name.startswith(f"{path}."))
        example = getattr(settings[inner], "example", "VALUE")
        return InputError(shown, f"{path} is a group of settings", f"write --{inner} {example}")
    group, _, leaf = path.rpartition(".")
    foreign = FOREIGN_NAMES.get(leaf, path)
    if (
        flagged is not None
        and value.isdigit()
        and foreign != path
        and foreign.startswith(f"{group}.")
    ):
        return InputError(shown, f"{path} is no number", f"write --{foreign} {value}")
    setting = setting or Setting(None, "VALUE")
    near = near or _near_choice(value, setting)
    instead = near or setting.example
    rule = f"it must be {setting.words}" if setting.words is not None else "it is not a valid value"
    if near is None and setting.choices and not setting.has_example and _names_a_class(value):
        instead = _listed_choices(path, setting, is_flag=flagged is not None)
    elif variable:
        instead = f"[{instead}]" if setting.is_list else instead
        instead = (
            f"{variable}={instead}"
            if variable == variable_of(path)
            else f"{leaf}: {instead} in it"  # of a variable that holds the whole group
        )
    elif flagged is None:
        instead = f"{path}: [{instead}]" if setting.is_list else f"{path}: {instead}"
    else:
        instead = f"--{path}+={instead}" if setting.is_list else f"--{path} {instead}"
    # the value is right, and something else was set inside it
    if near == value and not setting.is_list:
        rule, instead = "a short name has its defaults", "the name of a class to change them"
    return InputError(shown, f"{reason}, and {rule}" if reason else rule, f"write {instead}")


def _near_choice(value: str, setting: Setting) -> str | None:
    """Return the choice nearest to a value, or to the first item of a list that is no choice."""
    items = [value]
    if setting.is_list and value.startswith("["):
        with suppress(yaml.YAMLError):
            items = [item for item in yaml.safe_load(value) if isinstance(item, str)]
    names = [item.rpartition(".")[2] for item in items]
    unknown = next(
        (name for name in names if name not in setting.choices), names[0] if names else ""
    )
    return nearest(unknown, setting.choices)


def _listed_choices(path: str, setting: Setting, *, is_flag: bool) -> str:
    """Return what to write where no choice is near: the setting, and which names there are."""
    if is_flag:
        name = f"--{path}+=NAME" if setting.is_list else f"--{path} NAME"
    else:
        name = f"{path}: [NAME]" if setting.is_list else f"{path}: NAME"
    if len(setting.choices) > MOST_LISTED:
        which = f"one of those that --{path}.help lists"
    elif all(choice in (setting.words or "") for choice in setting.choices):
        which = "one of these names"
    else:
        which = listed(setting.choices)
    own = ", or with the import path of a class of yours" if _takes_class(setting.takes) else ""
    return f"{name} with {which}{own}"


def _takes_class(takes: Iterable[Any]) -> bool:
    """Return whether the types of a setting, or of its items, have a class among them."""
    return any(
        one == "?"
        or (isinstance(one, dict) and ("class" in one or _takes_class(one.get("list", ()))))
        for one in takes
    )


def _names_a_class(value: str) -> bool:
    is_word = value.strip("[]").replace(".", "_").replace(",", "_").replace(" ", "").isidentifier()
    return is_word and value not in ("true", "false")
