"""``--trainer.fast_dev_run``: a few small rounds that run all code once and leave no files."""

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
from fl_lightning.hooks import Context, Meter, Stressor
from fl_lightning.methods import Method

log = logging.getLogger("fl_lightning")

MIN_CLIENTS = 2
ONE_STEP_SHARE = 1e-9  # share of a client's local steps; every client makes at least one


class TrialSettings(Protocol):
    """The settings of a trainer that a trial run changes."""

    fast_dev_run: int
    root: Path
    logger: Any
    max_rounds: int
    eval_every: int
    checkpoint_every: int | None
    auto_resume: bool
    callbacks: list[Any]
    parts: Any


class FewClients(Stressor, Meter):
    """A stressor that leaves a cohort its first clients, with one local step each.

    Clients that train and return their upload are preferred.

    Args:
        count: how many are left.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def change_cohort(
        self, cohort: list[Assignment], *, round: int, context: Context
    ) -> list[Assignment]:
        training = [
            assignment for assignment in cohort if assignment.trains and assignment.returns
        ] or cohort
        return [
            replace(one, work=ONE_STEP_SHARE, trains=True, returns=True, leaves_before="")
            for one in training[: self.count]
        ]


@contextmanager
def trial_run(trainer: TrialSettings, method: Method, ckpt_path: str | None) -> Iterator[None]:
    """Return a context that makes a small trial run of a trainer whose ``fast_dev_run`` is not 0.

    In it the trainer has ``fast_dev_run`` rounds, two clients or as many as a round needs, no
    loggers and a temporary run directory; after it the trainer has its own settings again. Without
    ``fast_dev_run`` the context changes nothing.

    Raises:
        InputError: a run is to be continued.
    """
    rounds = trainer.fast_dev_run
    if not rounds:
        yield
        return
    if ckpt_path is not None:
        raise InputError(
            f"--trainer.fast_dev_run with --ckpt_path {ckpt_path}",
            "it tries a configuration out and continues no run",
            "leave one of them out",
        )
    names = (
        "root",
        "logger",
        "max_rounds",
        "eval_every",
        "checkpoint_every",
        "auto_resume",
        "callbacks",
    )
    before = {name: getattr(trainer, name) for name in names}
    trainer.logger, trainer.auto_resume = False, False
    trainer.max_rounds, trainer.eval_every, trainer.checkpoint_every = rounds, 1, 0
    timing, count = trainer.parts.timing, max(MIN_CLIENTS, method.average.fewest)
    if timing is not None:
        count = timing.most_clients = max(count, timing.rounds.fewest)
    trainer.callbacks = [*trainer.callbacks, FewClients(count)]
    try:
        with TemporaryDirectory(prefix="fl_lightning_") as folder:
            trainer.root = Path(folder)
            yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)
        if timing is not None:
            timing.most_clients = None
    clients = f"at most {count} clients with one local step each"
    log.info(
        "fast_dev_run: everything ran: %d round%s of %s; nothing was kept",
        rounds,
        "s"[: rounds > 1],
        clients,
    )
