"""The ledger: every byte that crossed the wire, per client and round."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One client in one round; sizes in bytes.

    Args:
        status: ``trained``; ``dropped`` (before training: nothing was sent either way); ``lost`` (it trained,
            its upload never counted); ``rejected`` (the upload came and was refused).
        wasted: bytes uploaded that never counted; part of ``upload``.
    """

    round: int
    client: int
    status: str
    download: int = 0
    upload: int = 0
    wasted: int = 0

    def row(self) -> dict[str, int | str]:
        """Its values by column."""
        return {name: getattr(self, name) for name in self.__slots__}


class Ledger:
    """An append-only list of entries and its sums."""

    def __init__(self, entries: Iterable[LedgerEntry] = ()) -> None:
        self.entries = list(entries)

    def add(self, entry: LedgerEntry) -> None:
        self.entries.append(entry)

    @staticmethod
    def totals(entries: Iterable[LedgerEntry]) -> dict[str, int]:
        """The ``comm/*`` metrics of these entries, in bytes over the whole cohort."""
        entries = list(entries)
        upload, download = sum(e.upload for e in entries), sum(e.download for e in entries)
        return {
            "comm/upload_bytes": upload,
            "comm/download_bytes": download,
            "comm/wasted_bytes": sum(e.wasted for e in entries),
            "comm/total_bytes": upload + download,
        }

    def to_csv(self) -> str:
        """``ledger.csv``: one line per entry, in order of round, then cohort."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(field.name for field in fields(LedgerEntry))
        writer.writerows(map(astuple, self.entries))
        return text.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> Ledger:
        rows = csv.reader(io.StringIO(text))
        next(rows)
        return cls(
            LedgerEntry(int(round), int(client), status, int(download), int(upload), int(wasted))
            for round, client, status, download, upload, wasted in rows
        )
