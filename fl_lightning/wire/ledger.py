"""The ledger: all bytes that were sent, by client and round."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The bytes of one client in one round.

    Args:
        round: number of the round.
        client: id of the client.
        status: ``trained``; ``dropped`` (before training, so nothing was sent in either direction, except
            messages of a secure sum's first phases, and the broadcast to a machine that did not answer);
            ``lost`` (it trained, but its upload was not used);
            ``rejected`` (its upload arrived and was refused).
        download: bytes of the broadcast, and of a secure sum's messages to the client.
        upload: bytes of the upload; of a secure sum, of all messages of the client.
        wasted: bytes of the upload that were not used; part of ``upload``.
    """

    round: int
    client: int
    status: str
    download: int = 0
    upload: int = 0
    wasted: int = 0

    def row(self) -> dict[str, int | str]:
        """Return the values of the entry by column."""
        return {name: getattr(self, name) for name in self.__slots__}

    def unused(self) -> LedgerEntry:
        """Return the entry of a round whose sum the server could not use: a client that trained is lost."""
        return replace(self, status="lost", wasted=self.upload) if self.status == "trained" else self


class Ledger:
    """An append-only list of entries."""

    def __init__(self, entries: Iterable[LedgerEntry] = ()) -> None:
        self.entries = list(entries)

    def add(self, entry: LedgerEntry) -> None:
        """Append an entry."""
        self.entries.append(entry)

    @staticmethod
    def totals(entries: Iterable[LedgerEntry]) -> dict[str, int]:
        """Return the ``comm/*`` metrics of these entries: sums in bytes."""
        entries = list(entries)
        upload, download = sum(e.upload for e in entries), sum(e.download for e in entries)
        return {
            "comm/upload_bytes": upload,
            "comm/download_bytes": download,
            "comm/wasted_bytes": sum(e.wasted for e in entries),
            "comm/total_bytes": upload + download,
        }

    def to_csv(self) -> str:
        """Return the text of ``ledger.csv``: one line per entry, ordered by round and then by cohort."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(field.name for field in fields(LedgerEntry))
        writer.writerows(map(astuple, self.entries))
        return text.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> Ledger:
        """Read a ledger from the text of ``ledger.csv``.

        Raises:
            ValueError: a line has another number of columns, or no number where one is needed.
            StopIteration: the text is empty.
        """
        rows = csv.reader(io.StringIO(text))
        next(rows)
        return cls(
            LedgerEntry(int(round), int(client), status, int(download), int(upload), int(wasted))
            for round, client, status, download, upload, wasted in rows
        )
