"""What the meters that draw have in common. A figure that cannot be drawn is a warning with the
reason, and never ends a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn

from fl_lightning.config.constraints import within
from fl_lightning.figures import plain_text
from fl_lightning.hooks import Context
from fl_lightning.methods import Method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fl_lightning")

STUDENT, TEACHER = "student (deployed)", "teacher (full precision)"


Every = Annotated[
    int, within("[0, inf)", "rounds between figures, 0 or more", "write every: 0 for the end only")
]


@contextmanager
def never_fatal(what: str) -> Iterator[None]:
    """Within the block an error is a warning."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        log.warning(
            "%s is left out (%s: %s); the run goes on without it",
            what,
            type(error).__name__,
            reason,
        )


def draw(context: Context, name: str, make: Callable[[], Figure], round: int | None = None) -> None:
    """Log the figure that ``make`` gives as ``name``, or as ``name_round_0060`` for round 60; by
    rank 0, the others have the same."""
    name = name if round is None else f"{name}_round_{round:04d}"
    if getattr(rank_zero_only, "rank", 0) == 0:
        with never_fatal(f"figures/{name}"):
            context.log_figure(name, plain_text(make()))


def own_copy(context: Context) -> Any:
    """Return a copy of the method, whose changes leave the resident one as it is. The data are not
    copied."""
    return deepcopy(context.method, {id(context.data): context.data})


def student_and_teacher(method: Method) -> dict[str, nn.Module]:
    """Return what is deployed and, where that is quantised, the same in full precision, by name and
    in evaluation mode."""
    teacher = method.full_precision()
    if teacher is None:
        return {"deployed in full precision": method.deploy().eval()}
    return {STUDENT: method.deploy().eval(), TEACHER: teacher.eval()}


def evenly_spaced(total: int, most: int) -> np.ndarray:
    """``most`` of ``total`` clients at most, by their places ``[min(total, most)]``."""
    return np.unique(np.linspace(0, total - 1, min(total, most)).round().astype(int))


def sample(shown: int, total: int) -> str:
    """Return how many clients a figure shows, for its title."""
    if total == 1:
        return "1 client"
    if shown == total:
        return f"{total} clients"
    return f"{shown} of {total} clients (evenly spaced sample)"
