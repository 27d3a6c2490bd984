"""One sweep per study at a time, and none before the cells of one that was killed have stopped."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fl_lightning.errors import InputError
from fl_lightning.support.disk import NO_FOLLOW

log = logging.getLogger("fl_lightning")

ORPHANS_LIMIT = 90.0
"""Seconds that cells whose sweep was killed have to write their checkpoints."""
POLL = 0.2
"""Seconds between two attempts."""


@contextmanager
def only_one(folder: Path) -> Iterator[list[int]]:
    """Hold the study's locks.

    Yields:
        the file descriptors that the processes of the cells must inherit: a lock is held as long as one of
            them
        lives, also when the sweep itself was killed.

    Raises:
        InputError: another process works on this study.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".sweep.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        given, rule = f"{folder}", "another process is running this study"
        raise InputError(given, rule, "wait for it, or end it with Ctrl-C") from None
    try:
        cells = _lock_of_cells(folder / ".cells.lock")
        try:
            yield [cells]
        finally:
            os.close(cells)
    finally:
        lock.release()


def _lock_of_cells(path: Path) -> int:
    """Return a descriptor that holds the lock once no cell of an earlier sweep holds it.

    ``filelock`` cannot do this: when it releases a lock it unlocks the file, for the processes that inherited
    the descriptor as well. Here the descriptor is closed only, and they keep the lock.
    """
    cells = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o644)
    try:
        import fcntl
    except ImportError:  # a platform without such locks
        return cells
    deadline, told = time.monotonic() + ORPHANS_LIMIT, False
    while True:
        try:
            fcntl.flock(cells, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cells
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(cells)
                rule = "runs of a sweep that was killed do not end"
                raise InputError(f"{path.parent}", rule, "end them, then start again") from None
            if not told:
                log.warning("waiting for the runs of a sweep that was killed to write their checkpoints")
            told = True
            time.sleep(POLL)
