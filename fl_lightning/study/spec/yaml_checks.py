"""Study files and search files: how they are read, and what may stand in them.

Keys are the text that was written: ``on``, ``0.50`` and ``1`` are names here, and so is the value ``off``.
Each check returns a value in its final form, or complains in three parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from math import isnan
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.errors import InputError
from fl_lightning.run.directory import LONGEST_NAME, is_plain_name
from fl_lightning.support.documents import read_document
from fl_lightning.support.packaged import find_config

TRUE_FALSE = "tag:yaml.org,2002:bool"
SWEEPS_OWN = (
    "trainer.experiment",
    "trainer.run_name",
    "trainer.auto_resume",
    "trainer.allow_changed",
    "trainer.tags",
    "trainer.fast_dev_run",
    "trainer.default_root_dir",
    "seed_everything",
    "config",
    "ckpt_path",
)
"""Settings that every cell gets from the sweep."""
LARGEST = 2**63 - 1


class _Loader(yaml.SafeLoader):
    """Keys are text, each given once; of the words for truth only ``true`` and ``false`` are no text (YAML
    1.2)."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != TRUE_FALSE or first in "tTfF"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:  # type: ignore[override]
        self.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            if key.value in result:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
            result[key.value] = self.construct_object(value, deep=True)
        return result


