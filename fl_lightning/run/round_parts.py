"""What a round is made of beside its clients' steps: protection, a clock, a topology, a sampler."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_lightning.aggregation.base import Aggregation
from fl_lightning.aggregation.choice import choose_aggregation
from fl_lightning.aggregation.named_clients import NamedClients
from fl_lightning.aggregation.private import PrivateAggregation
from fl_lightning.aggregation.server import RECEIVING, receives_anywhere
from fl_lightning.clock import Clock, Rounds, Synchronous, Timing
from fl_lightning.compatibility import Run
from fl_lightning.config.settings import flatten
from fl_lightning.data import FederatedData
from fl_lightning.federation import Federation
from fl_lightning.hooks import Callback, sees_uploads
from fl_lightning.methods import Method
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.run.places import check_place
from fl_lightning.run.progress import Progress
from fl_lightning.run.resume import Start
from fl_lightning.run.taken_back import made_otherwise, was_private
from fl_lightning.sampling import Sampler, Uniform
from fl_lightning.topology import Star, Topology

log = logging.getLogger("fl_lightning")


@dataclass
class RoundParts:
    """The parts of a trainer's rounds, of the settings of :class:`fl_lightning.FederatedTrainer`.

    Args:
        masks: of ``secure_sum``.
        privacy: makes sums private.
        rounds: when a round ends.
        timing: the time of ``clock``, or in a deployment the time that passes.
        topology: who talks to whom.
        sampler: who is asked.
    """

    masks: SecureSum | None
    privacy: PrivateAggregation | None
    rounds: Rounds
    timing: Timing | None
    topology: Topology
    sampler: Sampler

    @classmethod
    def of(
        cls,
        secure_sum: SecureSum | None,
        privacy: ClientPrivacy | None,
        clock: Clock | None,
        rounds: Rounds | None,
        topology: Topology | None,
        sampler: Sampler | None,
    ) -> RoundParts:
        """Return the parts of settings, with their defaults."""
        rounds = rounds or Synchronous()
        return cls(
            secure_sum,
            None if privacy is None else PrivateAggregation(privacy),
            rounds,
            None if clock is None else Timing(clock, rounds),
            topology or Star(),
            sampler or Uniform(),
        )

    @property
    def are_in_clear(self) -> bool:
        """Whether the server sees what single clients send."""
        return self.masks is None and self.privacy is None

    @property
    def budgets(self) -> list[PrivateAggregation]:
        """What ends a run by what it has spent, one that only tries a configuration out too."""
        return [] if self.privacy is None else [self.privacy]

    def around(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Return the callbacks of a run: those of the parts before and after these."""
        return [
            *self.budgets,
            *callbacks,
            *([NamedClients()] if self.masks else []),
            *([self.timing] if self.timing else []),
            *self.topology.meters(),
            *([] if self.sampler.is_uniform else [self.sampler]),
        ]

    def aggregation(
        self, method: Method, data: FederatedData, callbacks: Sequence[Callback], processes: int
    ) -> Aggregation:
        """Return the way from uploads to the next state.

        Args:
            processes: those that train clients; each of them receives all uploads if what receives
                them writes to the method.
        """
        single = self.rounds.has_versions or any(map(sees_uploads, callbacks))
        single = single or (processes > 1 and not receives_anywhere(method))
        return self.topology.way(
            choose_aggregation(method, self.masks, self.privacy, single=single), data
        )

    def combined(self, method: Method, callbacks: Sequence[Callback], *, deployed: bool) -> Run:
        """Return what is to be combined with a method, before the data are read."""
        run = Run(
            method,
            callbacks,
            self.masks,
            self.privacy,
            deployed=deployed,
            rounds=self.rounds,
            topology=self.topology,
            sampler=self.sampler,
        )
        return run if self.timing is None else run.timed(self.timing)

    def check_start(self, start: Start, data: FederatedData, *, deployed: bool) -> None:
        """Refuse to continue a run where its clients or its noise cannot be, as
        :func:`fl_lightning.run.places.check_place` has it."""
        check_place(start, deployed=deployed, private=self.privacy is not None, own_data=data.apart)

    def check_masks(self, fed: Federation, *, deployed: bool) -> None:
        """Refuse masks that a cohort cannot have, and say what a method loses under them, or with
        privacy on several processes.

        Raises:
            InputError: it has one client, or the cryptography is not installed.
        """
        if self.masks is not None:
            self.masks.check_usable(fed.cohort_size)
            if not deployed:
                log.info(
                    "secure_sum: keys are drawn from the seed, for reproducible runs; they are no secrets"
                )
            where, becomes = "secure_sum: each client receives its upload", "is lost"
        elif self.privacy is not None and fed.fabric.world_size > 1:
            where, becomes = "privacy: each process receives its clients' uploads", "differs there"
        else:
            return
        if not receives_anywhere(fed.method):
            log.warning(
                "%s, and what %s of %s write to the method %s; receives_anywhere = True says that they "
                "write nothing",
                where, ", ".join(sorted(RECEIVING)), type(fed.method).__name__, becomes,
            )  # fmt: skip

    def continue_in(self, run_dir: Path | None, progress: Progress, device: object) -> None:
        """Go on with the budget of a run, as :meth:`PrivateAggregation.continue_in` has it."""
        done = progress.done.round
        if self.privacy is not None:
            changed = progress.changed or (
                run_dir is not None
                and made_otherwise(run_dir, done, flatten(progress.settings), str(device))
            )
            self.privacy.continue_in(run_dir, done, there=progress.there, changed=changed)
        elif done and run_dir is not None and was_private(run_dir):
            log.warning(
                "earlier rounds of this run were private, later ones are not: it has no epsilon any more"
            )
