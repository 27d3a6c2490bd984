"""Label noise that arrives during training: from round 60 on, 10 % of the active clients have 20 %
of their labels flipped."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from callbacks.stressors.draws import own_stream
from fl_lightning.client import Assignment, Client
from fl_lightning.config.constraints import Constraint, within
from fl_lightning.errors import InputError
from fl_lightning.hooks import Context, Stressor
from fl_lightning.rng import stream
from fl_lightning.tasks import Classification

log = logging.getLogger("fl_lightning")


class LabelNoise(Stressor):
    """From ``round`` on, some clients have some training labels flipped: the same clients and the
    same flips in every round.

    A noisy client has ``round(labels * n_k)`` labels flipped: of classification each to any other
    class with equal probability; of regression they change places; of language modelling the
    labelled tokens of these examples become others, in the target and where the network reads them.
    A warning names a noisy client that has no other labels, such as one with a single target.
    Validation labels stay clean. Of two, each draws its own clients and flips.

    Args:
        round: first round with noise, counted from 1.
        clients: share of the active clients that are noisy, in [0, 1]; rounded, but at least one
            client when positive.
        labels: share of a noisy client's training labels that are flipped, in [0, 1].
        among: the active clients: ``federation``: all that have training data; ``cohort``: those of
            them that were sampled in round ``round``; a sampler that asks clients for their loss
            before it draws that cohort is told of clean labels.
    """

    def __init__(
        self,
        round: Annotated[
            int,
            within(
                "[1, inf)", "rounds are counted from 1", "for noise from the start write round: 1"
            ),
        ] = 60,
        clients: Annotated[
            float, within("[0, 1]", "a share lies in [0, 1]", "for 10 % write clients: 0.1")
        ] = 0.1,
        labels: Annotated[
            float, within("[0, 1]", "a share lies in [0, 1]", "for 10 % write labels: 0.1")
        ] = 0.2,
        among: Annotated[
            Literal["federation", "cohort"], Constraint("it is federation or cohort", "federation")
        ] = "federation",
    ) -> None:
        self.round, self.clients, self.labels, self.among = round, clients, labels, among
        # federation: recomputed at will; cohort: known from round ``round`` on, and saved
        self._noisy: frozenset[int] | None = None
        self._unchanged: set[int] = set()
        """Noisy clients of which it was said that their labels stay."""

    def on_check(self, context: Context) -> None:
        self._noisy, self._unchanged = None, set()
        if (
            self.among == "cohort"
            and context.timing is not None
            and context.timing.rounds.has_versions
        ):
            raise InputError(
                "LabelNoise(among='cohort') with asynchronous rounds",
                "clients start at any time, and a version has no cohort",
                "write among: federation",
            )
        task, target = context.data.task, context.data.train_target[:0].cpu()
        # or it refuses
        task.corrupt(target, np.empty(0, np.int64), stream(context.seed, "label_noise"), 2)
        if context.data.num_classes < 2 and isinstance(task, Classification):
            raise InputError(
                "LabelNoise on data with one class",
                "a flipped label needs another class",
                "take other data or leave it out",
            )
        if self.round > context.max_rounds:
            log.warning(
                (
                    "LabelNoise starts at round %d and the run ends at %d: nothing is flipped; for "
                    "noise set round to %d or less"
                ),
                self.round, context.max_rounds, context.max_rounds,
            )  # fmt: skip

    def change_cohort(
        self, cohort: list[Assignment], *, round: int, context: Context
    ) -> list[Assignment]:
        if self.among == "cohort" and round == self.round:
            self._noisy = self._choose(
                np.array([a.client.id for a in cohort if len(a.client.train)], np.int64), context
            )
        return cohort

    def change_labels(
        self, labels: Tensor, *, client: Client, round: int, context: Context
    ) -> Tensor:
        if round < self.round or client.id not in self._noisy_clients(round, context):
            return labels
        random = stream(
            context.seed, own_stream("label_noise", self, context), self.round, client.id
        )
        where = random.choice(len(labels), size=_rounded(self.labels * len(labels)), replace=False)
        wrong = context.data.task.corrupt(labels, where, random, context.data.num_classes)
        if len(where) and client.id not in self._unchanged and torch.equal(wrong, labels):
            self._unchanged.add(client.id)
            log.warning(
                "label noise finds no other labels for client %d: it stays clean", client.id
            )
        return wrong

    def state_dict(self) -> dict[str, Any]:
        if self.among == "cohort" and self._noisy is not None:
            return {"noisy": sorted(self._noisy)}
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._noisy = frozenset(state["noisy"]) if "noisy" in state else None

    def _noisy_clients(self, round: int, context: Context) -> frozenset[int]:
        if self._noisy is None:
            if self.among == "cohort":
                if round == self.round:
                    return frozenset()  # a sampler asks before the cohort is drawn
                raise InputError(
                    f"LabelNoise(among='cohort') joined the run after round {self.round}",
                    "it chooses from that round's cohort",
                    "resume from an earlier checkpoint or write among: federation",
                )
            self._noisy = self._choose(np.flatnonzero(context.data.sizes), context)
        return self._noisy

    def _choose(self, active: np.ndarray, context: Context) -> frozenset[int]:
        """Independent of the order of ``active``; sorted and drawn once, so that 100 000 clients
        cost milliseconds."""
        count = max(_rounded(self.clients * len(active)), int(self.clients > 0 and len(active) > 0))
        random = stream(context.seed, own_stream("label_noise_clients", self, context))
        chosen = random.choice(np.sort(active), size=count, replace=False)
        share = 100 * self.labels
        log.info(
            "label noise from round %d: %d of %d clients, %g %% of their labels",
            self.round,
            count,
            len(active),
            share,
        )
        return frozenset(chosen.tolist())


def _rounded(value: float) -> int:
    return round(value)  # a name of its own: in the hooks ``round`` is the number of the round
