"""Functions that write a file as a whole or not at all, such that it survives a loss of power."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO, Any

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # not on Windows


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file of the project's own for writing, and never through a symbolic link to another
    file.

    Args:
        path: the file.
        mode: one of the modes of ``open``.

    Raises:
        OSError: the path is a symbolic link (ELOOP), or cannot be opened.
    """
    text = {} if "b" in mode else {"encoding": "utf-8"}
    return open(
        path, mode, opener=lambda name, flags: os.open(name, flags | NO_FOLLOW, 0o666), **text
    )  # type: ignore[call-overload]


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open_own(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def append_line(path: Path, line: str) -> None:
    """Add a line at the end of a file, and wait until it is on the disk. Part of a line that a loss
    of power left there stays a line of its own."""
    with open_own(path, "a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        separator = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(separator + line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if end == 0:
        sync_folder(path.parent)


def replace(path: Path, data: bytes) -> None:
    """Write a file in place of an earlier one, as a whole or not at all.

    Raises:
        OSError: it cannot be written; the earlier file is then unchanged.
    """
    aside = path.with_name(f".{path.name}.writing")
    try:
        aside.unlink(missing_ok=True)  # a killed process, or somebody with a link, may have left it
        write_synced(aside, data)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a folder with its content, or a file or link of that name, if there is one."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until new and renamed files of a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
