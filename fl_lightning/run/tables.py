"""The CSV files of a run, which only ever grow.

A checkpoint holds their length and hash and not their rows, so its cost does not grow with the
rounds. Each file has a second copy in ``checkpoints/``, without which one flipped bit would make
every checkpoint useless.
"""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from math import isnan
from pathlib import Path
from typing import Any

from fl_lightning.config.settings import is_number
from fl_lightning.run.checkpoint import CheckpointError
from fl_lightning.support.disk import open_own, replace

log = logging.getLogger("fl_lightning")

Mark = Mapping[str, Any]
"""A length of a table: its ``rows``, ``columns`` and ``bytes``, and the ``sha256`` of those
bytes."""


class CsvTable:
    """A CSV file with a header to which rows are appended in place.

    A new column rewrites the file, which happens a few times in a run.

    Args:
        path: the file.
        copy: its second copy, which is read where the first one is damaged.
        may_write: returns whether rows are appended, which they are not on ranks other than 0.
    """

    def __init__(
        self, path: Path, copy: Path, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        self.path, self.paths, self.may_write = path, (path, copy), may_write
        self._set_length(b"", 0, [])

    def _set_length(self, data: bytes, rows: int, columns: Sequence[str]) -> None:
        self._bytes, self._hash, self._rows, self._columns = (
            len(data),
            sha256(data),
            rows,
            list(columns),
        )

    @property
    def mark(self) -> Mark:
        """The length of the table now."""
        return {
            "rows": self._rows,
            "columns": list(self._columns),
            "bytes": self._bytes,
            "sha256": self._hash.hexdigest(),
        }

    @property
    def rows_there(self) -> int:
        """The whole rows that the file has now, whoever wrote them."""
        return max(_read(self.path).count(b"\n") - 1, 0)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows at the end; a row has an empty cell where it lacks a column.

        After an error the file is as it was before, unless the rows have a new column: of its two
        copies one may then have the rows.

        Raises:
            OSError: the file cannot be written, or another program has shortened it.
        """
        if not rows or not self.may_write():
            return
        columns = list(dict.fromkeys([*self._columns, *(name for row in rows for name in row)]))
        if columns != self._columns:
            before = self._intact(self.mark).decode()
            data = _render(columns, [*csv.DictReader(io.StringIO(before)), *rows])
            self._replace(data)
            self._set_length(data, self._rows + len(rows), columns)
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
        """Make sure that all rows are on the disk, before a checkpoint is written that needs
        them."""
        if self._bytes:
            for path in self.paths:
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def until(self, mark: Mark) -> bytes:
        """Return the bytes of the table as it was at ``mark``.

        Raises:
            CheckpointError: neither copy holds these bytes any more.
        """
        for data in map(_read, self.paths):
            for candidate in (
                lambda data=data: data[: mark["bytes"]],
                lambda data=data: _rendered_at(data, mark),
            ):
                if sha256(found := candidate()).hexdigest() == mark["sha256"]:
                    return found
        raise CheckpointError(
            f"{self.path} and {self.paths[1]} do not begin with the {mark['rows']} rows of that round",
            "both have been changed",
        )

    def holds(self, mark: Mark) -> bool:
        """Return whether a copy of the table begins with what it held at ``mark``."""
        try:
            self.until(mark)
        except CheckpointError:
            return False
        return True

    def _intact(self, mark: Mark) -> bytes:
        """Return what :meth:`until` does, with OSError where the running run's own table is
        damaged."""
        try:
            return self.until(mark)
        except CheckpointError as error:
            raise OSError(str(error)) from None

    def rewind(self, mark: Mark | None) -> None:
        """Cut off the rows after ``mark``, or all rows if it is None.

        Raises:
            CheckpointError: neither copy holds the rows until ``mark`` any more.
        """
        if mark is None or not mark["bytes"]:
            for path in self.paths:
                path.unlink(missing_ok=True)
            self._set_length(b"", 0, [])
            return
        data = self.until(mark)
        if _read(self.path)[: len(data)] != data and self.path.exists():
            log.warning(
                "%s has been changed since it was written; it is restored from %s",
                self.path,
                self.paths[1],
            )
        self._replace(data)
        self._set_length(data, mark["rows"], mark["columns"])

    def _replace(self, data: bytes) -> None:
        for path in self.paths:
            if _read(path) != data:
                replace(path, data)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def numbers(data: bytes) -> list[dict[str, float]]:
    """Return the rows of a CSV of numbers; integers stay integers, and empty cells are left out."""
    return [
        {name: _number(cell) for name, cell in row.items() if cell}
        for row in csv.DictReader(io.StringIO(data.decode()))
    ]


def _number(cell: str) -> float:
    try:
        return int(cell)
    except ValueError:
        return float(cell)


def _rendered_at(data: bytes, mark: Mark) -> bytes:
    """Return the first rows without the columns that were added after ``mark``; nothing where they
    are so damaged that they are no table."""
    with suppress(csv.Error):
        rows = list(csv.DictReader(io.StringIO(data.decode(errors="replace"))))[: mark["rows"]]
        return _render(mark["columns"], rows)
    return b""


def _render(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], header: bool = True
) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def cut_metrics(table: bytes, metadata: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return that ``metrics.csv`` lacks rounds or values at its end; empty where it does not.

    A run has all its rounds, unless ``metadata.json`` says why it was stopped early.
    """
    rows = list(csv.reader(io.StringIO(table.decode())))
    short = next((row for row in rows if len(row) != len(rows[0])), None)
    if short or not table.endswith(b"\n"):
        number = (short or rows[-1])[0]
        return f"metrics.csv is cut: it ends within the values of round {number}"
    asked, made = settings.get("trainer.max_rounds"), len(rows) - 1
    if isinstance(asked, int) and made < asked and not metadata.get("stopped_early"):
        return (
            f"metrics.csv has {made} rounds of {asked}, and metadata.json says that it is finished"
        )
    return ""


def is_of_others(
    test: Mapping[str, Any], metadata: Mapping[str, Any], history: Sequence[Mapping[str, float]]
) -> bool:
    """Return whether the round that ``test`` took has been made anew since, with other weights.

    Args:
        test: content of its file.
        metadata: of the run.
        history: a row of metrics for each of its rounds.
    """
    row = next((row for row in history if row["round"] == test.get("round")), {})
    tested, known = test.get("weights_sha256"), metadata.get("weights_sha256")
    if tested and known and row and row is history[-1]:
        return bool(tested != known)
    recorded = test.get("recorded")
    return any(
        is_number(value)
        and row.get(name, value) != value
        and not (isnan(value) and isnan(row.get(name, value)))
        for name, value in (recorded if isinstance(recorded, Mapping) else {}).items()
    )
