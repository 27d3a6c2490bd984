"""Clients that drop out in the middle of a secure sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from callbacks.stressors.draws import own_stream
from fl_lightning.client import Assignment
from fl_lightning.config.constraints import within
from fl_lightning.hooks import Context, Stressor
from fl_lightning.privacy.secure import PHASES
from fl_lightning.rng import stream


class SecureDropout(Stressor):
    """Every sampled client drops out before one phase of the round's secure sum with the same
    probability, independently of the others.

    Before ``keys`` or ``shares`` it does not train. Before ``masked`` it has trained, and its
    vector is not sent. Before ``unmask`` its vector is in the sum, and it gives no shares of the
    others' secrets. Where the run has no secure sum the same clients count as with one: those that
    drop out before ``unmask`` do.

    Args:
        probability: chance in [0, 1] that a sampled client drops out.
        phase: ``keys``, ``shares``, ``masked`` or ``unmask``: the phase before which it does.
    """

    def __init__(
        self,
        probability: Annotated[
            float, within("[0, 1]", "a probability lies in [0, 1]", "for 10 % write 0.1")
        ] = 0.1,
        phase: Literal["keys", "shares", "masked", "unmask"] = "masked",
    ) -> None:
        self.probability, self.phase = probability, phase

    def change_cohort(
        self, cohort: list[Assignment], *, round: int, context: Context
    ) -> list[Assignment]:
        purpose = own_stream(f"secure_dropout/{self.phase}", self, context, by="phase")
        return [
            leaving(assignment, self.phase)
            if stream(context.seed, purpose, round, assignment.client.id).random()
            < self.probability
            else assignment
            for assignment in cohort
        ]


def leaving(assignment: Assignment, phase: str) -> Assignment:
    """Return the assignment of a client that drops out before a phase, or earlier if it did
    already."""
    before = assignment.leaves_before or ("" if assignment.trains else "keys")
    if before and PHASES.index(before) <= PHASES.index(phase):
        return assignment
    return replace(
        assignment,
        leaves_before=phase,
        trains=assignment.trains and phase in ("masked", "unmask"),
        returns=assignment.returns and phase == "unmask",
    )
