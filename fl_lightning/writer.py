"""A thread that writes for its owner: in order, rows together, and never longer than it may take.

What the owner's thread touches are queues written in C, which a signal in mid-call leaves whole; a ``Condition`` it would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Job = tuple[Callable[[], Any], float]
FULL = 1000
"""Jobs that may wait; an owner who is that far ahead of the store waits for it."""
POLL = 0.1  # seconds between looks at a writer that one waits for


class Writer(Generic[T]):
    """Runs what it is given in a thread of its own; its owner waits only in :meth:`flush`.

    The first job that raises, or takes longer than it may, is the last one: ``failed`` is told why, and what comes after is dropped.
    The thread begins with the first job, so that a process can be forked before that, and does not keep the process alive.

    Args:
        write: takes rows, oldest first.
        failed: called once, with the error.
        limit: seconds that ``write`` may take.
        most: rows that it takes at a time.
        pause: seconds at least between two writes, in which rows gather.
    """

    def __init__(
        self,
        write: Callable[[Sequence[T]], Any],
        failed: Callable[[Exception], Any],
        *,
        limit: float,
        most: int = 1,
        pause: float = 0.0,
    ) -> None:
        self._write, self._failed = write, failed
        self._limit, self._most, self._pause = limit, most, pause
        self._jobs: SimpleQueue[T | Job | None] = SimpleQueue()
        self._alarm: SimpleQueue[None] = SimpleQueue()  # somebody waits: no pause
        self._thread: Thread | None = None
        self._deadline: float | None = None  # of the job that is at work
        self._ended = Lock()  # taken once, by the one who ends it

    @property
    def over(self) -> bool:
        """Whether a job failed; nothing is written any more."""
        return self._ended.locked()

    def put(self, row: T) -> None:
        """Write ``row``, sooner or later."""
        self._add(row)

    def call(self, function: Callable[[], Any], limit: float | None = None) -> None:
        """Call ``function`` after all that came before, in at most ``limit`` seconds."""
        self._add((function, self._limit if limit is None else limit))

    def flush(self) -> None:
        """Wait until all that was given is done, or a job has failed."""
        done: SimpleQueue[None] = SimpleQueue()
        self._give((lambda: done.put(None), self._limit))
        self._alarm.put(None)
        while not self._is_stuck():
            with suppress(Empty):
                return done.get(timeout=POLL)

    def close(self) -> None:
        """Do what is left and end the thread; the next job begins another one."""
        self.flush()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _add(self, job: T | Job) -> None:
        if self._jobs.qsize() >= FULL:
            self.flush()
        self._give(job)

    def _give(self, job: T | Job) -> None:
        if self._is_stuck():
            return
        if self._thread is None:
            self._thread = Thread(target=self._work, name="writer", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _is_stuck(self) -> bool:
        deadline = self._deadline
        if deadline is not None and monotonic() > deadline:
            self._end(TimeoutError("no answer in time"))
        return self.over

    def _end(self, error: Exception) -> None:
        if self._ended.acquire(blocking=False):
            self._failed(error)

    def _work(self) -> None:
        while (first := self._jobs.get()) is not None:
            jobs = [first, *self._waiting()]
            for is_call, group in groupby(jobs, key=lambda job: isinstance(job, tuple) and callable(job[0])):
                ...

    def _waiting(self) -> Iterator[Any]:
        with suppress(Empty):
            while True:
                yield self._jobs.get_nowait()
