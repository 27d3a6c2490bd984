"""Files that are there as a whole or not at all, and stay when the power goes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO, Any

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # not on Windows


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file for writing, in one of ``open``'s modes, and never through a symbolic link: what that
    points to is not ours.

    Raises:
        OSError: the path is a symbolic link (ELOOP), or cannot be opened.
    """
    text = {} if "b" in mode else {"encoding": "utf-8"}
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | NO_FOLLOW, 0o666), **text)  # type: ignore[call-overload]


def write_synced(path: Path, data: bytes) -> None:
    with open_own(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of a file, at once or not at all."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        aside.unlink(missing_ok=True)  # of a process that was killed, or a link that somebody put there
        write_synced(aside, data)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or a link or file that has its name, if there is one."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
