"""Ctrl-C and SIGTERM as exceptions, held back where a half-done write would hurt."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """While entered, the first SIGINT raises KeyboardInterrupt and the first SIGTERM (SLURM's notice) SystemExit(143).

    Python calls handlers between its own instructions, so the operation at work is finished first. Signals after the first are
    dropped until :meth:`release`: whoever presses Ctrl-C twice does not interrupt the checkpoint that the first one asked for. A signal
    that the process ignores (nohup) stays ignored.
    """

    def __init__(self) -> None:
        self._held = False
        self._pending = 0
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self.release()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._pending = number
            return
        self._held = True
        if number == signal.SIGTERM:
            sys.exit(128 + number)
        raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal that comes within the block is raised at its end."""
        self._held = True
        try:
            yield
        except BaseException:
            self._pending = 0  # the run stops for another reason
            raise
        self._held = False
        if self._pending:
            number, self._pending = self._pending, 0
            self._receive(number, None)

    def ignore(self) -> None:
        """From here on signals are dropped, until :meth:`release`."""
        self._held = True

    def release(self) -> None:
        self._held, self._pending = False, 0
