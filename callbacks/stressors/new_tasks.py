"""An open world: a group of clients that arrives in mid-run, or leaves."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np

from fl_lightning.client import Assignment
from fl_lightning.errors import InputError, require
from fl_lightning.hooks import Context, RoundRecord, Stressor

log = logging.getLogger("fl_lightning")

RECOVERED = 0.999
"""The purity from which each group has an expert of its own again."""


class NewTasks(Stressor):
    """The clients of one group take part in some rounds only: before, and after, they drop out.

    A client's group is the one that most of its examples have: its cluster or domain where the data
    say so, else its most frequent class. With ``ExpertFigure`` before it among the callbacks, it
    logs ``tasks/rounds_to_recover`` in the round in which every group among the clients that
    trained in it has an expert of its own again: rounds since the group arrived or left. Where two
    changes are recovered from in one round, the number is that of the ``NewTasks`` listed first.
    Samplers that choose by loss or time would choose who is away, and are refused.

    Args:
        group: name of the group, or its number from 0 where no group has that name.
        arrives: first round in which its clients take part, at least 1.
        leaves: last round in which they do; null: the last round of the run.
    """

    by_group = True

    def __init__(self, group: str | int, arrives: int = 1, leaves: int | None = None) -> None:
        require(
            arrives >= 1
            and (leaves is None or leaves >= arrives)
            and (arrives > 1 or leaves is not None),
            f"NewTasks(arrives={arrives}, leaves={leaves})",
            "a group arrives after round 1, or leaves, or both in this order",
            "write arrives: 10",
        )
        self.group, self.arrives, self.leaves = group, arrives, leaves
        self.changed = 0
        """The round of a change that has not been recovered from; 0: there is none."""

    def on_check(self, context: Context) -> None:
        self.changed = 0
        require(
            context.sampler.is_uniform,
            f"NewTasks with --trainer.sampler {type(context.sampler).__name__}",
            "it asks and prefers clients that are not there, and they drop out",
            "leave one of them out",
        )
        names = _names(context)
        if self._place(context) is None:
            raise InputError(
                f"NewTasks(group={self.group!r})",
                f"the groups of these data are {', '.join(names[:20])}",
                "write one of them",
            )
        if max(self.arrives, self.leaves or 1) > context.max_rounds:
            log.warning("NewTasks: round %d is after the run", max(self.arrives, self.leaves or 1))

    def change_cohort(
        self, cohort: list[Assignment], *, round: int, context: Context
    ) -> list[Assignment]:
        if self._present(round):
            return cohort
        theirs = self._theirs(context)
        return [
            replace(a, trains=False, returns=False) if a.client.id in theirs else a for a in cohort
        ]

    def _present(self, round: int) -> bool:
        return self.arrives <= round and (self.leaves is None or round <= self.leaves)

    def _place(self, context: Context) -> int | None:
        """Return the number of the group, by its name where one has it; None: there is none."""
        names, name = _names(context), str(self.group)
        if name in names:
            return names.index(name)
        # a number on the command line is a word
        return int(name) if name.isdecimal() and int(name) < len(names) else None

    def _theirs(self, context: Context) -> set[int]:
        most = context.data.group_counts().argmax(1)
        return set(np.flatnonzero(most == self._place(context)).tolist())

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if record.round > 1 and self._present(record.round) != self._present(record.round - 1):
            self.changed = record.round
        purity = record.metrics.get("router/purity")
        if self.changed and purity is not None and purity >= RECOVERED:
            since = record.round - self.changed + 1
            record.metrics.setdefault("tasks/rounds_to_recover", since)
            self.changed = 0

    def state_dict(self) -> dict[str, Any]:
        return {"changed": self.changed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.changed = state["changed"]


def _names(context: Context) -> list[str]:
    """Return the names of the groups; numbers of classes, where data have no other groups."""
    return [str(name) for name in context.data.group_names or range(context.data.num_groups)]
