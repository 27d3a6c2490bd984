"""A thread that writes for its owner: in order, rows together, and again where it failed, while the owner
goes on.

What the owner's thread touches are queues written in C, which a signal in mid-call leaves whole; a
``Condition`` it would not.
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
FULL = 1000
"""Jobs that may wait; an owner who is that far ahead of a store that works waits for it."""
POLL = 0.1  # seconds between looks at a writer that one waits for
FIRST_RETRY, LAST_RETRY = (
    5.0,
    60.0,
)  # seconds from a failure to the next try: doubled each time, up to the latter
RETRY_AT_END = 1.0  # seconds, where somebody waits: what fails for the first time then is tried once more


class AwakeTimer:
    """Seconds that have passed while this process ran: a pause (SIGSTOP, a closed lid) between two looks
    counts as ``step`` at most.

    Args:
        step: seconds that one look may add. Who looks less often counts too little, never too much.
    """

    def __init__(self, step: float = 10 * POLL) -> None:
        self._step = step
        self.restart()

    def restart(self) -> None:
        self._seconds, self._last = 0.0, monotonic()

    def seconds(self) -> float:
        """Look: seconds since the start."""
        now = monotonic()
        self._seconds += min(now - self._last, self._step)
        self._last = now
        return self._seconds


@dataclass(frozen=True)
class _Call:
    function: Callable[[], Any]
    limit: float  # seconds that one who waits for it waits
    kind: Literal["in order", "optional", "marker"] = "in order"


class Writer(Generic[T]):
    """Runs what it is given in a thread of its own; its owner waits only in :meth:`flush` and :meth:`close`.

    A row or a call that raises is tried again, after a pause that grows, and all that was given after it
    waits; so nothing is lost while a store is away. A call that takes long delays nobody: the owner only
    stops waiting for it. An *optional* call that raises is put aside and tried again when the writer is
    flushed. The thread begins with :meth:`start`, so that a process can be forked before that, and does not
    keep the process alive.

    Args:
        write: takes rows, oldest first. It is given the same rows again after it raised, and maybe more.
        failed: called with the error when trouble begins; not again before ``recovered`` was.
        recovered: called when something could be written after that.
        limit: seconds that one who waits gives ``write``.
        most: rows that it takes at a time.
        pause: seconds at least between two writes, in which rows gather.
    """

    def __init__(
        self,
        write: Callable[[Sequence[T]], Any],
        failed: Callable[[BaseException], Any],
        recovered: Callable[[], Any] = lambda: None,
        *,
        limit: float,
        most: int = 1,
        pause: float = 0.0,
    ) -> None:
        self._write, self._failed, self._recovered = write, failed, recovered
        self._limit, self._most, self._pause = limit, most, pause
        self._jobs: SimpleQueue[T | _Call | None] = SimpleQueue()
        self._backlog: deque[T | _Call | None] = (
            deque()
        )  # taken from the queue and not done; the thread's own
        self._aside: list[_Call] = []  # optional calls that failed
        self._alarm: SimpleQueue[None] = SimpleQueue()  # somebody waits: no pause
        self._thread: Thread | None = None
        self._closed = self._abandoned = False
        self._hurry = False
        self._at_work: _Call | None = None
        self._since = AwakeTimer(step=5.0)  # how long that is at work, as far as the owner has looked
        self._looked_at: _Call | None = None
        self._given = self._written = 0  # rows
        self._successes = self._failures = self._in_a_row = 0  # calls; failures since the last success
        self.in_trouble = False
        self.error: BaseException | None = None
        """The last one."""

    @property
    def waiting(self) -> int:
        """Rows that are not known to be written."""
        return self._given - self._written

    @property
    def put_aside(self) -> int:
        """Optional calls that failed."""
        return len(self._aside)

    def start(self, *first: tuple[Callable[[], Any], float]) -> None:
        """Begin: functions, each tried until it succeeds, and the seconds to wait for it; then what has been
        given so far."""
        self._backlog.extendleft(_Call(function, limit) for function, limit in reversed(first))
        self._thread = Thread(target=self._work, name="writer", daemon=True)
        self._thread.start()

    def put(self, row: T) -> None:
        """Write ``row``, sooner or later."""
        self._given += 1
        self._add(row)

    def call(self, function: Callable[[], Any], *, optional: bool = False) -> None:
        """Call ``function`` after all that came before; an optional one holds up nothing where it fails."""
        self._add(_Call(function, self._limit, "optional" if optional else "in order"))

    def flush(self) -> bool:
        """Wait until all that was given is done; returns False when it could not be done, or takes too long.

        What fails meanwhile is tried once more; what was failing before gets one try.
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
                    done.get(timeout=POLL)
                    return True
                if self._successes != successes:
                    allowed, failures, successes = 2, self._failures, self._successes
                    waited.restart()
                elif self._failures - failures >= allowed:
                    return False
                limit = at_work.limit if (at_work := self._at_work) else self._limit
                if waited.seconds() > limit:
                    self._trouble(TimeoutError(f"no answer in {limit:g} s"))
                    return False
        finally:
            self._hurry = False

    def close(self) -> bool:
        """Do what is left and end the thread; what is given after that begins another one. Returns what
        :meth:`flush` does."""
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
        self._look()
        if self._jobs.qsize() >= FULL and not self.in_trouble:
            self.flush()
        self._jobs.put(job)
        if self._closed and not self._abandoned:
            self._closed = False
            self.start()

    def _look(self) -> None:
        """Tell, once, of a call that takes longer than anybody would wait for it."""
        at_work = self._at_work
        if at_work is not self._looked_at:
            self._looked_at = at_work
            self._since.restart()
        if at_work is not None and self._since.seconds() > at_work.limit:
            self._trouble(TimeoutError(f"no answer in {at_work.limit:g} s"))

    def _trouble(self, error: BaseException) -> None:
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
        first = islice(self._backlog, self._most)
        rows: Any = list(takewhile(lambda job: job is not None and not isinstance(job, _Call), first))
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
        except BaseException as error:  # whatever it is, it must not end in silence
            if call.kind == "optional":
                self.error = error
            else:
                self._failures += 1
                self._in_a_row += 1
                self._trouble(error)
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
        self._sleep(min(FIRST_RETRY * 2 ** (self._in_a_row - 1), LAST_RETRY), hurried=RETRY_AT_END)

    def _sleep(self, seconds: float, hurried: float = 0.0) -> None:
        """Until then, or until somebody waits; where somebody does already, ``hurried`` seconds."""
        with suppress(Empty):
            while True:
                self._alarm.get_nowait()
        with suppress(Empty):
            self._alarm.get(timeout=hurried if self._hurry else seconds)
