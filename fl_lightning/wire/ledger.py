"""The ledger: all bytes that were sent, by client and round."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fl_lightning.wire.payload import Payload


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The bytes of one client in one round.

    Args:
        round: number of the round.
        client: id of the client; below 0 of a link between an edge server and the cloud.
        status: ``trained``; ``dropped`` (before training, so nothing was sent in either direction,
            except messages of a secure sum's first phases, the broadcast to a machine that did not
            answer, and those of who was asked for its loss); ``lost`` (it trained, but its upload
            was not used); ``rejected`` (its upload arrived and was refused); ``asked`` (it was sent
            the broadcast to tell its loss, and was not taken); ``away`` (a peer that was not
            sampled is sent what it missed); ``edge`` (of a link between servers).
        download: bytes of the broadcast, and of a secure sum's messages to the client.
        upload: bytes of the upload; of a secure sum, of all messages of the client.
        wasted: bytes of the upload that were not used; part of ``upload``.
        started, ended: virtual seconds since the start of the run between which it was at work,
            where the run has a clock and the client was sent the broadcast.
    """

    round: int
    client: int
    status: str
    download: int = 0
    upload: int = 0
    wasted: int = 0
    started: float | None = None
    ended: float | None = None

    def row(self) -> dict[str, int | float | str]:
        """Return the values of the entry by column, without those that it does not have."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None}

    def timed(self, started: float, ended: float) -> LedgerEntry:
        """Return the entry of a client that was at work between these virtual seconds."""
        return replace(self, started=started, ended=ended)

    def with_upload(self, more: Payload | None) -> LedgerEntry:
        """Return the entry of a client that sends something beside its upload, if it sends
        anything."""
        if more is None or self.status == "dropped":
            return self
        wasted = self.wasted if self.status == "trained" else self.wasted + more.nbytes
        return replace(self, upload=self.upload + more.nbytes, wasted=wasted)

    def unused(self) -> LedgerEntry:
        """Return the entry of a round whose sum was not used: a client that trained is lost."""
        if self.status != "trained":
            return self
        return replace(self, status="lost", wasted=self.upload)


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

    @classmethod
    def from_csv(cls, text: str) -> Ledger:
        """Read a ledger from the text of ``ledger.csv``.

        Raises:
            ValueError: a column is missing, or there is no number where one is needed.
        """
        return cls(map(_entry_of, csv.DictReader(io.StringIO(text))))


COUNTS = ("round", "client", "download", "upload", "wasted")


def _entry_of(row: Mapping[str, str]) -> LedgerEntry:
    if None in row.values() or not {*COUNTS, "status"} <= row.keys():
        raise ValueError(f"no line of a ledger: {row}")
    started, ended = (float(row[name]) if row.get(name) else None for name in ("started", "ended"))
    counts = {name: int(row[name]) for name in COUNTS}
    return LedgerEntry(**counts, status=row["status"], started=started, ended=ended)
