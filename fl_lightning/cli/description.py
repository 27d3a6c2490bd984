"""A description of a command's settings in the user's cache folder, which can be read without
torch.

The first call of a command writes it, from the command's parser. It holds for one state of the
package and of what is installed beside it; after any change it is written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fl_lightning.cli.callbacks_module import OURS
from fl_lightning.cli.refusals import Setting
from fl_lightning.config.constraints import Constraint

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Description:
    """What can be written on the command line of one command.

    Args:
        settings: the settings of its parser, by dotted name.
        of_classes: dotted settings of the classes that may be named, such as ``model.alpha``.
        bases: of each class whose subclasses may be named, their import paths by their short names;
            empty for a name that cannot be built or that two classes have.
        classes: the settings of each of these classes, by its import path.
        switches: flags that need no value.
        takes_words: whether words that are not flags are allowed.
        names: the names that a constraint takes from a function, by the function.
    """

    settings: Mapping[str, Setting]
    of_classes: tuple[str, ...] = ()
    bases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    classes: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    takes_words: bool = False
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_description(command: str) -> Description | None:
    """Return the description of a command, or None if there is none of the present state of the
    package."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        found = json.loads(_file(command).read_text(encoding="utf-8"))
        if found.pop("state") == _state():
            found["settings"] = _settings(found["settings"])
            found["classes"] = {path: _settings(own) for path, own in found["classes"].items()}
            return Description(**found)
    return None


def write_description(command: str, description: Description) -> None:
    """Keep the description of a command for later calls; where that cannot be, nothing happens."""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        file = _file(command)
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps({"state": _state(), **asdict(description)}), encoding="utf-8")
        new.replace(file)


def _settings(described: Mapping[str, Any]) -> dict[str, Setting]:
    """Return settings as they were before JSON made lists of their tuples."""
    return {name: _setting(one) for name, one in described.items()}


def _setting(described: dict[str, Any]) -> Setting:
    found = {
        **described,
        "choices": tuple(described["choices"]),
        "takes": tuple(described["takes"]),
    }
    if constraint := described["constraint"]:
        found["constraint"] = Constraint(**{**constraint, "names": tuple(constraint["names"])})
    return Setting(**found)


def _file(command: str) -> Path:
    """Return the file of a command: one for each place of the package and each environment."""
    place = hashlib.sha256(f"{PACKAGE} {sys.prefix}".encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fl_lightning" / f"{command}-{place}.json"


@cache
def _state() -> str:
    """Return a hash of the package's files, by size and time, and of all packages that are
    installed.

    It is taken once, since libraries that are imported add folders to ``sys.path``.
    """
    files = [
        (path.path, found.st_size, found.st_mtime_ns)
        for root in (PACKAGE, OURS)
        for path in _python_files(root)
        for found in [path.stat()]
    ]
    installed = {
        name
        for folder in sys.path
        if Path(folder or ".").resolve() != Path.cwd() and Path(folder).is_dir()
        for name in os.listdir(folder)
        if name.endswith((".dist-info", ".egg-info"))
    }
    return hashlib.sha256(
        repr((sys.version, sorted(files), sorted(installed))).encode()
    ).hexdigest()


def _python_files(root: Path) -> list[os.DirEntry[str]]:
    found: list[os.DirEntry[str]] = []
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir():
                found += _python_files(Path(entry.path))
            elif entry.name.endswith(".py"):
                found.append(entry)
    return found
