"""The folder of a node: it can be written, and one node alone has it."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fl_lightning.deploy.node import sockets
from fl_lightning.errors import InputError, as_bad_input

log = logging.getLogger("fl_lightning")

UNUSABLE = "it cannot be made or written", "name a folder that this user may write to"


def own_folder(folder: Path) -> Path:
    """Make a node's folder, and return its absolute path.

    Raises:
        InputError: it cannot be made.
    """
    with as_bad_input(f"--folder {folder}", *UNUSABLE):
        folder.absolute().mkdir(parents=True, exist_ok=True)
    return folder.absolute()


@contextmanager
def socket_for(folder: Path) -> Iterator[Path]:
    """Yield the path of a node's socket: in its folder, or where that is too long for a socket
    elsewhere."""
    path = folder / "node.sock"
    if len(os.fsencode(path)) <= sockets.MAX_PATH_BYTES:
        yield path
    else:
        with tempfile.TemporaryDirectory(prefix="fl-node-") as short:
            yield Path(short) / "node.sock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other nodes from a node's folder within the block; the lock ends with the process.

    Raises:
        InputError: another node has it, or it cannot be written.
    """
    lock = FileLock(folder / ".node.lock", timeout=0)
    with as_bad_input(f"--folder {folder}", *UNUSABLE):
        try:
            lock.acquire()
        except Timeout:
            instead = "end it, or give this one another folder"
            raise InputError(
                f"--folder {folder}", "another node has this folder", instead
            ) from None
        except NotImplementedError:
            log.warning(
                "%s: this file system has no locks; start one node alone with this folder", folder
            )
    try:
        yield
    finally:
        lock.release()
