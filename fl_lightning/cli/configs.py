"""Checks of configuration files, environment variables and unused settings, before and after
parsing."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.commands import TRACEBACK_VARIABLE, Command
from fl_lightning.cli.flags import flags_in
from fl_lightning.config.documents import load_yaml, read_document, refuse_odd_numbers
from fl_lightning.config.near_names import nearest, short_name
from fl_lightning.config.packaged import configs_folder, layers, without_base
from fl_lightning.errors import InputError, require

ENV_PREFIX = "FL_LIGHTNING_"


def read_configs(args: list[str], usual: str = Command.usual_config) -> dict[str, str]:
    """Return the text of every configuration file by its path, without ``base``, the lowest first.

    Args:
        args: the command line after the command, its files found.
        usual: the file that is proposed in place of one that is not there, if no name is near.

    Raises:
        InputError: a file is missing, unreadable, empty, not YAML or not a mapping, or has a key
            twice.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("-c", "--config", action="append", default=[])
    try:
        given = finder.parse_known_args(args)[0].config
    except argparse.ArgumentError:  # --config has no value, which the real parser reports
        given = []
    from_environment = os.environ.get(f"{ENV_PREFIX}CONFIG")
    paths = [
        *map(str, bases_of_environment()),
        *([from_environment] if from_environment else []),
        *given,
    ]
    texts = {path: _read_config(path, usual) for path in paths}
    blanked = {path: without_base(text) for path, text in texts.items()}
    _LAYERED.update(
        {_lines(texts[path]): blanked[path] for path in texts if texts[path] != blanked[path]}
    )
    return blanked


def bases_of_environment() -> list[Path]:
    """Return the files that the configuration in the environment is based on, the lowest first."""
    name = os.environ.get(f"{ENV_PREFIX}CONFIG")
    return layers(Path(name))[:-1] if name and Path(name).is_file() else []


_LAYERED: dict[str, str] = {}
"""The texts of configuration files that have a base, as the parser reads them, and without it."""


def as_layer(document: str) -> str:
    """Return what the parser is to read of a document: of a file with a base, the text without
    it."""
    return _LAYERED.get(_lines(document), document)


def _lines(text: str) -> str:
    """Return a text with Unix line ends, whichever it was read with."""
    return text.replace("\r\n", "\n")


def check_encoding(args: Iterable[str]) -> None:
    """Refuse arguments and environment variables that are not UTF-8, which no ``config.yaml`` can
    hold.

    Raises:
        InputError: one is not; the message shows its other bytes as ``\\x..``.
    """
    variables = (
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(ENV_PREFIX)
    )
    for given in (*args, *variables):
        try:
            given.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(given).decode(errors="backslashreplace")
            rule, instead = "it is not UTF-8, and a configuration is", "write it in UTF-8"
            if "\\x" not in shown:
                rule = "it is UTF-8, and the locale is not"
                instead = "set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
            raise InputError(shown, rule, instead) from None


def with_bare_flags(args: list[str], switches: Iterable[str]) -> list[str]:
    """Return the arguments with ``true`` after each switch that has no value, such as
    ``--calibrate``."""
    bare = {f"--{name}" for name in switches}
    found = []
    for arg, following in zip_longest(args, args[1:], fillvalue="--"):
        found += [arg, "true"] if arg in bare and following.startswith(("--", "-c")) else [arg]
    return found


def with_printing_last(args: list[str]) -> list[str]:
    """Return the arguments with ``--print_config`` at the end: the parser prints the settings that
    it has read before that word."""
    last = [arg for arg in args if arg.partition("=")[0] == "--print_config"]
    return [arg for arg in args if arg not in last] + last


