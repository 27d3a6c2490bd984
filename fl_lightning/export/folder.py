"""The folder of an export: it appears when it is whole, and nothing is overwritten unasked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE
from tempfile import TemporaryDirectory

from fl_lightning.errors import as_bad_input, require
from fl_lightning.run.directory import read_json

SUMMARY = "export.json"


NEW = "write the name of a new folder"


def check_folder(folder: str | Path, overwrite: bool) -> Path:
    """Return the folder to write, or refuse it; nothing is created.

    Raises:
        InputError: it is a file, or holds something that is not to be overwritten.
    """
    require(folder, "export without --to", "it writes a folder", "write --to FOLDER")
    path = Path(os.path.expanduser(folder))
    with as_bad_input(f"--to {path}", "it cannot be written", NEW):
        there = path.exists() and (not path.is_dir() or any(path.iterdir()))
    require(not there or path.is_dir(), f"--to {folder}", "it is a file", NEW)
    require(
        not there or overwrite,
        f"--to {folder}",
        "the folder exists and is not empty",
        f"{NEW}, or --overwrite true",
    )
    return path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``path``, whose files are moved to ``path`` when the block has
    ended.

    The files that an export wrote to ``path`` before are removed; other files there stay.

    Raises:
        InputError: the folder cannot be written.
    """
    with as_bad_input(f"--to {path}", "it cannot be written", NEW):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.absolute().parent) as aside:
            yield Path(aside)
            path.mkdir(exist_ok=True)
            usual = Path(aside, ".usual")  # safetensors' files can be read by their owner alone
            usual.touch()
            mode = S_IMODE(usual.stat().st_mode)
            usual.unlink()
            for name in read_json(path / SUMMARY).get("files", []):
                if isinstance(name, str) and (path / name).resolve().is_relative_to(path.resolve()):
                    (path / name).unlink(missing_ok=True)
            for file in [found for found in Path(aside).rglob("*") if found.is_file()]:
                target = path / file.relative_to(aside)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.chmod(mode)
                shutil.move(file, target)