def read_mapping(path: Path, what: str, begin: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        path: the file.
        what: what it should be, for the message.
        begin: how one begins.

    Raises:
        InputError: there is none, it is not a mapping, or it is too large.
    """
    try:
        document = yaml.load(read_document(path, str(path)), Loader=_Loader)
    except InputError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InputError(
            f"{path}", f"the {what} cannot be read ({reason})", "write the path of a YAML file"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise InputError(
            f"{path}{where}", f"it is not a valid {what}: {error.problem}", "mend that line"
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: the 31st of February
        raise InputError(f"{path}", f"it is not valid YAML: {error}", "write 'key: value' lines") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}", f"a {what} is a mapping", f"begin with '{begin}'")
    other = (
        "fit"
        if {"model", "trainer"} & {*document}
        else "tune"
        if "space" in document
        else "sweep"
        if "methods" in document
        else ""
    )
    if other and other != {"study file": "sweep", "search file": "tune"}[what]:
        raise InputError(
            f"{path}",
            f"it is no {what}, but one for {other}",
            f"write python -m fl_lightning {other} --config {path}",
        )
    return document


class Checks:
    """Checks of the entries of one file.

    Args:
        path: the file; relative paths in it are relative to its folder.
        find_configs: whether the configurations that it names must be there.
    """

    def __init__(self, path: Path, find_configs: bool = True) -> None:
        self.path, self.find_configs = path, find_configs

    def error(self, given: str, rule: str, instead: str) -> InputError:
        return InputError(f"{self.path}: {given}", rule, instead)

    def require(self, good: Any, given: str, rule: str, instead: str) -> None:
        if not good:
            raise self.error(given, rule, instead)

    def keys(
        self, entry: Mapping[str, Any], known: Collection[str], prefix: str = "", needed: Collection[str] = ()
    ) -> None:
        """No key is unknown and none is missing."""
        for key in entry:
            near = get_close_matches(key, known, n=1, cutoff=0.5)
            instead = f"write {prefix}{near[0]}" if near else "remove it"
            self.require(key in known, f"{prefix}{key}", f"known here: {', '.join(known)}", instead)
        for key in needed:
            self.require(
                key in entry, f"no {prefix}{key}", f"{', '.join(needed)} must be given", f"add '{key}:'"
            )

    def mapping(
        self, value: Any, where: str, *, empty: bool = False, instead: str = "write 'NAME: {}' lines below it"
    ) -> dict[str, Any]:
        """``empty``: whether it may have no entry; a bare key is an empty mapping."""
        value = {} if value is None and empty else value
        good = isinstance(value, Mapping) and (value or empty)
        rule = "it is a mapping" if empty else "it is a mapping with at least one entry"
        self.require(good, f"{where}: {value!r}", rule, instead)
        return dict(value)

    def text(self, value: Any, where: str, example: str) -> str:
        self.require(
            isinstance(value, str) and value,
            f"{where}: {value!r}",
            "it is a string",
            f"write {where}: {example}",
        )
        return str(value)

    def texts(self, value: Any, where: str, example: str) -> list[str]:
        good = isinstance(value, list) and all(isinstance(item, str) for item in value)
        self.require(good, f"{where}: {value!r}", "it is a list of strings", f"write {where}: [{example}]")
        return list(value)

    def whole(self, value: Any, where: str, least: int) -> int:
        good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST
        rule = f"it is an integer, {least} or more, below 2^63"
        self.require(good, f"{where}: {value!r}", rule, f"write {where}: {max(least, 1)}")
        return int(value)

    def seeds(self, seeds: Any) -> list[int]:
        listed = seeds if isinstance(seeds, list) else []
        good = listed and all(
            isinstance(s, int) and not isinstance(s, bool) and 0 <= s <= LARGEST for s in listed
        )
        self.require(
            good,
            f"seeds: {seeds!r}",
            "it is a list of integers, 0 or more, below 2^63",
            "write seeds: [0, 1, 2]",
        )
        self.require(
            len(set(seeds)) == len(seeds),
            f"seeds: {seeds}",
            "each seed is run once",
            "remove the repeated one",
        )
        return list(seeds)

    def share(self, value: Any, where: str) -> float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1
        self.require(good, f"{where}: {value!r}", "it is a share in (0, 1]", f"write {where}: 0.9")
        return float(value)

    def plain(self, name: Any, where: str) -> str:
        """Part of the name of a folder."""
        good = isinstance(name, str) and is_plain_name(name) and name == name.strip() and name.isprintable()
        good = good and not name.startswith("-")
        rule = "part of a folder's name: no '/', no '\\', no '.' or '-' first, no space at its ends"
        self.require(good, f"{where}: {name!r}", rule, "write a plain name, such as FedMPQ")
        self.short(name, where)
        return str(name)

    def short(self, name: str, where: str) -> None:
        """A file system takes it for a folder's name."""
        size = len(name.encode(errors="replace"))
        self.require(
            size <= LONGEST_NAME,
            f"{where}: {name[:20]}... ({size} bytes)",
            f"a folder's name has at most {LONGEST_NAME}",
            "shorten it",
        )

    def one_of(self, name: Any, names: Collection[str], where: str) -> str:
        near = get_close_matches(str(name), names, n=1, cutoff=0.0)
        instead = f"write {near[0]}" if near else "add it"
        self.require(
            name in names,
            f"{where}: {name}",
            f"one of {', '.join(names)}" if names else "the study has no grid",
            instead,
        )
        return str(name)

    def configs(self, value: Any, where: str) -> tuple[Path, ...]:
        """``fit`` configurations: one or a list, each a file."""
        folder, paths = self.path.parent, []
        for name in value if isinstance(value, list) else [] if value is None else [value]:
            self.require(
                isinstance(name, str),
                f"{where}: {name!r}",
                "it is a path or a list of paths",
                "write kd_default.yaml",
            )
            found = find_config(name, folder)
            if self.find_configs and found is None:
                files = [str(file.relative_to(folder)) for file in folder.glob("*.yaml")]
                near = get_close_matches(name, files, n=1) or [
                    "the path of a YAML file, relative to the file that names it"
                ]
                raise self.error(f"{where}: {name}", f"there is no such file in {folder}", f"write {near[0]}")
            paths.append(found or folder / name)
        return tuple(paths)

    def settings(self, value: Any, where: str) -> dict[str, Any]:
        """Dotted settings of ``fit``; whether there are such settings, ``fit`` knows."""
        settings = self.mapping(value, where, empty=True)
        for key, setting in settings.items():
            self.setting(key, where)
            instead = "write text in quotes, as in '2024-01-01'"
            self.require(
                _is_json(setting), f"{where}.{key}: {setting!r}", "no setting has such a value", instead
            )
        return settings

    def setting(self, key: str, where: str) -> None:
        self.require(key not in SWEEPS_OWN, f"{where}: {key}", "the command sets it", "leave it out")
        dotted = "." in key and not key.startswith((".", "-"))
        self.require(
            dotted,
            f"{where}: {key}",
            "settings are dotted, as flags are",
            "write for example trainer.max_rounds",
        )


def _is_json(value: Any) -> bool:
    """Whether it can be written as a flag."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    return (
        value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and not isnan(value))
    )
