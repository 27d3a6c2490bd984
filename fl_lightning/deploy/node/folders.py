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
from fl_lightning.errors import InputError

log = logging.getLogger("fl_lightning")


def own_folder(folder: Path) -> Path:
    """Make a node's folder, and return its absolute path.

    Raises:
        InputError: it cannot be made.
    """
    try:
        folder.absolute().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder.absolute()


def _unusable(folder: Path, error: OSError) -> InputError:
    return InputError(
        f"--folder {folder}",
        f"it cannot be made or written ({error.strerror or error})",
        "name a folder that this user may write to",
    )


@contextmanager
def socket_for(folder: Path) -> Iterator[Path]:
    """Yield the path of a node's socket: in its folder, or where that is too long for a socket elsewhere."""
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
    try:
        lock.acquire()
    except Timeout:
        raise InputError(
            f"--folder {folder}", "another node has this folder", "end it, or give this one another folder"
        ) from None
    except NotImplementedError:
        log.warning("%s: this file system has no locks; start one node alone with this folder", folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        yield
    finally:
        lock.release()
