"""Sums of uploads, exact, in the open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fl_lightning.aggregation.base import Aggregation, Receipt, Round, examples_of
from fl_lightning.aggregation.intake import AddedUploads, Uploads
from fl_lightning.aggregation.server import set_next_state
from fl_lightning.aggregation.sums import Sums
from fl_lightning.wire import LedgerEntry, Payload


class PlainSum(Aggregation):
    """Adds uploads up where their clients were trained, and gives the method the sums over all
    processes."""

    def intake(self) -> Uploads:
        return self.method.intake()

    def close(
        self, round: Round, uploads: Uploads, receipts: Sequence[Receipt]
    ) -> list[LedgerEntry]:
        entries, examples = [receipt.entry for receipt in receipts], examples_of(receipts)
        if examples:
            if isinstance(uploads, AddedUploads):
                sums = uploads.added()
            else:
                sums = self.method.add_up(uploads, examples)
            sums.merge_ranks()
            return self.taken(sums, round, entries)
        return entries

    largest_sum: Callable[[str, int], float] | None = None
    """The largest magnitude of a value of a sum, by its name, over so many clients that weigh 1;
    None: values are bounded by the weight of their client."""

    def finished(
        self, sums: Sums, round: Round, uploads: Mapping[int, Payload], counted: int
    ) -> Sums | None:
        """Return what the method gets of sums that somebody else added up; None where the round has
        no next state.

        Args:
            sums: over the clients that count.
            round: whose sums they are.
            uploads: those that this process has.
            counted: how many clients are in the sums.
        """
        return sums

    def taken(
        self, sums: Sums | None, round: Round, entries: Sequence[LedgerEntry]
    ) -> list[LedgerEntry]:
        """Let the method make the server's next state of the sums, and return the ledger's entries:
        where there is none, no upload was used."""
        if sums is not None and set_next_state(
            self.method, round.number, entries, partial(self.method.take_sums, sums)
        ):
            return list(entries)
        return [entry.unused() for entry in entries]
