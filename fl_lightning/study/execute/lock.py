"""One sweep per study at a time, and none before the cells of one that was killed have stopped."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_lightning.errors import InputError
from fl_lightning.support.disk import NO_FOLLOW

log = logging.getLogger("fl_lightning")

PATIENCE = 90.0  # seconds for cells whose sweep was killed to write their checkpoints


@contextmanager
def only_one(folder: Path) -> Iterator[list[int]]:
    """Hold the study's lock; yields the file descriptors that its processes shall keep open, which says that
    they live.

    Raises:
        InputError: another process is at this study.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # a platform without locks
        yield []
        return
    sweep, cells = (
        os.open(folder / name, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o644)
        for name in (".sweep.lock", ".cells.lock")
    )
    try:
        try:
            fcntl.flock(sweep, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder}", "another process is running this study", "wait for it, or end it with Ctrl-C"
            ) from None
        deadline, said = time.monotonic() + PATIENCE, False
        while True:
            try:
                fcntl.flock(cells, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"{folder}",
                        "runs of a sweep that was killed do not end",
                        "end them, then start again",
                    ) from None
                if not said:
                    log.warning("waiting for the runs of a sweep that was killed to write their checkpoints")
                said = True
                time.sleep(0.2)
        yield [cells]
    finally:
        os.close(cells)
        os.close(sweep)
