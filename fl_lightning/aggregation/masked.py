"""Sums of what clients mask: the server learns the total alone, and the ledger counts all
messages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fl_lightning.aggregation.base import Aggregation, Receipt, Round
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.aggregation.masked_round import MaskedRound
from fl_lightning.aggregation.plain import PlainSum
from fl_lightning.aggregation.sums import Addend
from fl_lightning.client import Assignment
from fl_lightning.distributed.collectives import world_size
from fl_lightning.errors import MisuseError, error_reason
from fl_lightning.privacy import Randomness
from fl_lightning.privacy.secure import PHASES, SecureSum
from fl_lightning.wire import LedgerEntry, Payload

if TYPE_CHECKING:  # it needs the extra privacy
    from fl_lightning.privacy.secure.simulation import Outcome

log = logging.getLogger("fl_lightning")


class MaskedSum(Aggregation):
    """Has clients mask what they add, and gives the method the total.

    Args:
        sums: what becomes of the total.
        masks: ``trainer.secure_sum``.
    """

    uploads_leave_clients = False

    def __init__(self, sums: PlainSum, masks: SecureSum) -> None:
        super().__init__(sums.method)
        self.sums, self.masks, self.privacy = sums, masks, sums.privacy

    @property
    def randomness(self) -> Randomness:
        return self.sums.randomness

    def addends(self, upload: Payload, client: int, round: int) -> dict[str, Addend]:
        return {**self.sums.addends(upload, client, round), **self.method.product_addends(upload)}

    def close(
        self, round: Round, uploads: Uploads, receipts: Sequence[Receipt]
    ) -> list[LedgerEntry]:
        """Mask what the clients would have uploaded, and add it up. A client counts if it is in the
        sum.

        The round is void where no clients that keep to the rules could have made its sum, or where
        clients on other machines named sums that the method cannot take.

        Raises:
            MisuseError: clients' addends have different forms, or values out of range.
            RankLost: a process died or did not answer in time.
        """
        assert self.masks is not None
        method = self.method
        by_id = {assignment.client.id: assignment for assignment in round.cohort}
        leaves_before = {
            receipt.client.id: _phase_of_leaving(by_id[receipt.client.id], receipt.entry)
            for receipt in receipts
        }

        def deliver(id: int, message: bytes) -> bytes | None:
            return round.deliver(by_id[id].client, message) if by_id[id].returns else None

        def addends(id: int, upload: Payload) -> dict[str, Addend]:
            return self.addends(upload, id, round.number)

        form, outcome = round.add_under_masks(
            MaskedRound(self.masks, method, round.number, leaves_before, uploads, addends, deliver)
        )
        void, sums = outcome.void, None
        if outcome.total is not None:
            living = [by_id[id].client for id in by_id if id in outcome.living]
            if reason := form.impossible(outcome.total, method, living, self.sums.largest_sum):
                void = f"its sum is impossible, and nothing says whose vector made it so: {reason}"
            else:
                sums = form.sums(outcome.total, method.average, method.cohort)
        entries = _ended([receipt.entry for receipt in receipts], outcome, void)
        by_phase = {f"comm/{phase}_bytes": outcome.traffic.phases[phase] for phase in PHASES}
        round.metrics.update({**by_phase, "secure/void": int(sums is None)})
        round.named.update(outcome.named)
        if sums is None:
            log.warning("round %d is void, and the model stays: %s", round.number, void)
            return self.sums.taken(None, round, entries)
        counted = sum(entry.status == "trained" for entry in entries)
        before = dict(method.server)
        try:
            return self.sums.taken(
                self.sums.finished(sums, round, uploads, counted), round, entries
            )
        except (LookupError, MisuseError, RuntimeError) as error:
            if uploads or world_size() > 1:  # this program has made the sums, and not its clients
                raise
            method.server = before
            round.metrics["secure/void"] = 1
            log.warning(
                "round %d is void, and the model stays: clients named sums that %s cannot take (%s)",
                round.number,
                type(method).__name__,
                error_reason(error),
                exc_info=True,
            )
            return self.sums.taken(None, round, entries)


def _ended(entries: Sequence[LedgerEntry], outcome: Outcome, void: str) -> list[LedgerEntry]:
    """Return the entries with the messages of all phases."""
    counted = set() if void else outcome.living
    ended = []
    for entry in entries:
        up, down = outcome.traffic.up[entry.client], outcome.traffic.down[entry.client]
        status = entry.status
        if status == "trained" and entry.client not in counted:
            status = "rejected" if entry.client in outcome.rejected else "lost"
        wasted = 0 if entry.client in counted else up
        ended.append(
            replace(entry, status=status, upload=up, download=entry.download + down, wasted=wasted)
        )
    return ended


def _phase_of_leaving(assignment: Assignment, entry: LedgerEntry) -> str:
    """Return the phase before which a client drops out; empty where it stays."""
    phase = assignment.leaves_before
    if phase and (assignment.trains or phase not in ("masked", "unmask")):
        return phase
    if entry.status == "dropped":  # nobody asked it to train, or its machine did not answer
        return "keys"
    return "" if entry.status == "trained" else "masked"