def with_config_of_run(command: str, args: list[str]) -> list[str]:
    """Return the arguments of ``test`` or ``export``, with the configuration of the run in front if
    they name none; those of other commands stay as they are.

    It takes precedence over a configuration in the environment, as every file does. A run directory
    as the first argument means the same as after ``--ckpt_path``.

    Raises:
        InputError: the arguments name no run, or one without a configuration.
    """
    if command not in ("test", "export"):
        return args
    if named_first := bool(args) and not args[0].startswith("-"):
        args = ["--ckpt_path", *args]
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--config", "--ckpt_path", "--model"):
        finder.add_argument(name)
    finder.add_argument("-c", dest="config")
    try:
        given = finder.parse_known_args(args)[0]
    except argparse.ArgumentError:  # a flag has no value, which the real parser reports
        return args
    if given.config or given.model or {"-h", "--help"} & {*args}:
        return args
    in_environment = bool(os.environ.get(f"{ENV_PREFIX}CONFIG"))
    if in_environment and given.ckpt_path in (None, "", "last"):
        return args  # the run is looked for in the experiment that it names
    if not given.ckpt_path or given.ckpt_path == "last":
        raise InputError(
            f"{command} {f'--ckpt_path {given.ckpt_path}' if given.ckpt_path else 'without --ckpt_path'} "
            "and without --config",
            "it needs to know the run",
            "write --ckpt_path and the run's directory",
        )
    path = Path(os.path.expanduser(given.ckpt_path))
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    if not (run / "config.yaml").is_file():
        if in_environment:
            return args
        raise InputError(
            given.ckpt_path if named_first else f"--ckpt_path {given.ckpt_path}",
            "it is neither a run directory nor a checkpoint in one",
            "write the directory that holds config.yaml",
        )
    text = (run / "config.yaml").read_text(errors="replace")
    call = "export_model(trainer, FOLDER)" if command == "export" else "trainer.test"
    if in_environment and ("code_sha256:" in text or "not recorded: " in text):
        return args
    if "code_sha256:" in text:
        raise InputError(
            f"{command} of {run}",
            "its configuration has a function that no file can name, such as a lambda",
            f"call {call} in the script that trained it",
        )
    if unknown := re.search(r"(\w+): ['\"]?not recorded: ([\w.]+)", text):
        raise InputError(
            f"{command} of {run}",
            f"its {unknown[1]} was an object whose arguments are not known ({unknown[2]})",
            f"call {call} in the script that trained it, or save_hyperparameters() in that class "
            "before a run",
        )
    return ["--config", str(run / "config.yaml"), *args]


def _read_config(path: str, usual: str) -> str:
    """Return the text of a configuration file, or refuse the file with the line that is wrong in
    it."""
    given = f"--config {path}"
    if Path(path).is_dir():
        raise InputError(
            given,
            "it is a directory and must be a YAML file",
            f"write --config {_yaml_near(Path(path) / 'x', usual)}",
        )
    try:
        text = read_document(Path(path), given)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(
            given, "there is no such file", f"write --config {_yaml_near(Path(path), usual)}"
        ) from None
    except UnicodeDecodeError as error:
        if b"\0" in error.object:
            near = f"write --config {_yaml_near(Path(path), usual)}"
            raise InputError(given, "it is not a text file and must be YAML", near) from None
        line = error.object[: error.start].count(b"\n") + 1
        rule = f"line {line} has the byte {error.object[error.start]:#x}, which is not UTF-8"
        raise InputError(given, rule, "save it as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            given, f"it cannot be read ({reason})", "write the path of a YAML file that can"
        ) from None
    try:
        node = _composed(text)
        load_yaml(text)
        repeated = [] if node is None else list(_repeated_keys(node))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        seen = " ".join(part for part in (error.context, error.problem) if part)
        raise InputError(
            f"{given}{where}",
            f"it is not valid YAML: {seen}",
            "mend that line ('key: value', indented with spaces)",
        ) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as the 31st of February
        raise InputError(
            given, f"it is not valid YAML: {error}", "write 'key: value' lines"
        ) from None
    except RecursionError:
        raise InputError(
            given, "it is nested too deeply, or in itself", "write a plain mapping of settings"
        ) from None
    if not isinstance(node, yaml.MappingNode):
        what = "empty" if node is None else "not a mapping of settings"
        raise InputError(
            given, f"it is {what}", "write for example 'trainer: {max_rounds: 5}' into it"
        )
    for key, line in repeated:
        raise InputError(
            f"{path}, line {line}: {key}", "a key may be given once", "remove one of the two"
        )
    refuse_odd_numbers(Path(path), node)
    for key, _ in node.value:
        require(
            key.tag == "tag:yaml.org,2002:str" or key.value == "<<",
            f"{path}, line {key.start_mark.line + 1}: {key.value}",
            "a setting has a name, and this is none",
            "write for example 'trainer: {max_rounds: 5}'",
        )
    return text


@lru_cache(maxsize=64)
def _composed(text: str) -> yaml.Node | None:
    """Return the nodes of a YAML text, which nobody changes; a study reads the same few files for
    each of its cells."""
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _yaml_near(path: Path, usual: str) -> str:
    """Return the YAML file with the name nearest to that of ``path``; ``usual`` if none is near."""
    folder = configs_folder()
    # those that come with the project are found from any folder
    names = {file.name: f"configs/{file.relative_to(folder)}" for file in folder.rglob("*.yaml")}
    files = [*Path("configs").glob("*.y*ml"), *path.parent.glob("*.y*ml")]
    names |= {file.name: str(file) for file in files if file != path}
    stems = {Path(name).stem: file for name, file in names.items()}
    near = nearest(path.stem, stems)
    return stems[near] if near else usual


