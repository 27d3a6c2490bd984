"""Study files and search files: how they are read, and the rules that all their entries keep.

Keys are the text that was written: ``on``, ``0.50`` and ``1`` are names here, and so is the value
``off``. The types of entries are those of dataclasses, and jsonargparse checks them.
"""

from __future__ import annotations

import re
from argparse import ArgumentError
from collections.abc import Collection, Hashable, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from jsonargparse import ArgumentParser, set_loader
from jsonargparse.typing import PositiveFloat, restricted_number_type

from fl_lightning.config.documents import read_document, refuse_odd_numbers
from fl_lightning.config.near_names import nearest, nearest_of_listed
from fl_lightning.config.packaged import configs_folder, find_config
from fl_lightning.errors import InputError, require
from fl_lightning.run.directory import LONGEST_NAME, is_plain_name
from fl_lightning.study.plan.kinds import check_kind
from fl_lightning.study.plan.schema import entries

T = TypeVar("T")
TRUE_FALSE, MERGE = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:merge"
SETTINGS_OF_THE_SWEEP = {
    *("trainer.experiment", "trainer.run_name", "trainer.auto_resume", "trainer.allow_changed"),
    *("trainer.tags", "trainer.fast_dev_run", "trainer.default_root_dir"),
    *("seed_everything", "config", "ckpt_path"),
}
"""Settings that every cell gets from the sweep."""


NAME = (
    f"part of a folder's name of at most {LONGEST_NAME} bytes: no '/', no '\\', no '.' or '-' first, no "
    "space at its ends"
)
Seed = restricted_number_type("StudySeed", int, [(">=", 0), ("<=", 2**63 - 1)])
Share = restricted_number_type("StudyShare", float, [(">", 0), ("<=", 1)])
Hours = PositiveFloat
set_loader("text", lambda text: text, exceptions=())


class _TextLoader(yaml.SafeLoader):
    """A loader whose keys are text, each given once, and that takes only ``true`` and ``false`` for
    truth.

    So does YAML 1.2; to YAML 1.1 ``on`` and ``no`` are truth values as well.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            (tag, pattern) for tag, pattern in resolvers if tag != TRUE_FALSE or first in "tTfF"
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Look at the keys as they are written, before a merge (``<<``) puts others among them."""
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            given_twice = isinstance(key, yaml.ScalarNode) and key.value in seen
            if given_twice or not isinstance(key, yaml.ScalarNode):
                problem = f"{key.value} is given twice" if given_twice else "a key must be text"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            if key.tag != MERGE:
                seen.add(key.value)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)  # what is merged comes first, so that own keys override it
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


@cache
def _parser(schema: Any) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False, parser_mode="text")  # a text stays a text
    parser.add_class_arguments(schema)
    return parser


