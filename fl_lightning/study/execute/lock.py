"""One sweep per study, or per shard of it, at a time, and none before the cells of one that was
killed have stopped.

A sweep of the whole study holds its locks alone. Shards share them, and each has two of its own.
All are locks of ``flock`` and not of ``filelock``: that cannot share a lock, and when it releases
one it unlocks the file for the processes that inherited the descriptor as well. Here descriptors
are closed only, and the processes of the cells keep what they have inherited.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_lightning.errors import InputError, as_bad_input, require
from fl_lightning.study.execute.shards import WHOLE, Shard
from fl_lightning.support.disk import NO_FOLLOW

log = logging.getLogger("fl_lightning")

ORPHANS_LIMIT = 90.0
"""Seconds that cells whose sweep was killed have to write their checkpoints."""
FILES_LIMIT = 180.0
"""Seconds to wait for another shard that writes the files of the study or waits for such cells."""
POLL = 0.2
"""Seconds between two attempts."""


@contextmanager
def only_one(folder: Path, shard: Shard = WHOLE) -> Iterator[list[int]]:
    """Hold the locks of a study, or of one shard of it.

    Yields:
        the file descriptors that the processes of the cells must inherit: a lock is held as long as
            one of them lives, also when the sweep itself was killed.

    Raises:
        InputError: another process works on this study or shard, or shards of another number do.
    """
    with as_bad_input(f"{folder}", "it cannot be written", "name another --root", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    held: list[int] = []
    try:
        if shard.is_whole:
            _take(
                held,
                folder / ".sweep.lock",
                refusal(folder, "another process is running this study"),
            )
            _wait_for_cells(held, folder / ".cells.lock")
            yield held[1:]
        else:
            with one_writer(folder, shard):
                _take_shared(held, folder, shard)
                own = f"shard-{shard.number}-of-{shard.count}"
                taken = refusal(folder, f"another process is running shard {shard}")
                _take(held, folder / f".{own}.lock", taken)
                _wait_for_cells(held, folder / f".{own}.cells.lock")
            yield [held[1], held[3]]
    finally:
        for descriptor in held:
            os.close(descriptor)


def refusal(folder: Path, rule: str) -> InputError:
    return InputError(f"{folder}", rule, "wait for it, or end it with Ctrl-C")


@contextmanager
def one_writer(folder: Path, shard: Shard) -> Iterator[None]:
    """Keep other shards from writing files of the study's folder; a sweep of the whole study is
    alone."""
    held: list[int] = []
    try:
        if not shard.is_whole:
            busy = InputError(
                f"{folder}", "another shard does not let go of its files", "start it again"
            )
            _take(held, folder / ".files.lock", busy, seconds=FILES_LIMIT)
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def _take_shared(held: list[int], folder: Path, shard: Shard) -> None:
    """Take the locks of the whole study together with other shards of the same number.

    The first shard waits for the cells of whatever sweep was killed before it, and writes down the
    number of shards. :func:`one_writer` makes sure that no two are the first.
    """
    sweep, cells = folder / ".sweep.lock", folder / ".cells.lock"
    try:
        _take(held, sweep, BlockingIOError())
    except BlockingIOError:
        _take(held, sweep, refusal(folder, "another process is running this study"), shared=True)
        count = int(os.pread(held[0], 20, 0) or shard.count)
        rule = f"its shards that run now are {count}"
        instead = f"write --shard 1/{count}, or wait for them"
        require(count == shard.count, f"{folder}: --shard {shard}", rule, instead)
        _wait_for_cells(held, cells, shared=True)
        return
    _wait_for_cells(held, cells)
    os.ftruncate(held[0], 0)
    os.pwrite(held[0], str(shard.count).encode(), 0)
    for descriptor in held:
        _flock(descriptor, shared=True)


def _wait_for_cells(held: list[int], path: Path, *, shared: bool = False) -> None:
    """Take a lock once no cell of a sweep that was killed holds it."""
    end_them = InputError(
        f"{path.parent}", "runs of a sweep that was killed do not end", "end them, then start again"
    )
    told = "waiting for the runs of a sweep that was killed to write their checkpoints"
    _take(held, path, end_them, seconds=ORPHANS_LIMIT, told=told, shared=shared)


def _take(
    held: list[int],
    path: Path,
    refused: Exception,
    *,
    seconds: float = 0.0,
    told: str = "",
    shared: bool = False,
) -> None:
    """Lock a file and add its descriptor to ``held``.

    Args:
        held: the descriptors that are held.
        path: the file; it is never opened through a symbolic link.
        refused: what is raised if another process holds it longer than ``seconds``.
        seconds: how long to wait for it.
        told: what is logged when it has to be waited for.
        shared: whether others may hold it too, as long as none holds it alone.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o644)
    deadline = time.monotonic() + seconds
    try:
        while not _flock(descriptor, shared=shared):
            if time.monotonic() >= deadline:
                raise refused
            if told:
                log.warning(told)
                told = ""
            time.sleep(POLL)
    except BaseException:
        os.close(descriptor)
        raise
    held.append(descriptor)


def _flock(descriptor: int, *, shared: bool) -> bool:
    """Lock an open file if nobody else has it; on a platform or file system without locks, do
    nothing."""
    try:
        import fcntl

        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError) as error:
        log.warning(
            "this file system has no locks (%s); start every sweep or shard once only", error
        )
    return True
