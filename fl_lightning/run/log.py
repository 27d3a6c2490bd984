"""The file ``run.log``: the project's log records of a run, and the traceback of the error that
ended it."""

from __future__ import annotations

import logging
import re
import sys
import time
from contextlib import suppress
from logging.handlers import MemoryHandler
from pathlib import Path

from fl_lightning.support.disk import open_own
from fl_lightning.support.redaction import redact

log = logging.getLogger("fl_lightning")

NAME = "run.log"
MAX_BUFFERED = 10_000  # records before the run has a directory


class RunLog:
    """A context that keeps the records of the logger ``fl_lightning`` and writes them to
    ``run.log``.

    The records are kept in memory until :meth:`write_to` names the run directory. They are those
    from INFO on, unless the logger has a level of its own; handlers that are there already get
    those that they got before.

    Where nobody has set up logging, as in a script or a notebook, warnings and errors go to stderr
    too: Python would write them there by itself, were it not for the handler of the file. Of
    uploads that are rejected only the first is shown there.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._handler: logging.Handler = logging.NullHandler()
        self._shown: logging.Handler = logging.NullHandler()
        self._level = logging.NOTSET
        self._others: list[logging.Handler] = []

    def __enter__(self) -> RunLog:
        self.path = None
        self._level, self._others = log.level, []
        if log.level == logging.NOTSET and (least := log.getEffectiveLevel()) > logging.INFO:
            self._as_before = FromLevel(least)
            self._others = [*log.handlers, *logging.getLogger().handlers]
            for handler in self._others:
                handler.addFilter(self._as_before)
            log.setLevel(logging.INFO)
        if not log.hasHandlers():
            self._shown = logging.StreamHandler()
            self._shown.setLevel(logging.WARNING)
            self._shown.addFilter(FirstRejection())
            log.addHandler(self._shown)
        self._use(MemoryHandler(MAX_BUFFERED, flushLevel=sys.maxsize, flushOnClose=False))
        return self

    def __exit__(self, *error: object) -> None:
        for handler in (self._handler, self._shown):
            log.removeHandler(handler)
            handler.close()
        log.setLevel(self._level)
        for handler in self._others:
            handler.removeFilter(self._as_before)

    def write_to(self, run: Path) -> None:
        """Append to ``run.log`` in this run directory from here on, beginning with the records kept
        so far.

        Raises:
            OSError: the file cannot be opened, or is a symbolic link.
        """
        before, handler = self._handler, _FileHandler(run / NAME)
        if isinstance(before, MemoryHandler):
            before.setTarget(handler)
            before.flush()
        self.path = run / NAME
        self._use(handler)

    def add_traceback(self, error: BaseException) -> None:
        """Write the traceback of ``error`` to the file, and nowhere else."""
        record = log.makeRecord(
            log.name,
            logging.ERROR,
            "",
            0,
            "the run ended with",
            (),
            (type(error), error, error.__traceback__),
        )
        self._handler.handle(record)

    def _use(self, handler: logging.Handler) -> None:
        log.removeHandler(self._handler)
        self._handler.close()
        self._handler = handler
        log.addHandler(handler)


class FromLevel(logging.Filter):
    """A filter that lets no record of the project below a level through, and any other record."""

    def __init__(self, least: int) -> None:
        super().__init__(log.name)
        self.least = least

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self.least or not super().filter(record)


class FirstRejection(logging.Filter):
    """A filter that shows the first record about a rejected upload, and counts all of them."""

    count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not re.search(r"upload of client .* rejected", str(record.msg)):
            return True
        self.count += 1
        return self.count == 1


class _FileHandler(logging.StreamHandler):
    """A log handler that appends lines with UTC times and without secrets.

    It raises nothing: a full disk does not end the run because of the log.
    """

    def __init__(self, path: Path) -> None:
        self.file = open_own(path, "a")
        super().__init__(self.file)
        formatter = _RedactingFormatter(
            "%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ"
        )
        formatter.converter = time.gmtime
        self.setFormatter(formatter)

    def close(self) -> None:
        super().close()
        with suppress(OSError):  # what is left in the buffer does not fit on the disk
            self.file.close()

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class _RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