@dataclass(frozen=True)
class SpecFile:
    """A study file or a search file.

    Args:
        path: the file; relative paths in it are relative to its folder.
        find_configs: whether the configurations that it names must exist.
    """

    path: Path
    find_configs: bool = True

    def require(self, valid: object, given: str, rule: str, instead: str) -> None:
        """Refuse an entry of this file unless it is ``valid``."""
        require(valid, f"{self.path}: {given}", rule, instead)

    def read(self, schema: type[T], kind: str) -> T:
        """Return what the file says.

        Args:
            schema: the dataclass of its entries.
            kind: what the file should be, for the message.

        Raises:
            InputError: it cannot be read, or an entry is wrong; the message names the file and the
                key.
        """
        document = self.load(kind)
        begin = "begin with 'study: my_study'"
        require(isinstance(document, dict), f"{self.path}", f"a {kind} is a mapping", begin)
        check_kind(self.path, document, kind)
        return self.parse(schema, document, "")

    def load(self, kind: str) -> Any:
        """Return the YAML document in the file, whatever it says.

        Args:
            kind: what the file should be, for the message.

        Raises:
            InputError: it cannot be read, or is no YAML.
        """
        try:
            text = read_document(self.path, str(self.path))
            refuse_odd_numbers(self.path, yaml.compose(text, Loader=_TextLoader))
            return yaml.load(text, Loader=_TextLoader)
        except InputError:
            raise
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            instead = "write the path of a YAML file"
            raise InputError(
                f"{self.path}", f"the {kind} cannot be read ({reason})", instead
            ) from None
        except yaml.MarkedYAMLError as error:
            where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
            rule = f"it is not a valid {kind}: {error.problem}"
            raise InputError(f"{self.path}{where}", rule, "mend that line") from None
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            # ValueError: the 31st of February
            rule = f"it is not valid YAML: {error}"
            raise InputError(f"{self.path}", rule, "write 'key: value' lines") from None

    def parse(self, schema: type[T], given: Any, where: str, instead: str = "") -> T:
        """Return one mapping of the file as a dataclass; a key without a value is as if it were
        left out.

        Args:
            schema: a dataclass, whose fields have an :class:`Entry`.
            given: what the file has.
            where: the dotted key of the mapping, with a dot at its end; empty for the file itself.
            instead: what to write in place of something that is no mapping.

        Raises:
            InputError: a key is unknown or missing, or a value has another type.
        """
        given = {} if given is None else given
        known = {one.name: one for one in fields(schema)}  # type: ignore[arg-type]
        instead = instead or f"write {where}{next(iter(known))}: ... below it"
        self.require(
            isinstance(given, Mapping),
            f"{where.rstrip('.')}: {given!r}",
            "it is a mapping",
            instead,
        )
        for key in given:
            near = nearest(str(key), known)
            instead = f"write {where}{near}" if near else "remove it"
            self.require(key in known, f"{where}{key}", f"known here: {', '.join(known)}", instead)
        values = {key: value for key, value in given.items() if value is not None}
        needed = [
            key for key, one in known.items() if one.default is one.default_factory is MISSING
        ]
        for key in needed:
            rule = f"{', '.join(needed)} must be given"
            self.require(key in values, f"no {where}{key}", rule, f"add '{key}:'")
        try:
            parsed = vars(_parser(cast(Hashable, schema)).parse_object(deepcopy(values)))
        except ArgumentError as error:
            key = re.findall(r'Parser key "(\w+)"', str(error))[0]
            raise self.wrong(schema, key, values[key], where) from None
        for key, one in known.items():  # what may be anything stays as it was written
            if key in values and "Any" in str(one.type) and not isinstance(parsed[key], bool):
                parsed[key] = values[key]
        return schema(**parsed)

    def wrong(self, schema: type, key: str, value: Any, where: str = "") -> InputError:
        """Return the error of an entry that breaks the rule of its key in the dataclass
        ``schema``."""
        known = next(one for name, _, one in entries(schema) if name == key)
        given = f"{self.path}: {where}{key}: {value!r}"
        return InputError(given, known.rule, f"write {where}{key}: {known.example}")

    def one_of(self, name: str, names: Collection[str], where: str) -> str:
        """Return ``name``, or refuse it and suggest the nearest of ``names``."""
        rule = f"one of {', '.join(names)}" if names else "the study has no grid"
        instead = f"write {nearest_of_listed(name, names)}" if names else "add it"
        self.require(name in names, f"{where}: {name}", rule, instead)
        return name

    def name(self, name: str, where: str) -> str:
        """Return ``name``, or refuse what can be no part of a folder's name."""
        size = len(name.encode(errors="replace"))
        plain = (
            is_plain_name(name) and name == name.strip() and name.isprintable() and name[0] != "-"
        )
        shown = repr(name) if size <= LONGEST_NAME else f"{name[:20]}... ({size} bytes)"
        instead = "write a plain name, such as FedMPQ" if size <= LONGEST_NAME else "shorten it"
        self.require(plain and size <= LONGEST_NAME, f"{where}: {shown}", NAME, instead)
        return name

    def names(self, mapping: Any, where: str) -> dict[str, Any]:
        """Return a mapping whose keys name methods, axes or levels, or refuse it."""
        rule, instead = "it is a mapping with at least one entry", "write 'NAME: {}' lines below it"
        self.require(
            isinstance(mapping, Mapping) and mapping, f"{where}: {mapping!r}", rule, instead
        )
        return {self.name(name, where): value for name, value in mapping.items()}

    def configs(self, given: str | list[str] | None, where: str) -> tuple[Path, ...]:
        """Return the files of one or several ``fit`` configurations, or refuse a file that is not
        there."""
        folder, paths = self.path.parent, []
        for name in [given] if isinstance(given, str) else given or []:
            path = find_config(name, folder)
            known = () if path else (*folder.glob("*.yaml"), *configs_folder().glob("*.yaml"))
            files = [file.name for file in known]
            near = nearest(name, files) or "the path of a YAML file, relative to this file"
            rule, instead = f"there is no such file in {folder.resolve()}", f"write {near}"
            self.require(path or not self.find_configs, f"{where}: {name}", rule, instead)
            paths.append(path or folder / name)
        return tuple(paths)

    def settings(self, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return dotted settings of ``fit``, or refuse keys and values that cannot be written as
        flags.

        Whether ``fit`` has such settings, it says itself.
        """
        for key, value in settings.items():
            self.setting(key, where)
            rule = "no setting has such a value"
            instead = "write text in quotes, as in '2024-01-01'"
            self.require(_is_json(value), f"{where}.{key}: {value!r}", rule, instead)
        return dict(settings)

    def setting(self, key: str, where: str) -> None:
        """Refuse a key that is no dotted setting, or that the sweep sets."""
        given, rule = f"{where}: {key}", "the command sets it"
        self.require(key not in SETTINGS_OF_THE_SWEEP, given, rule, "leave it out")
        rule, instead = "settings are dotted, as flags are", "write for example trainer.max_rounds"
        self.require("." in key and key[0] not in ".-", given, rule, instead)


def _is_json(value: Any) -> bool:
    """Return whether a value can be written as a flag."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or (isinstance(value, (bool, int, str, float)) and value == value)
