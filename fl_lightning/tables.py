"""The CSV files of a run, which only ever grow: a checkpoint holds their length and hash, so its cost does not grow with the rounds."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from fl_lightning.checkpoint import CheckpointError
from fl_lightning.disk import replace

Mark = Mapping[str, Any]
"""Where a table stood: ``rows``, ``columns``, ``bytes``, and the ``sha256`` of those bytes."""


class Table:
    """A CSV file with a header, appended to in place; a column that is new rewrites it, which happens a few times in a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stand(b"", 0, [])

    def _stand(self, data: bytes, rows: int, columns: Sequence[str]) -> None:
        self._bytes, self._hash, self._rows, self._columns = len(data), sha256(data), rows, list(columns)

    @property
    def mark(self) -> Mark:
        return {"rows": self._rows, "columns": list(self._columns), "bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows at the end; an empty cell where a row has no such column. On an error the file is as it was."""
        columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        if columns != self._columns:
            before = self._read()[: self._bytes].decode()
            data = _render(columns, [*csv.DictReader(io.StringIO(before)), *rows])
            replace(self.path, data)
            self._stand(data, self._rows + len(rows), columns)
            return
        data = _render(columns, rows, header=False)
        try:
            with self.path.open("r+b") as file:
                file.seek(self._bytes)
                file.write(data)
                file.truncate()
        except OSError:
            os.truncate(self.path, self._bytes)
            raise
        self._bytes, self._rows = self._bytes + len(data), self._rows + len(rows)
        self._hash.update(data)

    def sync(self) -> None:
        """What was appended is on the disk. Before the checkpoint that counts on it."""
        if self._bytes:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def until(self, mark: Mark) -> bytes:
        """The file as it was at ``mark``.

        Raises:
            CheckpointError: it no longer holds what it held then.
        """
        data = self._read()
        for candidate in (lambda: data[: mark["bytes"]], lambda: _narrowed(data, mark)):
            if sha256(found := candidate()).hexdigest() == mark["sha256"]:
                return found
        raise CheckpointError(f"{self.path} no longer begins with the {mark['rows']} rows that it had then; it has been changed")

    def rewind(self, mark: Mark | None) -> None:
        """Cut off what came after ``mark``; None: everything."""
        if mark is None or not mark["bytes"]:
            self.path.unlink(missing_ok=True)
            self._stand(b"", 0, [])
            return
        data = self.until(mark)
        if data != self._read():
            replace(self.path, data)
        self._stand(data, mark["rows"], mark["columns"])

    def _read(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""


def numbers(data: bytes) -> list[dict[str, float]]:
    """The rows of a CSV of numbers; integers stay integers, empty cells are left out."""
    return [{name: _number(cell) for name, cell in row.items() if cell} for row in csv.DictReader(io.StringIO(data.decode()))]


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
