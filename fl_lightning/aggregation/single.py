"""Uploads that the server reads one by one: order statistics, soft labels, groups of clients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fl_lightning.aggregation.base import Aggregation, Receipt, Round
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.aggregation.server import set_next_state
from fl_lightning.wire import LedgerEntry


class SingleUploads(Aggregation):
    """Gives the method all uploads of the round: its ``aggregate`` makes the next state."""

    single = True

    def close(
        self, round: Round, uploads: Uploads, receipts: Sequence[Receipt]
    ) -> list[LedgerEntry]:
        entries = [receipt.entry for receipt in receipts]
        make = partial(self.method.aggregate, uploads)
        if uploads and not set_next_state(self.method, round.number, entries, make):
            return [entry.unused() for entry in entries]
        return entries
