"""Which command a file is for, and the folder of a study: both can be told without importing
torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fl_lightning.config.near_names import nearest_or_list
from fl_lightning.errors import InputError, require

COMMAND_OF_KEY = {"model": "fit", "trainer": "fit", "space": "tune", "methods": "sweep"}
COMMAND_OF_KIND = {"study file": "sweep", "search file": "tune"}


def check_kind(path: Path, keys: Collection[str], kind: str) -> None:
    """Refuse a file that is for another command.

    Args:
        path: the file.
        keys: its keys.
        kind: what it should be.
    """
    own = COMMAND_OF_KIND[kind]
    other = next((command for key, command in COMMAND_OF_KEY.items() if key in keys), own)
    instead = f"write python -m fl_lightning {other} --config {path}"
    require(other == own, f"{path}", f"it is no {kind}, but one for {other}", instead)


def is_study_file(study: str) -> bool:
    """Return whether ``--study`` names a file and not a folder of runs."""
    return Path(study).suffix in (".yaml", ".yml") or Path(study).is_file()


def folder_of(study: str, root: Path, must_exist: bool = True) -> Path:
    """Return the folder of a study's runs.

    Args:
        study: the name of the study, or the folder itself.
        root: where folders of studies are.
        must_exist: whether a folder that is not there is refused.

    Raises:
        InputError: there is none.
    """
    folder = next((folder for folder in (root / study, Path(study)) if folder.is_dir()), None)
    if folder is None and must_exist:
        known = (
            sorted(entry.name for entry in root.iterdir() if entry.is_dir())
            if root.is_dir()
            else []
        )
        instead = (
            f"write --study {nearest_or_list(study, known)}" if known else "name another --root"
        )
        rule = f"it is the name of a study in {root}, a study's YAML file, or a folder of runs"
        raise InputError(f"--study {study}", rule, instead)
    return folder or root / study
