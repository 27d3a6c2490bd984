"""What a client's local steps are, for who measures their cost, and what they were, for what it
sends: K and eta_l of SCAFFOLD's option II, tau of FedNova."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client import Client
from fl_lightning.errors import MisuseError
from fl_lightning.wire import Payload, PayloadError


@dataclass(frozen=True, slots=True)
class LocalWork:
    """The local steps of one client in one round.

    Args:
        steps: optimiser steps.
        optimizer: what made them.
    """

    steps: int
    optimizer: Optimizer

    @property
    def lr(self) -> float:
        """The one learning rate.

        Raises:
            MisuseError: there are several.
        """
        lrs = [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]
        if len(set(lrs)) != 1:
            raise MisuseError(
                f"local_lr of an optimiser with learning rates {lrs}",
                "it is one number",
                "give all parameters one lr",
            )
        return lrs[0]


class WithLocalWork:
    """The part of a method that knows its client's local steps while ``upload`` runs."""

    network: nn.Module
    trained_names: Sequence[str]
    local_work: LocalWork | None = None
    """Set by the engine."""
    labels_of: Callable[[Client], Tensor] | None = None
    """Returns the labels that a client trains on in this round. A method whose ``deploy`` reads
    them sets it in ``build``; a run then has those that stressors have changed."""

    @property
    def local_steps(self) -> int:
        """K, the optimiser steps that this client made in this round, fewer for a straggler; known
        while ``upload`` runs."""
        return self._local_work("local_steps").steps

    @property
    def local_lr(self) -> float:
        """eta_l, the learning rate of those steps in this round, as the schedule has it; known
        while ``upload`` runs, and one where groups of parameters have the same."""
        return self._local_work("local_lr").lr

    def trained_size(self, client: Client) -> int:
        """Return how many values of ``network`` this client's local steps train."""
        return sum(self.network.get_parameter(name).numel() for name in self.trained_names)

    def step_kind(self, batch_idx: int) -> str:
        """Return what decides, beside the form of its batch, how much a local step computes; asked
        just before the step."""
        return ""

    def check_rates(self) -> None:
        """Refuse the learning rates of ``round`` where the method cannot go by them; asked for
        every round of a schedule before the run."""

    def _local_work(self, name: str) -> LocalWork:
        if self.local_work is None:
            text = (
                f"{type(self).__name__}.{name} is known while upload runs, when the steps are done"
            )
            raise RuntimeError(f"{text}; read it there")
        return self.local_work


def check_steps(upload: Payload, asked: int | None) -> None:
    """Refuse an upload whose ``steps`` no client can have made.

    Args:
        upload: says how many local steps its client made.
        asked: how many it was asked for; None where that is not known.

    Raises:
        PayloadError: they are not a whole number from 1 to that.
    """
    steps = float(upload.tensor("steps"))
    most = steps if asked is None else asked
    if not (1 <= steps <= most and steps.is_integer()):
        raise PayloadError(
            f"steps {steps:g}",
            f"they are a whole number from 1 to the {most:g} asked for",
            "send that",
        )
