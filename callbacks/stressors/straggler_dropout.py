"""Stragglers: sampled clients that are too slow for the round."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from callbacks.stressors.draws import own_stream
from fl_lightning.client import Assignment
from fl_lightning.config.constraints import Constraint, within
from fl_lightning.hooks import Context, Stressor
from fl_lightning.rng import stream


class StragglerDropout(Stressor):
    """Every sampled client is a straggler with the same probability, independently of the others
    and of the order of the cohort. Of two, each draws its own.

    Args:
        probability: chance in [0, 1] that a sampled client is a straggler in a round.
        mode: ``before``: it drops before training, and nothing is sent either way, except where a
            sampler has asked it for its loss: it has been sent the model then; ``after``: it
            trains and its upload is lost (work and bytes are wasted); ``partial``: it returns in
            time, having done a share of its local steps.
        work: that share, in (0, 1]; only for ``partial``.
    """

    def __init__(
        self,
        probability: Annotated[
            float, within("[0, 1]", "a probability lies in [0, 1]", "for 20 % write 0.2")
        ] = 0.2,
        mode: Annotated[
            Literal["before", "after", "partial"],
            Constraint("it is before, after or partial", "before"),
        ] = "before",
        work: Annotated[
            float,
            within(
                "(0, 1]", "a share of the local steps lies in (0, 1]", "for half of them write 0.5"
            ),
        ] = 0.5,
    ) -> None:
        self.probability, self.mode, self.work = probability, mode, work

    def change_cohort(
        self, cohort: list[Assignment], *, round: int, context: Context
    ) -> list[Assignment]:
        purpose = own_stream("straggler", self, context)
        return [
            self._slowed(a)
            if stream(context.seed, purpose, round, a.client.id).random() < self.probability
            else a
            for a in cohort
        ]

    def _slowed(self, assignment: Assignment) -> Assignment:
        if self.mode == "partial":
            return replace(assignment, work=assignment.work * self.work)
        return replace(assignment, trains=assignment.trains and self.mode == "after", returns=False)
