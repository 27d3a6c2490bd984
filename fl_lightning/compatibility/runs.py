"""What a run combines, and what a row of the table is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fl_lightning.aggregation.private import PrivateAggregation
from fl_lightning.clock.rounds import Rounds
from fl_lightning.compatibility.features import Feature
from fl_lightning.hooks import Context, reads_probabilities
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.tasks import Task

Refusal = tuple[str, str, str]
"""What was given; the rule that it breaks; what to write instead."""


@dataclass(frozen=True)
class Run:
    """What is to be combined.

    Args:
        method: perhaps before ``build``.
        callbacks: stressors and meters.
        masks: ``trainer.secure_sum``.
        privacy: of ``trainer.privacy``.
        task: None where the data have not been read, as in the plan of a study.
        deployed: whether clients are on nodes.
        own_data: whether the data are the nodes' own.
        rounds: of ``trainer.rounds``.
        has_clock: whether there is a ``trainer.clock``.
        topology: of ``trainer.topology``; None: one server.
        availability: the name of what says when clients are online; empty where they always are.
        sampler: of ``trainer.sampler``.
        has_edge_lines: whether the clock has lines between edge servers and the cloud.
    """

    method: Any
    callbacks: Sequence[object] = ()
    masks: SecureSum | None = None
    privacy: PrivateAggregation | None = None
    task: Task | None = None
    deployed: bool = False
    own_data: bool = False
    rounds: Rounds | None = None
    has_clock: bool = False
    topology: Any = None
    availability: str = ""
    sampler: Any = None
    has_edge_lines: bool = False

    @classmethod
    def of(cls, fed: Context, *, deployed: bool) -> Run:
        """Return what a federation combines."""
        way, data, timing = fed.aggregation, fed.data, fed.timing
        found = cls(
            fed.method, fed.callbacks, way.masks, way.privacy, data.task, deployed, data.apart
        )
        found = replace(found, sampler=fed.sampler)
        return found if timing is None else found.timed(timing)

    def timed(self, timing: Any) -> Run:
        """Return the same with virtual or measured time, a :class:`fl_lightning.clock.Timing`."""
        reached, measured = timing.clock.reached, timing.is_measured
        name = "" if reached.is_always else type(reached).__name__
        deployed = self.deployed or measured
        return replace(
            self,
            rounds=timing.rounds,
            has_clock=not measured,
            availability=name,
            deployed=deployed,
            has_edge_lines=timing.clock.edges is not None,
        )

    @property
    def name(self) -> str:
        """The method's class name."""
        return type(self.method).__name__

    @property
    def readers(self) -> list[str]:
        """The callbacks that read the probabilities of test examples."""
        return [
            type(callback).__name__ for callback in self.callbacks if reads_probabilities(callback)
        ]

    @property
    def is_measured_on_nodes(self) -> bool:
        """Whether models are evaluated where the clients are, in a deployment. Where uploads are
        secret, so is what single clients measure, and the server evaluates a newcomer's."""
        return (
            (self.method.personalised or self.own_data)
            and self.masks is None
            and self.privacy is None
        )


@dataclass(frozen=True)
class Row:
    """A feature of a run, or several of a kind.

    Args:
        name: its name on the page.
        needs: what it needs, in one sentence.
        refusals: yields what of a run does not go with it; nothing where the run does not have it.
        features: those of its kind that methods can refuse, which are columns of the page.
    """

    name: str
    needs: str
    refusals: Callable[[Run], Iterator[Refusal]]
    features: tuple[Feature, ...] = ()
