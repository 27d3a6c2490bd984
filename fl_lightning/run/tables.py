"""The CSV files of a run, which only ever grow: a checkpoint holds their length and hash, so its cost does
not grow with the rounds.

Each has a second copy in ``checkpoints/``: one flipped bit must not make checkpoints useless whose weights
are whole.
"""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from fl_lightning.run.checkpoint import CheckpointError
from fl_lightning.support.disk import open_own, replace

log = logging.getLogger("fl_lightning")

Mark = Mapping[str, Any]
"""Where a table stood: ``rows``, ``columns``, ``bytes``, and the ``sha256`` of those bytes."""


class Table:
    """A CSV file with a header, appended to in place; a column that is new rewrites it, which happens a few
    times in a run.

    Args:
        path: of the file.
        copy: of its second copy, which is read where the first does not hold what it should.
    """

    def __init__(self, path: Path, copy: Path) -> None:
        self.path, self.paths = path, (path, copy)
        self._stand(b"", 0, [])

    def _stand(self, data: bytes, rows: int, columns: Sequence[str]) -> None:
        self._bytes, self._hash, self._rows, self._columns = len(data), sha256(data), rows, list(columns)

    @property
    def mark(self) -> Mark:
        return {
            "rows": self._rows,
            "columns": list(self._columns),
            "bytes": self._bytes,
            "sha256": self._hash.hexdigest(),
        }

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows at the end; an empty cell where a row has no such column. On an error the file is as it
        was.

        Raises:
            OSError: it cannot be written, or somebody else has shortened it.
        """
        if not rows:
            return
        columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        if columns != self._columns:
            before = self._intact(self.mark).decode()
            data = _render(columns, [*csv.DictReader(io.StringIO(before)), *rows])
            self._replace(data)
            self._stand(data, self._rows + len(rows), columns)
            return
        data = _render(columns, rows, header=False)
        try:
            for path in self.paths:
                with open_own(path, "r+b") as file:
                    if file.seek(0, os.SEEK_END) < self._bytes:
                        raise OSError(f"{path} is shorter than what was written to it")
                    file.seek(self._bytes)
                    file.write(data)
                    file.truncate()
        except OSError:
            for path in self.paths:
                with suppress(OSError):
                    if path.stat().st_size > self._bytes and not path.is_symlink():
                        os.truncate(path, self._bytes)
            raise
        self._bytes, self._rows = self._bytes + len(data), self._rows + len(rows)
        self._hash.update(data)

    def sync(self) -> None:
        """What was appended is on the disk. Before the checkpoint that counts on it."""
        if self._bytes:
            for path in self.paths:
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def until(self, mark: Mark) -> bytes:
        """The file as it was at ``mark``.

        Raises:
            CheckpointError: neither copy holds what it held then.
        """
        for data in map(_read, self.paths):
            for candidate in (
                lambda data=data: data[: mark["bytes"]],
                lambda data=data: _narrowed(data, mark),
            ):
                if sha256(found := candidate()).hexdigest() == mark["sha256"]:
                    return found
        raise CheckpointError(
            f"neither {self.path} nor {self.paths[1]} begins with the {mark['rows']} rows that they "
            "had then; both have been changed"
        )

    def _intact(self, mark: Mark) -> bytes:
        """:meth:`until` in mid-run, where a damaged file is one that cannot be written to."""
        try:
            return self.until(mark)
        except CheckpointError as error:
            raise OSError(str(error)) from None

    def rewind(self, mark: Mark | None) -> None:
        """Cut off what came after ``mark``; None: everything."""
        if mark is None or not mark["bytes"]:
            for path in self.paths:
                path.unlink(missing_ok=True)
            self._stand(b"", 0, [])
            return
        data = self.until(mark)
        if _read(self.path)[: len(data)] != data and self.path.exists():
            log.warning(
                "%s has been changed since it was written; it is restored from %s", self.path, self.paths[1]
            )
        self._replace(data)
        self._stand(data, mark["rows"], mark["columns"])

    def _replace(self, data: bytes) -> None:
        for path in self.paths:
            if _read(path) != data:
                replace(path, data)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def numbers(data: bytes) -> list[dict[str, float]]:
    """The rows of a CSV of numbers; integers stay integers, empty cells are left out."""
    return [
        {name: _number(cell) for name, cell in row.items() if cell}
        for row in csv.DictReader(io.StringIO(data.decode()))
    ]


def _number(cell: str) -> float:
    try:
        return int(cell)
    except ValueError:
        return float(cell)


def _narrowed(data: bytes, mark: Mark) -> bytes:
    """The first rows without the columns that came later."""
    rows = list(csv.DictReader(io.StringIO(data.decode(errors="replace"))))[: mark["rows"]]
    return _render(mark["columns"], rows)


def _render(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], header: bool = True) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
