"""What the flags of a command line change in its configuration files, shortened for the name of the
run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from fl_lightning.cli.configs import read_configs
from fl_lightning.cli.flags import flags_in
from fl_lightning.config.documents import ODD_NUMBER
from fl_lightning.config.near_names import short_name
from fl_lightning.config.packaged import with_found_configs
from fl_lightning.config.settings import is_free, is_under
from fl_lightning.errors import InputError
from fl_lightning.support.redaction import redact_arguments

MAX_SETTINGS = 4
MAX_CHARACTERS = 60  # of all settings together
MAX_VALUE_CHARACTERS = 20
IN_NAME = ("model", "model.module", "data", "data.dataset", "seed_everything")
"""Settings that the name of every run tells anyway."""
LENGTH = ("trainer.max_rounds", "trainer.eval_every")
"""Settings by which a run is only longer or measured more often: a shortened run keeps its name."""
FILES = ("train", "test", "path", "root", "client", "group")
"""Settings of data of one's own that say where they are, which the name of the data tells."""
GROUPS = ("trainer", "model", "data")


def overrides(args: Sequence[str]) -> list[str]:
    """Return the settings that flags change, as ``alpha1`` or ``optimizer_AdamW``, sorted by name.

    A setting that the files give the same value, or that changes no local step, is left out; so are
    the files of a class of data that is itself named by a flag. At most ``MAX_SETTINGS`` are
    returned, and a last text that counts the others.

    Args:
        args: the words of a command line after the command.
    """
    try:
        files = [yaml.safe_load(text) for text in read_configs(with_found_configs(args)).values()]
    except InputError:  # a file that the parser has read is gone; a name is not worth the run
        files = []
    given = sorted(_flags(redact_arguments(list(args))), key=lambda flag: flag[0])
    own_data = any(path == "data" for path, _, _ in given)
    found: dict[str, str] = {}
    for number, (path, appends, text) in enumerate(given):
        if path in (*IN_NAME, *LENGTH) or path.split(".")[0] not in GROUPS or is_free(path, {}):
            continue
        before = None if appends else _value(files, path)
        value = _loaded(text)
        if before is not None and _shown(before) == _shown(value):
            found.pop(path, None)  # an earlier flag of the same name does not count
        elif not (own_data and before is None and path.startswith("data.") and path[5:] in FILES):
            key = f"{path} {number}" if is_under(path, ["trainer.callbacks"]) else path
            found[key] = _shown(value) if appends else _named(path, _shown(value))
    shown: list[str] = []
    for text in found.values():
        if len(shown) == MAX_SETTINGS or len("-".join([*shown, text])) > MAX_CHARACTERS:
            break
        shown.append(text)
    left = len(found) - len(shown)
    return [*shown, *([f"and{left}more"] if left else [])]


def _flags(args: Sequence[str]) -> list[tuple[str, bool, str]]:
    """Return the dotted setting of each flag, whether it appends to a list, and its value as it was
    typed."""
    found = []
    for name, value in flags_in(args):
        if name.startswith("--"):
            path = short_name(name[2:])
            found.append((path.rstrip("+"), path.endswith("+"), value))
    return found


def _value(files: Sequence[Any], path: str) -> Any:
    """Return what the last file that has a dotted setting gives it, of a class its path; None if
    none has."""
    found = None
    for node in files:
        for name in path.split("."):
            below = node if isinstance(node, Mapping) else {}
            arguments = below.get("init_args")
            node = {**(arguments if isinstance(arguments, Mapping) else {}), **below}.get(name)
        if node is not None:
            found = node.get("class_path") if isinstance(node, Mapping) else node
    return found


def _loaded(text: str) -> Any:
    """Return a typed value as the parser reads it: of ``1e-3``, which is a text in YAML 1.1, the
    number."""
    if ODD_NUMBER.match(text):  # to another base in YAML 1.1
        return text if ":" in text else int(text)
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value
    except (yaml.YAMLError, ValueError):
        return text


def _shown(value: Any) -> str:
    """Return a value in the characters that are safe in the name of a file, a class without its
    module."""
    if isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "null"}[value]
    elif isinstance(value, float):
        text = f"{value:g}"
    else:
        text = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", str(value))
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", text)[:MAX_VALUE_CHARACTERS].strip("_.") or "none"


def _named(path: str, value: str) -> str:
    """Return a value after the last part of its setting: ``alpha1``, but ``optimizer_AdamW``."""
    return f"{path.rpartition('.')[2]}{'' if value[0].isdigit() else '_'}{value}"