def _repeated_keys(node: yaml.Node) -> Iterator[tuple[str, int]]:
    """Yield each key that a mapping has twice, and the line of the second one."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    yield key.value, key.start_mark.line + 1
                seen.add(key.value)
            yield from _repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _repeated_keys(value)


def entry_of(path: str, text: str) -> tuple[int, str] | None:
    """Return the line, counted from 1, of a dotted setting in a YAML text, and what it is given
    there, empty for a list or a mapping; None if it is not there.

    The dotted name leaves out the level ``init_args`` and the positions in lists.

    >>> entry_of("trainer.callbacks.round", "trainer:\\n  callbacks:\\n  - init_args:\\n      round: 3")
    (4, '3')
    """
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    return None if node is None else _entry_in(path.split("."), node)


def _entry_in(path: list[str], node: yaml.Node) -> tuple[int, str] | None:
    entries: list[tuple[int, str] | None] = []
    if isinstance(node, yaml.SequenceNode):
        entries = [_entry_in(path, item) for item in node.value]
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == "init_args" != path[0]:
                entries.append(_entry_in(path, value))
            elif isinstance(key.value, str):
                names = short_name(key.value.rstrip("+")).split(".")
                rest = path[len(names) :]
                given = value.value if isinstance(value, yaml.ScalarNode) else ""
                here = (key.start_mark.line + 1, given)
                if names == path[: len(names)]:
                    entries.append(_entry_in(rest, value) if rest else here)
    return next((entry for entry in entries if entry is not None), None)


def variable_of(path: str) -> str:
    """Return the name of the environment variable of a dotted setting.

    >>> variable_of("trainer.max_rounds")
    'FL_LIGHTNING_TRAINER__MAX_ROUNDS'
    """
    return ENV_PREFIX + path.replace(".", "__").upper()


def beside_class_path(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each wrong key beside a ``class_path`` of a configuration, after the class's dotted
    path.

    Beside ``class_path`` only ``init_args`` and ``dict_kwargs`` are allowed.
    """
    if isinstance(node, list):
        for item in node:
            yield from beside_class_path(item, path)
    if not isinstance(node, Mapping):
        return
    if "class_path" in node:
        yield from (
            (path, str(key))
            for key in node
            if key not in ("class_path", "init_args", "dict_kwargs")
        )
    for key, value in node.items():
        yield from beside_class_path(
            value, path if key == "init_args" else f"{path}.{key}".lstrip(".")
        )


PROGRAM = "python -m fl_lightning"


def check_kind(texts: Mapping[str, str], command: str = "fit") -> None:
    """Refuse files of ``sweep`` and of ``tune`` in place of a configuration of ``fit`` or of the
    arguments of ``compare``, and groups of settings that are given nothing.

    Args:
        texts: the text of each configuration file, by its path.
        command: which the files were given to.
    """
    for path, text in texts.items():
        given = load_yaml(text)
        keys = {*given}
        for key, what, other in (("methods", "a study", "sweep"), ("space", "a search", "tune")):
            if {"study", key} <= keys:
                rule, instead = "fit runs one configuration", f"{PROGRAM} {other} --config {path}"
                if command == "compare" and other == "sweep":
                    rule = "compare finds the arguments of its flags there"
                    instead = f"--study {path}"
                raise InputError(
                    f"--config {path}", f"it is {what}, and {rule}", f"write {instead}"
                )
        for group in ("trainer", "model", "data"):
            if given.get(group, {}) is None and (entry := entry_of(group, text)):
                raise InputError(
                    f"{group}: null ({path}, line {entry[0]})",
                    f"{group} is a group of settings",
                    f"leave it out or write --{group}.NAME VALUE",
                )


def class_in(data: object) -> object:
    """Return the class that a value of ``data`` names, as a name or under ``class_path``."""
    return data.get("class_path") if isinstance(data, Mapping) else data


def named_last(group: str, args: Iterable[str], texts: Iterable[str]) -> object:
    """Return what flags, or else configuration files, name last as the class of a group of
    settings, or else the environment; empty where they name none."""
    named = class_in(load_yaml(os.environ.get(variable_of(group), ""))) or ""
    for text in texts:
        named = class_in(load_yaml(text).get(group)) or named
    for name, value in flags_in([*args]):
        if name in (f"--{group}", f"--{group}.class_path"):
            named = class_in(yaml.safe_load(value)) or named
    return named


