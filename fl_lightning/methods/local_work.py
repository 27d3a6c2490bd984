"""What a client's local steps were, for what it sends: K and eta_l of SCAFFOLD's option II, tau of
FedNova."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from fl_lightning.errors import MisuseError


@dataclass(frozen=True, slots=True)
class LocalWork:
    """The local steps of one client in one round.

    Args:
        steps: optimiser steps.
        lrs: learning rate of each group of parameters.
    """

    steps: int
    lrs: tuple[float, ...]

    @classmethod
    def of(cls, steps: int, optimizer: Optimizer) -> LocalWork:
        return cls(steps, tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group))

    @property
    def lr(self) -> float:
        """The one learning rate.

        Raises:
            MisuseError: there are several.
        """
        if len(set(self.lrs)) != 1:
            raise MisuseError(
                f"local_lr of an optimiser with learning rates {list(self.lrs)}",
                "it is one number",
                "give all parameters one lr",
            )
        return self.lrs[0]
