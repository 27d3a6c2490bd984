"""Refuse slips of a command line before torch is imported, in the parser's own words.

Files are read as the parser reads them. Flags and keys are checked against the description of the
command that an earlier call has left. A refusal is raised only if the parser would refuse with the
same text. Whatever is not certain, such as a class of the user's or a value that YAML could read in
two ways, ends the check, and the parser decides.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.callbacks_module import find_theirs
from fl_lightning.cli.commands import COMMANDS, TRACEBACK_VARIABLE
from fl_lightning.cli.configs import (
    ENV_PREFIX,
    check_encoding,
    check_kind,
    named_last,
    read_configs,
    with_bare_flags,
    with_config_of_run,
)
from fl_lightning.cli.description import Description, read_description
from fl_lightning.cli.plain_values import (
    CHECKS,
    INT,
    WORD,
    Unsure,
    Verdict,
    is_number,
    is_word,
    of_text,
    of_yaml,
    plain_value,
    unsure,
)
from fl_lightning.cli.refusals import (
    Setting,
    UserInput,
    bad_value,
    not_given,
    unknown_flag,
    unknown_key,
    without_value,
)
from fl_lightning.cli.uses import check_uses
from fl_lightning.config.constraints import Constraint
from fl_lightning.config.packaged import with_found_configs
from fl_lightning.errors import InputError
from fl_lightning.run.paths import require_run

FLAG = re.compile(r"--[A-Za-z_][\w.-]*\+?")


def refuse_early(command: str, args: list[str]) -> None:
    """Refuse a command line that the parser would refuse, if that can be told without importing
    torch.

    Raises:
        InputError: it is refused, with the parser's message.
    """
    if "torch" in sys.modules:
        return
    refuse_by(read_description(command), command, args)


def refuse_by(description: Description | None, command: str, args: list[str]) -> None:
    """Refuse a command line by what is known of the command.

    Args:
        description: what the command takes; None where only its files can be checked.
        command: its name.
        args: the command line after it.

    Raises:
        InputError: it is refused, with the parser's message.
    """
    from_environment = {name for name in os.environ if name.startswith(ENV_PREFIX)} - {
        TRACEBACK_VARIABLE
    }
    if (
        from_environment
        or find_theirs() is not None
        or (description is None and COMMANDS[command].extra)
    ):
        return
    check_encoding(args)
    if any(arg.partition("=")[0].endswith(".help") for arg in args):
        return
    given = with_found_configs(with_config_of_run(command, args))
    texts = read_configs(given, COMMANDS[command].usual_config)
    if (
        COMMANDS[command].function is None
        or COMMANDS[command].settings is not None
        or command == "compare"
    ):
        check_kind(texts, command)
    if command == "track" and len(given) == 1 and not given[0].startswith("-"):
        require_run(given[0])
    if description is None or {"-h", "--help"} & {*given}:
        return
    try:
        check_arguments(description, given, texts, command)
    except InputError:
        raise
    except Exception:
        # a slip of the check itself may not keep anybody from work: the parser decides
        return


def check_arguments(
    description: Description, args: list[str], texts: Mapping[str, str], command: str = ""
) -> None:
    """Check flags and keys of files by a description, and then what they name.

    Args:
        description: what the command takes.
        args: the command line after the command, its files found.
        texts: the text of each configuration file, by its path.
        command: the command.

    Raises:
        InputError: the parser or a constructor would refuse them with this message.
        Unsure: it cannot be told.
    """
    args = with_bare_flags(args, description.switches)
    check = _Check(description, UserInput(args, texts))
    check.run()
    check.refuse_values(at_once=True)
    check_uses(command, check.values)
    check.refuse_values(at_once=False)


class _Check:
    """One reading of a command line, from left to right as the parser reads it."""

    def __init__(self, description: Description, given: UserInput) -> None:
        self.known, self.given = description, given
        self.names = [*description.of_classes, *description.settings]
        self.chosen: dict[str, str] = {}  # the class of each dotted setting
        self.unnamed: dict[str, str] = {}  # the base class of a group of which no class is named
        self.of_unnamed = False  # whether a setting of such a group was given
        self.set: dict[str, Setting] = {}  # settings that were given
        self.missing: dict[str, set[str]] = {}  # required settings of each class that was chosen
        self.bad: list[InputError] = []
        self.values: dict[str, Any] = {}  # numbers, texts and truth values that were given
        self.refused: dict[str, tuple[Constraint, InputError]] = {}  # by what is not allowed
        for group in ("model", "data"):
            self.begin_with_named(group)

    def begin_with_named(self, group: str) -> None:
        """Note the class of a group that is named last, which the parser begins with."""
        setting = self.known.settings.get(group)
        if setting is None or not (base := self.base_of(setting)):
            return
        named = named_last(group, self.given.args, self.given.texts.values())
        cls = self.known.bases[base].get(str(named), "")
        if named and not cls and "." in str(named):
            raise Unsure
        if cls:
            self.chosen[group] = cls
        elif not named:
            self.unnamed[group] = base

    def run(self) -> None:
        unknown = []
        left = list(self.given.args)
        while left:
            word = left.pop(0)
            if not word.startswith("-"):
                if self.known.takes_words or not word:
                    raise Unsure
                unknown.append(word)
                continue
            flag, equals, value = word.partition("=")
            if (
                flag in ("--print_config", "--")
                or " " in word
                or not (FLAG.fullmatch(flag) or flag == "-c")
            ):
                raise Unsure
            path = _without_levels(flag.lstrip("-"))
            # a study's file is a setting with a type, and other files are read here and now
            is_config = flag == "-c" or (
                flag == "--config" and self.known.settings["config"].words is None
            )
            setting = None if is_config else self.find(path.rstrip("+"))
            if self.bad and path.endswith("+"):
                raise Unsure
            if not is_config and setting is None and not self.bad:
                unknown.append(word)
                continue
            if not equals:
                if not left:
                    # of a class's setting the parser says no more than its name
                    known = self.known.settings.get(path.rstrip("+"))
                    raise without_value("--config" if is_config else flag, known)
                if left[0].startswith("-") and not is_number(left[0]):
                    raise Unsure
                value = left.pop(0)
            if is_config:
                self.mapping("", yaml.safe_load(self.given.texts[value]))
            elif setting is not None:
                self.flag(path, setting, value)
            self.settle()
        lacking = [path for path, names in self.missing.items() if names]
        needed = [
            name
            for name, one in self.known.settings.items()
            if one.required and name not in self.set
        ]
        if len(lacking) > 1 or (lacking and (unknown or needed)):
            raise Unsure
        if unknown:
            raise unknown_flag(unknown[0], self.names)
        if self.of_unnamed:  # the parser may refuse their values before it asks for a class
            raise Unsure
        if len(needed) == 1:
            raise not_given(needed[0], self.known.settings[needed[0]])
        if needed:
            raise Unsure
        for path in lacking:
            own = self.own(self.chosen[path])
            first = next(name for name in own if name in self.missing[path])
            raise not_given(f"{path}.{first}", own[first])

    def refuse_values(self, *, at_once: bool) -> None:
        """Refuse a value of the right type that is not allowed; of several, it is not certain which
        is named.

        Args:
            at_once: whether constructors refuse it, or the run that uses it.
        """
        found = [
            error for constraint, error in self.refused.values() if constraint.at_once is at_once
        ]
        if len(found) > 1:
            raise Unsure
        if found:
            raise found[0]

    def settle(self) -> None:
        """Raise what was found, if it is one thing; of several it is not certain which the parser
        names."""
        if len(self.bad) > 1:
            raise Unsure
        if self.bad:
            raise self.bad[0]

    def base_of(self, setting: Setting) -> str:
        """Return the class whose subclasses a setting, or an item of it, may name; empty for
        none."""
        kinds = list(setting.takes)
        while kinds:
            kind = kinds.pop(0)
            if isinstance(kind, dict):
                if "class" in kind:
                    return str(kind["class"])
                kinds += kind.get("list", ())
        return ""

    def fields_of(self, setting: Setting) -> str:
        """Return the dataclass whose fields a setting has; empty for none."""
        return next(
            (
                str(kind["fields"])
                for kind in setting.takes
                if isinstance(kind, dict) and "fields" in kind
            ),
            "",
        )

    def field(self, prefix: str, cls: str, name: str) -> Setting | None:
        """Return the setting of a class or of a dataclass's field; None for a name that is none,
        which goes to ``bad``."""
        own = self.own(cls)
        if name in own:
            return own[name]
        if "." in name:
            raise Unsure
        self.bad.append(unknown_key(prefix, name, _leaf(cls), own, self.names, self.given))
        return None

    def find(self, path: str) -> Setting | None:
        """Return the setting of a flag; None if there is no such flag.

        What the class in use has no setting for goes to ``bad``.
        """
        settings = self.known.settings
        if path in settings:
            return settings[path]
        root = next((name for name in _parents(path) if name in settings), None)
        if root is None or settings[root].is_group:
            return None
        if not self.base_of(settings[root]):
            if fields := self.fields_of(settings[root]):
                return self.field(root, fields, path.removeprefix(f"{root}."))
            if all(isinstance(kind, str) and kind in CHECKS for kind in settings[root].takes):
                return None
            raise Unsure
        return self.below(root, settings[root], path.removeprefix(f"{root}."))

    def below(self, prefix: str, setting: Setting, rest: str) -> Setting | None:
        """Return the setting ``rest`` of the class that ``prefix`` has."""
        cls = self.chosen.get(prefix) or setting.default_class or self.unnamed.get(prefix, "")
        own = self.own(cls)
        if rest in own:
            self.of_unnamed |= cls == self.unnamed.get(prefix)
            return own[rest]
        inner = next((name for name in _parents(rest) if name in own), None)
        if inner is not None:
            return self.below(f"{prefix}.{inner}", own[inner], rest.removeprefix(f"{inner}."))
        return self.field(prefix, cls, rest)

    def own(self, cls: str) -> Mapping[str, Setting]:
        if cls not in self.known.classes:
            raise Unsure
        return self.known.classes[cls]

    def flag(self, path: str, setting: Setting, value: str) -> None:
        takes: Iterable[Any] = setting.takes
        if path.endswith("+"):
            path = path.rstrip("+")
            takes = _items(setting)
            if not takes:
                raise Unsure
        if setting.is_group:
            if not (WORD.fullmatch(value) or INT.fullmatch(value)) or Path(value).exists():
                raise Unsure
            self.bad.append(bad_value(path, setting, value, "", self.known.settings, self.given))
        else:
            self.value(path, setting, takes, value, of_text)

    def mapping(self, path: str, found: Any) -> None:
        """Check the settings of a file, or of one of its groups."""
        if not isinstance(found, Mapping):
            raise Unsure
        for key, value in found.items():
            if not isinstance(key, str) or not WORD.fullmatch(key.removesuffix("+")):
                raise Unsure
            appends = key.endswith("+")
            key = key.removesuffix("+")
            name = f"{path}.{key}" if path else key
            setting = self.known.settings.get(name)
            if appends and (setting is None or not setting.is_list):
                raise Unsure
            if setting is None:
                if isinstance(value, Mapping | list) or key in ("config", "print_config"):
                    raise Unsure
                self.bad.append(unknown_key("", name, "", (), self.names, self.given))
            elif setting.is_group:
                self.mapping(name, value)
            else:
                one = appends and not isinstance(value, list)
                self.value(name, setting, _items(setting) if one else setting.takes, value, of_yaml)

    def value(
        self,
        path: str,
        setting: Setting,
        takes: Iterable[Any],
        value: Any,
        of_plain: Callable[[Any, Any], Verdict],
    ) -> None:
        """Check one value; what is wrong with it goes to ``bad``.

        Args:
            path: the dotted setting.
            setting: what is known of it.
            takes: what it takes, or what an item of it takes.
            value: a text of the command line, or what YAML made of a file's.
            of_plain: the verdict on a value for one type that is no class.
        """
        self.forget(path)
        if value in (None, "null", [], "[]"):
            self.chosen.pop(path, None)
        verdicts, uncertain = [], False
        for kind in takes:
            try:
                verdicts.append(self.verdict(path, kind, value, of_plain))
            except Unsure:
                uncertain = True
            if self.bad:
                return
            if verdicts[-1:] == ["good"] and verdicts.count("good") == 1 and not uncertain:
                self.values[path] = plain_value(kind, value)
        if "good" in verdicts:
            self.set[path] = setting
            self.check_constraint(path, setting.constraint)
            prefix, _, name = path.rpartition(".")
            self.missing.get(prefix, set()).discard(name)
            return
        if uncertain or not verdicts:
            raise Unsure
        if isinstance(value, Mapping):
            value = value["class_path"]
        self.bad.append(bad_value(path, setting, str(value), "", self.known.settings, self.given))

    def check_constraint(self, path: str, constraint: Constraint | None) -> None:
        """Check a value of the right type; what is not allowed goes to ``refused``."""
        plain = self.values.get(path)
        if constraint is None or plain is None:
            return
        if constraint.names_from:
            if not is_word(plain):  # an import path
                return
            constraint = replace(constraint, names=tuple(self.known.names[constraint.names_from]))
        if error := constraint.refusal(plain):
            self.refused[path] = constraint, error

    def forget(self, path: str) -> None:
        """Forget the values of a setting that is given anew, and of the class that it names."""
        for name in [name for name in self.values if f"{name}.".startswith(f"{path}.")]:
            if name in self.refused:
                raise Unsure  # which item of a list it belongs to, or whether it still counts
            del self.values[name]

    def verdict(
        self, path: str, kind: Any, value: Any, of_plain: Callable[[Any, Any], Verdict]
    ) -> Verdict:
        if isinstance(kind, str) or "literal" in kind:
            return of_plain(kind, value)
        if "class" in kind:
            return self.class_verdict(path, kind["class"], value)
        if "fields" in kind:
            return self.fields_verdict(path, kind["fields"], value)
        if "of" in kind:
            return self.items_verdict(path, kind["of"], value)
        if isinstance(value, str) and value.startswith("["):
            value = yaml.safe_load(value)
        if isinstance(value, str):
            return "bad" if is_word(value) else unsure()
        if not isinstance(value, list):
            raise Unsure
        for item in value:
            found = []
            for one in kind["list"]:
                found.append(self.verdict(path, one, item, of_yaml))
                if self.bad:
                    return "bad"
            if "good" not in found:
                # of an item that is a name, the parser shows the list that a flag gave
                if isinstance(item, str) and self.given.flag_value(path) is None:
                    raise Unsure
                return "bad"
        return "good"

    def class_verdict(self, path: str, base: str, value: Any) -> Verdict:
        """Return whether a value names a subclass of ``base``, with arguments that it takes."""
        names = self.known.bases[base]
        if isinstance(value, bool | int | float):
            return "bad" if not isinstance(value, bool) else unsure()
        if value is None:
            return "bad"
        if isinstance(value, str):
            return self.choose(path, names, value)
        if not isinstance(value, Mapping) or "dict_kwargs" in value:
            raise Unsure
        named, arguments = value.get("class_path"), value.get("init_args")
        if named is not None:
            if not isinstance(named, str):
                raise Unsure
            if {*value} - {"class_path", "init_args"}:
                if [*self.given.texts][-1:] and self.given.beside_class_path():
                    self.bad.append(unknown_key("", "class_path", "", (), self.names, self.given))
                    return "bad"
                raise Unsure
            if self.choose(path, names, named) == "bad":
                return "bad"
        elif "init_args" not in value:
            arguments = value
        elif {*value} != {"init_args"}:
            raise Unsure
        setting = self.known.settings.get(path)
        cls = self.chosen.get(path) or (setting.default_class if setting else "")
        own = self.own(cls)
        if arguments is not None and not isinstance(arguments, Mapping):
            raise Unsure
        for key, one in (arguments or {}).items():
            if not isinstance(key, str) or not WORD.fullmatch(key):
                raise Unsure
            if key not in own:
                if isinstance(one, Mapping):  # the parser names a key below it
                    raise Unsure
                self.bad.append(unknown_key(path, key, _leaf(cls), own, self.names, self.given))
            elif own[key].words is None and any(name.startswith(f"{key}.") for name in own):
                self.group(path, key, own, one)
            else:
                self.value(f"{path}.{key}", own[key], own[key].takes, one, of_yaml)
        return "bad" if self.bad else "good"

    def fields_verdict(self, path: str, cls: str, value: Any) -> Verdict:
        """Return whether a value holds fields of a dataclass; what is wrong with one the parser
        knows."""
        if not isinstance(value, Mapping):
            plain = isinstance(value, str) and (is_word(value) or is_number(value))
            return "bad" if plain or value is None else unsure()
        own = self.own(cls)
        for key, one in value.items():
            if key not in own:
                raise Unsure
            if not self.is_good(f"{path}.{key}", own[key].takes, one):
                raise Unsure
        return "good"

    def items_verdict(self, path: str, takes: Iterable[Any], value: Any) -> Verdict:
        """Return whether a list or a mapping holds items of a type; of any other only the parser
        knows."""
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            value = [*value.values()]
        if not isinstance(value, list) or not all(self.is_good(path, takes, one) for one in value):
            raise Unsure
        return "good"

    def is_good(self, path: str, takes: Iterable[Any], value: Any) -> bool:
        """Return whether a value of a file is certainly of one of these types; no refusal of it is
        kept."""
        for kind in takes:
            with suppress(Unsure):
                if self.verdict(path, kind, value, of_yaml) == "good" and not self.bad:
                    return True
            self.bad.clear()
        return False

    def group(self, path: str, key: str, own: Mapping[str, Setting], value: Any) -> None:
        """Check settings of a class that stand in a group of their own."""
        if not isinstance(value, Mapping):
            raise Unsure
        for inner, one in value.items():
            name = f"{key}.{inner}"
            if name not in own:
                raise Unsure
            self.value(f"{path}.{name}", own[name], own[name].takes, one, of_yaml)

    def choose(self, path: str, names: Mapping[str, str], value: str) -> Verdict:
        """Note the class that a name or an import path means."""
        if not value or is_number(value):
            return "bad"
        cls = names.get(value, "")
        if not cls:
            return "bad" if value not in names and is_word(value) else unsure()
        own = self.own(cls)
        if self.chosen.get(path) == cls and path in self.missing:
            return "good"
        for name, setting in [*self.set.items()]:
            if not name.startswith(f"{path}."):
                continue
            rest = name.removeprefix(f"{path}.")
            if rest.split(".")[0] not in own:
                self.forget(name)
                self.set.pop(name)
                self.chosen.pop(name, None)
            elif rest in own and own[rest].takes != setting.takes:
                raise Unsure
        if any(self.missing.pop(path, ())):
            raise Unsure
        given = {name.removeprefix(f"{path}.") for name in self.set}
        self.missing[path] = {name for name, one in own.items() if one.required} - given
        self.chosen[path] = cls
        return "good"


def _items(setting: Setting) -> list[Any]:
    """Return what an item of a list takes."""
    return [kind for one in setting.takes if isinstance(one, dict) for kind in one.get("list", ())]


def _without_levels(path: str) -> str:
    """Return a dotted flag without ``init_args`` and ``class_path``, which may be left out."""
    parts = path.split(".")
    if "dict_kwargs" in parts or "class_path" in parts[:-1]:
        raise Unsure
    return ".".join(part for part in parts if part not in ("init_args", "class_path"))


def _parents(path: str) -> Iterable[str]:
    """Yield the dotted names above a name, the longest first."""
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]
