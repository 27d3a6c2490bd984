"""A thread that writes in the background: in order, several rows at a time, and again after an
error.

The owner's thread only uses ``SimpleQueue``, which is written in C and stays consistent when a
signal handler raises in the middle of a call. A ``threading.Condition`` would not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
MAX_WAITING_JOBS = 1000
"""Jobs that may wait for a store that works; the owner then waits until they are done."""
POLL_SECONDS = 0.1  # between two checks while the owner waits
# from a first failure to the next try; doubled after each further failure
FIRST_RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 60.0
HURRIED_RETRY_SECONDS = 1.0  # from a failure to the next try while the owner waits


class AwakeTimer:
    """A timer that counts the seconds in which this process ran.

    A pause of the process (SIGSTOP, a closed lid) between two calls of :meth:`seconds` counts as
    ``step`` seconds at most.

    Args:
        step: seconds that one call may add. With rarer calls the timer counts too little, never too
            much.
    """

    def __init__(self, step: float = 10 * POLL_SECONDS) -> None:
        self._step = step
        self.restart()

    def restart(self) -> None:
        """Count from zero again."""
        self._seconds, self._last = 0.0, monotonic()

    def seconds(self) -> float:
        """Return the seconds since the start."""
        now = monotonic()
        self._seconds += min(now - self._last, self._step)
        self._last = now
        return self._seconds


@dataclass(frozen=True)
class _Call:
    function: Callable[[], Any]
    limit: float  # seconds that the owner waits for it
    kind: Literal["in order", "optional", "marker"] = "in order"


class Writer(Generic[T]):
    """A thread that writes rows and makes calls for its owner.

    The owner waits for it only in :meth:`flush` and :meth:`close`. When a row or a call raises, it
    is tried again after a growing pause, and everything that was given after it waits; so nothing
    is lost while a store is unreachable. A call that takes long delays nobody, since the owner
    stops waiting for it. An *optional* call that raises is put aside and tried again when the
    writer is flushed. The thread begins with :meth:`start`, so the process can be forked before
    that, and it does not keep the process alive.

    Args:
        write: a function that writes rows, oldest first. After an error it gets the same rows
            again, perhaps with more behind them.
        failed: a function that is called with the error when trouble begins, and not again before
            ``recovered`` has been called.
        recovered: a function that is called when something could be written again.
        limit: seconds that the owner waits for one call of ``write``.
        max_rows: rows that ``write`` gets at a time.
        pause: least number of seconds between two writes, in which rows gather.
    """

    def __init__(
        self,
        write: Callable[[Sequence[T]], Any],
        failed: Callable[[BaseException], Any],
        recovered: Callable[[], Any] = lambda: None,
        *,
        limit: float,
        max_rows: int = 1,
        pause: float = 0.0,
    ) -> None:
        self._write, self._failed, self._recovered = write, failed, recovered
        self._limit, self._max_rows, self._pause = limit, max_rows, pause
        self._jobs: SimpleQueue[T | _Call | None] = SimpleQueue()
        # jobs that were taken from the queue and are not done; only the thread touches it
        self._backlog: deque[T | _Call | None] = deque()
        self._aside: list[_Call] = []  # optional calls that failed
        # an entry ends a pause, since the owner waits
        self._alarm: SimpleQueue[None] = SimpleQueue()
        self._thread: Thread | None = None
        self._closed = self._abandoned = False
        self._hurry = False
        self._at_work: _Call | None = None
        self._watched: _Call | None = None  # the call that the owner has seen at work
        self._watched_timer = AwakeTimer(step=5.0)
        self._given = self._written = 0  # rows
        # calls; failures since the last success
        self._successes = self._failures = self._in_a_row = 0
        self.in_trouble = False
        self.error: BaseException | None = None
        """The last error."""

    @property
    def waiting(self) -> int:
        """Rows that are not known to be written."""
        return self._given - self._written

    @property
    def put_aside(self) -> int:
        """Optional calls that failed."""
        return len(self._aside)

    def start(self, *first: tuple[Callable[[], Any], float]) -> None:
        """Start the thread.

        Args:
            first: functions to call before anything else, each until it succeeds, and the seconds
                that the owner waits for it.
        """
        self._backlog.extendleft(_Call(function, limit) for function, limit in reversed(first))
        self._thread = Thread(target=self._work, name="writer", daemon=True)
        self._thread.start()

    def put(self, row: T) -> None:
        """Give the thread a row to write."""
        self._given += 1
        self._add(row)

    def call(self, function: Callable[[], Any], *, optional: bool = False) -> None:
        """Give the thread a function to call after all that was given before.

        Args:
            function: the function.
            optional: whether the thread goes on with the next job when the function raises.
        """
        self._add(_Call(function, self._limit, "optional" if optional else "in order"))

    def flush(self) -> bool:
        """Wait until everything that was given is done; return False if it fails or takes too long.

        A job that fails meanwhile is tried once more. If jobs were failing before, they get one
        try.
        """
        if self._thread is None or self._closed:
            return True
        done: SimpleQueue[None] = SimpleQueue()
        allowed, failures, successes = 1 if self.in_trouble else 2, self._failures, self._successes
        waited = AwakeTimer()
        self._hurry = True
        self._jobs.put(_Call(lambda: done.put(None), self._limit, "marker"))
        self._alarm.put(None)
        try:
            while True:
                with suppress(Empty):
                    done.get(timeout=POLL_SECONDS)
                    return True
                if self._successes != successes:
                    allowed, failures, successes = 2, self._failures, self._successes
                    waited.restart()
                elif self._failures - failures >= allowed:
                    return False
                limit = at_work.limit if (at_work := self._at_work) else self._limit
                if waited.seconds() > limit:
                    self._report(TimeoutError(f"no answer in {limit:g} s"))
                    return False
        finally:
            self._hurry = False

    def close(self) -> bool:
        """Wait as :meth:`flush` does, end the thread, and return whether everything is done.

        A job that is given after that starts another thread.
        """
        drained = self.flush()
        if self._thread is None or self._closed:
            return drained
        self._closed, self._abandoned = True, not drained
        self._jobs.put(None)
        self._alarm.put(None)
        if drained:
            self._thread.join()
        return drained

    def _add(self, job: T | _Call) -> None:
        self._report_slow_call()
        if self._jobs.qsize() >= MAX_WAITING_JOBS and not self.in_trouble:
            self.flush()
        self._jobs.put(job)
        if self._closed and not self._abandoned:
            self._closed = False
            self.start()

    def _report_slow_call(self) -> None:
        """Report a call that takes longer than its limit as trouble."""
        at_work = self._at_work
        if at_work is not self._watched:
            self._watched = at_work
            self._watched_timer.restart()
        if at_work is not None and self._watched_timer.seconds() > at_work.limit:
            self._report(TimeoutError(f"no answer in {at_work.limit:g} s"))

    def _report(self, error: BaseException) -> None:
        self.error = error
        if not self.in_trouble:
            self.in_trouble = True
            self._failed(error)

    def _work(self) -> None:
        while not self._abandoned:
            if not self._backlog:
                self._backlog.append(self._jobs.get())
            with suppress(Empty):
                while True:
                    self._backlog.append(self._jobs.get_nowait())
            job = self._backlog[0]
            if job is None:
                self._backlog.popleft()
                if not self._backlog:
                    return
            elif isinstance(job, _Call):
                self._do_call(job)
            else:
                self._do_rows()

    def _do_call(self, call: _Call) -> None:
        if call.kind == "marker":
            aside, self._aside = self._aside, []
            self._aside = [each for each in aside if not self._succeeds(each)]
            call.function()
        elif not self._succeeds(call):
            if call.kind == "in order":
                self._back_off()
                return
            self._aside.append(call)
        self._backlog.popleft()

    def _do_rows(self) -> None:
        first = islice(self._backlog, self._max_rows)
        rows: Any = list(
            takewhile(lambda job: job is not None and not isinstance(job, _Call), first)
        )
        if not self._succeeds(_Call(lambda: self._write(rows), self._limit)):
            self._back_off()
            return
        self._written += len(rows)
        for _ in rows:
            self._backlog.popleft()
        if self._pause and not self._backlog:
            self._sleep(self._pause)

    def _succeeds(self, call: _Call) -> bool:
        self._at_work = call
        try:
            call.function()
        except BaseException as error:  # no exception of any kind may end the thread silently
            if call.kind == "optional":
                self.error = error
            else:
                self._failures += 1
                self._in_a_row += 1
                self._report(error)
            return False
        finally:
            self._at_work = None
        self._successes += 1
        self._in_a_row = 0
        if self.in_trouble and not self._abandoned:
            self.in_trouble = False
            self._recovered()
        return True

    def _back_off(self) -> None:
        pause = min(FIRST_RETRY_SECONDS * 2 ** (self._in_a_row - 1), MAX_RETRY_SECONDS)
        self._sleep(pause, hurried=HURRIED_RETRY_SECONDS)

    def _sleep(self, seconds: float, hurried: float = 0.0) -> None:
        """Sleep until the time is over or the owner waits; ``hurried`` seconds if it waits
        already."""
        with suppress(Empty):
            while True:
                self._alarm.get_nowait()
        with suppress(Empty):
            self._alarm.get(timeout=hurried if self._hurry else seconds)