def check_environment(settings: Iterable[str]) -> None:
    """Refuse environment variables with the project's prefix that set nothing, such as mistyped
    ones.

    Args:
        settings: dotted names of all settings.
    """
    valid = {variable_of(name) for name in settings}
    for name in sorted(os.environ):
        if not name.startswith(ENV_PREFIX) or name in valid or name == TRACEBACK_VARIABLE:
            continue
        group, _, setting = name.removeprefix(ENV_PREFIX).partition("__")
        if setting and group in ("MODEL", "DATA"):
            path, value = setting.lower().replace("__", "."), os.environ[name]
            instead = f"write {ENV_PREFIX}{group}='{{{path}: {value}}}'"
            if "." in path:  # an argument of a class, whose class would have to be named too
                instead = f"unset it and write --{group.lower()}.{path} {value}"
            raise InputError(
                f"environment variable {name}",
                f"settings of {group.lower()} are given together",
                instead,
            )
        near = nearest(name, sorted(valid))
        instead = f"write {near}" if near else f"unset {name}"
        raise InputError(f"environment variable {name}", "there is no such setting", instead)


def dropped_names(args: list[str], texts: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Return the settings that were given but are not part of the resolved ``config``.

    They belong to a class that was replaced by one without such an argument.

    >>> files = ["model: {class_path: A, init_args: {alpha: 1}}"]
    >>> dropped_names([], files, {"model": {"class_path": "B", "init_args": {}}})
    ['model.alpha']
    """
    final = _plain(config)
    dropped: dict[str, None] = {}
    for text in texts:
        dropped.update(dict.fromkeys(_missing(_plain(load_yaml(text)), final)))
    for arg in args:
        path = arg.removeprefix("--").partition("=")[0]
        if arg.startswith(("--model.", "--data.")) and not path.endswith((".help", "+")):
            nested: Any = True
            for name in reversed(
                [part for part in path.split(".") if part not in ("init_args", "class_path")]
            ):
                nested = {name: nested}
            dropped.update(dict.fromkeys(_missing(nested, final)))
    return list(dropped)


def kept_federation(args: list[str], texts: Iterable[str]) -> str:
    """Return which clients configuration files give data of another class, where flags do not say
    it.

    >>> files = ["data: {class_path: A, init_args: {num_clients: 100, partition: {class_path: Dirichlet}}}"]
    >>> kept_federation(["--data", "B"], files), kept_federation(["--data.num_clients=5"], files)
    ('data.num_clients 100, data.partition Dirichlet', 'data.partition Dirichlet')
    """
    found: dict[str, Any] = {}
    for text in texts:
        data = (load_yaml(text) or {}).get("data")
        data = data if isinstance(data, Mapping) else {}
        given = {**data, **(data.get("init_args") or {})}
        found |= {name: given[name] for name in ("num_clients", "partition") if name in given}
    if isinstance(rule := found.get("partition"), Mapping):
        found["partition"] = str(rule.get("class_path")).rpartition(".")[2]
    flags = {arg.partition("=")[0] for arg in args}
    return ", ".join(
        f"data.{name} {value}" for name, value in found.items() if f"--data.{name}" not in flags
    )


def _plain(node: Any) -> Any:
    """Return a configuration without the levels ``class_path`` and ``init_args``, which may be left
    out, and with a level for each part of a dotted key."""
    if not isinstance(node, Mapping):
        return node
    plain: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("class_path", "init_args", "dict_kwargs"):
            continue
        first, *inner = str(key).split(".")
        for name in reversed(inner):
            value = {name: value}
        plain[first] = _merged(plain.get(first), _plain(value))
    for level in ("init_args", "dict_kwargs"):
        inner = _plain(node.get(level))
        plain.update(inner if isinstance(inner, dict) else {})
    return plain


def _merged(before: Any, after: Any) -> Any:
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    return before | {key: _merged(before.get(key), value) for key, value in after.items()}


def _missing(given: Any, final: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted names below ``model`` and ``data`` that ``given`` has and ``final`` has
    not."""
    if not isinstance(given, Mapping) or not isinstance(final, Mapping):
        return
    for key, value in given.items():
        name = f"{path}.{key}" if path else str(key)
        if key in final:
            yield from _missing(value, final[key], name)
        elif path.split(".")[0] in ("model", "data"):
            yield name
