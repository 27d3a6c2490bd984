"""A thread that writes for its owner: in order, rows together, and never longer than it may take.

What the owner's thread touches are queues written in C, which a signal in mid-call leaves whole; a ``Condition`` it would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import Any, Generic, TypeVar

T = TypeVar("T")
FULL = 1000
"""Jobs that may wait; an owner who is that far ahead of the store waits for it."""
POLL = 0.1  # seconds between looks at a writer that one waits for


@dataclass(frozen=True)
class _Call:
    function: Callable[[], Any]
    limit: float  # seconds


class Writer(Generic[T]):
    """Runs what it is given in a thread of its own; its owner waits only in :meth:`flush`.

    The first job that raises, or takes longer than it may, is the last one: ``failed`` is told why, and what comes after is dropped.
    The thread begins with :meth:`start`, so that a process can be forked before that, and does not keep the process alive.

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
        failed: Callable[[BaseException], Any],
        *,
        limit: float,
        most: int = 1,
        pause: float = 0.0,
    ) -> None:
        self._write, self._failed = write, failed
        self._limit, self._most, self._pause = limit, most, pause
        self._jobs: SimpleQueue[T | _Call | None] = SimpleQueue()
        self._alarm: SimpleQueue[None] = SimpleQueue()  # somebody waits: no pause
        self._thread: Thread | None = None
        self._closed = False
        self._at_work: tuple[float, float] | None = None  # deadline, and limit, of the job at work
        self._ended = Lock()  # taken once, by the one who ends it

    @property
    def over(self) -> bool:
        """Whether a job failed; nothing is written any more."""
        return self._ended.locked()

    def start(self, *first: tuple[Callable[[], Any], float]) -> None:
        """Begin: functions and the seconds that they may take, then what has been given so far."""
        calls = [_Call(function, limit) for function, limit in first]
        self._thread = Thread(target=self._work, args=(calls,), name="writer", daemon=True)
        self._thread.start()

    def put(self, row: T) -> None:
        """Write ``row``, sooner or later."""
        self._add(row)

    def call(self, function: Callable[[], Any]) -> None:
        """Call ``function`` after all that came before."""
        self._add(_Call(function, self._limit))

    def flush(self) -> None:
        """Wait until all that was given is done, or a job has failed."""
        if self._thread is None or self._closed:
            return
        done: SimpleQueue[None] = SimpleQueue()
        self._jobs.put(_Call(lambda: done.put(None), self._limit))
        self._alarm.put(None)
        while not self._is_stuck():
            with suppress(Empty):
                done.get(timeout=POLL)
                return

    def close(self) -> None:
        """Do what is left and end the thread; what is given after that begins another one."""
        self.flush()
        if self._thread is None or self.over or self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._alarm.put(None)
        self._thread.join()

    def _add(self, job: T | _Call) -> None:
        if self._jobs.qsize() >= FULL:
            self.flush()
        if self._is_stuck():
            return
        self._jobs.put(job)
        if self._closed:
            self._closed = False
            self.start()

    def _is_stuck(self) -> bool:
        at_work = self._at_work
        if at_work is not None and monotonic() > at_work[0]:
            self._end(TimeoutError(f"no answer in {at_work[1]:g} s"))
        return self.over

    def _end(self, error: BaseException) -> None:
        if self._ended.acquire(blocking=False):
            self._failed(error)

    def _work(self, first: Sequence[_Call]) -> None:
        jobs: list[T | _Call | None] = [*first]
        while not self.over:
            for call in self._calls(jobs):
                if call is None or not self._done(call):
                    return
            if self._pause and not all(isinstance(job, _Call) for job in jobs):
                with suppress(Empty):
                    self._alarm.get(timeout=self._pause)
            jobs = [self._jobs.get()]
            with suppress(Empty):
                while True:
                    jobs.append(self._jobs.get_nowait())

    def _calls(self, jobs: Iterable[T | _Call | None]) -> Iterator[_Call | None]:
        """The jobs, with rows that come one after another in one call."""
        rows: list[T] = []
        for job in jobs:
            if job is None or isinstance(job, _Call):
                if rows:
                    yield _Call(partial(self._write, rows), self._limit)
                rows = []
                yield job
                continue
            rows.append(job)
            if len(rows) == self._most:
                yield _Call(partial(self._write, rows), self._limit)
                rows = []
        if rows:
            yield _Call(partial(self._write, rows), self._limit)

    def _done(self, call: _Call) -> bool:
        self._at_work = monotonic() + call.limit, call.limit
        try:
            call.function()
        except BaseException as error:  # whatever it is, it must not end in silence
            self._end(error)
        self._at_work = None
        return not self.over
