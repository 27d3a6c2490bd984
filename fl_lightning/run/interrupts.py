"""A context that turns Ctrl-C and SIGTERM into exceptions, and can hold them back while files are
written."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """A context in which SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143).

    Only the first signal counts; SLURM sends SIGTERM before it kills a job. Later ones are dropped
    until :meth:`release`, so a second Ctrl-C does not interrupt the checkpoint that the first one
    asked for. A signal that the process ignores (nohup) stays ignored. Python calls handlers
    between its own instructions, so the running operation is finished first. Python prints and
    drops an exception that a handler raises inside a destructor or a callback of ``os.fork``;
    :meth:`check` raises it again.
    """

    def __init__(self) -> None:
        self._held = self._ignored = False
        self._received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) in (signal.SIG_IGN, None):
                continue
            try:
                self._before[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        try:
            if kind is None:
                self.check()
        finally:
            self.release()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received or self._ignored:
            return
        self._received = number
        if not self._held:
            self.check()

    @property
    def received(self) -> bool:
        """Whether a signal has come that ends the run."""
        return self._received != 0

    def check(self) -> None:
        """Raise the exception of the first signal again, if there was one, since Python may have
        dropped it.

        Raises:
            KeyboardInterrupt: it was SIGINT.
            SystemExit: it was SIGTERM; the exit code is 143.
        """
        if self._received == signal.SIGTERM:
            sys.exit(128 + signal.SIGTERM)
        if self._received:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Return a context that raises the exception of a signal at its end and not before."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()

    def ignore(self) -> None:
        """Drop signals from here on, until :meth:`release`."""
        self._ignored = True

    def release(self) -> None:
        """Forget the signals so far, and raise exceptions for new ones again."""
        self._held = self._ignored = False
        self._received = 0
