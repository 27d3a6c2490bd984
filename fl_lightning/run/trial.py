"""``--trainer.fast_dev_run``: everything is tried out once, small, and nothing is left behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from fl_lightning.client import Assignment
from fl_lightning.errors import InputError
from fl_lightning.hooks import Context, Stressor

log = logging.getLogger("fl_lightning")

MOST_CLIENTS = 2
ONE_STEP = 1e-9  # a share of the local steps; one is made at least


class Trainer(Protocol):
    """What is changed of a trainer while a configuration is tried out."""

    fast_dev_run: int
    root: Path
    logger: Any
    max_rounds: int
    eval_every: int
    checkpoint_every: int | None
    auto_resume: bool
    callbacks: list[Any]


class FewClients(Stressor):
    """Leaves a cohort two clients, such as train if any do, and each of them one local step."""

    def change_cohort(self, cohort: list[Assignment], *, round: int, context: Context) -> list[Assignment]:
        training = [assignment for assignment in cohort if assignment.trains and assignment.returns] or cohort
        return [replace(one, work=ONE_STEP, trains=True, returns=True) for one in training[:MOST_CLIENTS]]


@contextmanager
def tried_out(trainer: Trainer, ckpt_path: str | None) -> Iterator[None]:
    """Within the block a trainer with ``fast_dev_run`` is one of few rounds, few clients, no trackers and a
    folder that goes away.

    Raises:
        InputError: a run is to be continued.
    """
    rounds = trainer.fast_dev_run
    if not rounds:
        yield
        return
    if ckpt_path:
        raise InputError(
            f"--trainer.fast_dev_run with --ckpt_path {ckpt_path}",
            "it tries a configuration out and continues no run",
            "leave one of them out",
        )
    names = ("root", "logger", "max_rounds", "eval_every", "checkpoint_every", "auto_resume", "callbacks")
    before = {name: getattr(trainer, name) for name in names}
    trainer.logger, trainer.auto_resume = False, False
    trainer.max_rounds, trainer.eval_every, trainer.checkpoint_every = rounds, 1, 0
    trainer.callbacks = [*trainer.callbacks, FewClients()]
    try:
        with TemporaryDirectory(prefix="fl_lightning_") as folder:
            trainer.root = Path(folder)
            yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)
    clients = f"at most {MOST_CLIENTS} clients with one local step each"
    log.info(
        "fast_dev_run: everything ran: %d round%s of %s; nothing was kept", rounds, "s"[: rounds > 1], clients
    )
