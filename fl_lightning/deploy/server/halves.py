"""Which half of a deployment is still there: the command, and the server's half that Flower runs.

Each holds a lock on a file of the job's folder while it lives, which ends with its process, however
that ends. Process ids would not do, since the two may be in containers of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger("fl_lightning")
COMMAND, SERVER = "command.lock", "server.lock"
LOCK_SECONDS = 10.0  # that a half waits for its lock, which the other may be looking at


@contextmanager
def here(folder: Path, half: str) -> Iterator[None]:
    """Say within the block that a half is there.

    Args:
        folder: of the job.
        half: ``COMMAND`` or ``SERVER``.
    """
    lock = FileLock(folder / half, timeout=LOCK_SECONDS)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # a file system without locks
        log.warning("%s cannot be locked (%s)", folder / half, error)
    try:
        yield
    finally:
        lock.release()


def is_gone(folder: Path, half: str) -> bool:
    """Return whether a half was there and is not any more; false where nobody can know."""
    if not (folder / half).exists():
        return False
    lock = FileLock(folder / half, timeout=0)
    try:
        lock.acquire()
    except (Timeout, OSError, NotImplementedError):
        return False
    lock.release()
    return True
