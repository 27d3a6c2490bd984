"""The forms in which ``configure_optimizers`` returns an optimiser with its schedule, which are
Lightning's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fl_lightning.errors import InputError


def unpack(found: Any, name: str) -> tuple[Optimizer, LRScheduler | None, int]:
    """Return the optimiser, its scheduler and the rounds between two of the scheduler's steps, from
    any form that Lightning knows.

    Args:
        found: what ``configure_optimizers`` returned.
        name: of the class that did.

    Raises:
        InputError: it is not one optimiser, or there is a schedule that cannot go by rounds.
    """
    schedulers: Any = []
    if (
        isinstance(found, (tuple, list))
        and len(found) == 2
        and all(isinstance(part, (tuple, list)) for part in found)
    ):
        found, schedulers = found
    if isinstance(found, (tuple, list)) and len(found) == 1:
        found = found[0]
    if isinstance(found, Mapping):
        schedulers = [found["lr_scheduler"]] if found.get("lr_scheduler") is not None else []
        found = found.get("optimizer")
    if not isinstance(found, Optimizer):
        raise InputError(
            f"configure_optimizers of {name} returns {_form(found)}",
            "a client has one local optimiser",
            "return one, with at most one scheduler",
        )
    where = f"configure_optimizers of {name}"
    if not schedulers:
        return found, None, 1
    if len(schedulers) > 1:
        raise InputError(
            f"{where} returns {len(schedulers)} schedulers",
            "a local optimiser has one schedule",
            "return one",
        )
    scheduler, every = schedulers[0], 1
    if isinstance(scheduler, Mapping):
        settings, scheduler = scheduler, scheduler.get("scheduler")
        if settings.get("interval", "epoch") != "epoch":
            raise InputError(
                f"{where} steps its scheduler by {settings['interval']!r}",
                "a client's optimiser lives for one round, so a schedule goes by rounds",
                "write interval: 'epoch', which is a round here",
            )
        every = settings.get("frequency", 1)
        if not isinstance(every, int) or every < 1:
            raise InputError(
                f"{where} has a scheduler of frequency {every!r}",
                "it is a number of rounds, at least 1",
                "write 1",
            )
    return found, steps_by_rounds(scheduler, where), every


def steps_by_rounds(scheduler: Any, where: str) -> LRScheduler:
    """Return a scheduler, or refuse one whose rate of a round does not follow from its number.

    Args:
        scheduler: what was given.
        where: by what.
    """
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        raise InputError(
            f"{where}: {type(scheduler).__name__}",
            "the learning rate of a round follows from its number, so that a resume is exact, and not "
            "from a metric",
            "write one of torch.optim.lr_scheduler, such as CosineAnnealingLR or StepLR",
        )
    return scheduler


def _form(found: Any) -> str:
    return f"{len(found)} of them" if isinstance(found, (tuple, list)) else type(found).__name__
