"""Ctrl-C and SIGTERM as exceptions, held back where a half-done write would hurt."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While entered, the first SIGINT raises KeyboardInterrupt and the first SIGTERM (SLURM's notice)
    SystemExit(143).

    Python calls handlers between its own instructions, so the operation at work is finished first. Signals
    after the first are dropped until :meth:`release`: whoever presses Ctrl-C twice does not interrupt the
    checkpoint that the first one asked for. A signal that the process ignores (nohup) stays ignored. What a
    handler raises inside a destructor or a callback of ``os.fork`` Python prints and drops; :meth:`check`
    raises it again.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Raise what the first signal asked for, if there was one: what it raised at the time may have been
        lost."""
        if self._received == signal.SIGTERM:
            sys.exit(128 + signal.SIGTERM)
        if self._received:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal that comes within the block is raised at its end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()

    def ignore(self) -> None:
        """From here on signals are dropped, until :meth:`release`."""
        self._ignored = True

    def release(self) -> None:
        """Signals are raised again, and those of before are forgotten."""
        self._held = self._ignored = False
        self._received = 0
