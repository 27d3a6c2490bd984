"""Clients that are left out of a run's secure sums, since two rounds named them for wrong
shares."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

from fl_lightning.client import Assignment
from fl_lightning.hooks import Context, Meter, RoundRecord, Stressor

log = logging.getLogger("fl_lightning")

ROUNDS_NAMED = 2
"""Rounds that name a client before it is left out: a machine with one fault is not a hostile
one."""


class NamedClients(Stressor, Meter):
    """Counts the rounds that named a client, and has those drop out that were named twice.

    The trainer puts it behind the callbacks of a run with a secure sum, so that what it knows
    survives a resume as the state of a callback does. A client that is left out is sent nothing,
    and counts as dropped: cohorts, thresholds and epsilon stay what they were.
    """

    def __init__(self) -> None:
        self.rounds: Counter[int] = Counter()

    def change_cohort(
        self, cohort: list[Assignment], *, round: int, context: Context
    ) -> list[Assignment]:
        return [
            replace(each, trains=False, returns=False, leaves_before="keys")
            if self.rounds[each.client.id] >= ROUNDS_NAMED
            else each
            for each in cohort
        ]

    def on_check(self, context: Context) -> None:
        self.rounds.clear()  # what another run of the same trainer has found

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        self.rounds.update(record.named)
        for id in sorted(record.named):
            if self.rounds[id] == ROUNDS_NAMED:
                log.warning(
                    "round %d: client %d was named for wrong shares in %d rounds, and is left out of all "
                    "secure sums from here on",
                    record.round, id, ROUNDS_NAMED,
                )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": {str(id): count for id, count in sorted(self.rounds.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds = Counter({int(id): count for id, count in state["rounds"].items()})
