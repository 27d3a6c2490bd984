"""Sums with noise, in the open or as what becomes of a masked total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fl_lightning.aggregation.base import Receipt, Round, examples_of
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.aggregation.plain import PlainSum
from fl_lightning.aggregation.private import ClippedUploads, PrivateAggregation
from fl_lightning.aggregation.server import SummingServer
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.privacy import Randomness
from fl_lightning.wire import LedgerEntry, Payload


class PrivateSum(PlainSum):
    """Gives the method noisy sums of clipped messages.

    Args:
        method: the server's half.
        privacy: clips, draws the noise and accounts for it.
    """

    def __init__(self, method: SummingServer, privacy: PrivateAggregation) -> None:
        super().__init__(method)
        self.privacy: PrivateAggregation = privacy
        self.largest_sum = partial(privacy.largest_sum, method)

    @property
    def randomness(self) -> Randomness:
        """What a cohort is drawn from. Who knows a cohort gets less privacy from the draw, so in a
        private deployment no seed tells it."""
        return self.privacy.randomness

    def addends(self, upload: Payload, client: int, round: int) -> dict[str, Addend]:
        return self.privacy.message(self.method, upload, client, round)

    def intake(self) -> Uploads:
        return ClippedUploads(self.privacy, self.method)

    def close(
        self, round: Round, uploads: Uploads, receipts: Sequence[Receipt]
    ) -> list[LedgerEntry]:
        """Make the next state also where nobody returned, which noise hides."""
        entries, returned = [receipt.entry for receipt in receipts], len(examples_of(receipts))
        return self.taken(
            self.privacy.sums(self.method, uploads, returned, round.number), round, entries
        )

    def finished(
        self, sums: Sums, round: Round, uploads: Mapping[int, Payload], counted: int
    ) -> Sums | None:
        return self.privacy.finished(sums, self.method, uploads, counted, round.number)
