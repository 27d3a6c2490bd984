"""The command ``sweep``: it runs every cell of a study. Started again, it does what is left,
whatever ended it before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console

from fl_lightning.errors import require
from fl_lightning.study.execute.cells import StudyCells
from fl_lightning.study.execute.estimate import show_plan
from fl_lightning.study.execute.jobs import Pool, slots_for, threads_per_job
from fl_lightning.study.execute.lock import only_one
from fl_lightning.study.execute.session import SweepSession
from fl_lightning.study.execute.shards import WHOLE, Shard
from fl_lightning.study.execute.until import UntilSession, with_flags
from fl_lightning.study.plan.study import Study
from fl_lightning.study.results.published import published_rows

Resolve = Callable[[list[str]], str]


def sweep(
    config: str,
    jobs: int = 1,
    root: str = "runs",
    devices: str = "auto",
    logger: bool = True,
    dry_run: bool = False,
    until: Literal["decided"] | None = None,
    max_seeds: int | None = None,
    max_hours: float | None = None,
    shard: str | None = None,
    *,
    resolve: Resolve,
) -> None:
    """Run every cell of a study that is not finished yet.

    Failed cells are listed and do not stop the rest. With ``until``, or where the study file has
    it, the seeds that the study lists are run first, and then one after another is added until
    every criterion is decided by confidence sequences.

    Args:
        config: the study file.
        jobs: cells that run at a time, at least 1.
        root: folder of all runs; those of the study go to ``<root>/<study>/``.
        devices: GPUs that cells are dealt to in turn: ``auto`` for all, ``none``, or their numbers,
            as in ``0,2``.
        logger: false: no MLflow, neither for the study nor for its cells.
        dry_run: print the cells and an estimate of time and bytes, and create nothing.
        until: ``decided``: add seeds until every criterion of the study is decided.
        max_seeds: the number of seeds at which that ends, those that the study lists among them; 50
            if neither this flag nor the study file says otherwise.
        max_hours: the hours of sweeping, over all sessions of this study, at which it ends.
        shard: the part of the study that this machine runs, such as ``3/8``: the third of eight.
    """
    part = WHOLE if shard is None else Shard.read(shard)
    study = with_flags(Study.read(config), until, max_seeds, max_hours)
    rule = "seeds are added by what all cells show, so that one machine runs them all"
    require(
        part.is_whole or study.until is None,
        f"--shard {part} with until",
        rule,
        "leave one of them out",
    )
    for published in study.published:  # before anything is trained that cannot be compared
        published_rows(published)
    slots = slots_for(jobs, devices)
    cells = planned(StudyCells.plan(study, Path(root), resolve, part), jobs)
    if dry_run:
        show_plan(cells, jobs)
        if study.until is not None:
            most = study.until.max_seeds
            Console(soft_wrap=True).print(
                f"seeds are added until every criterion is decided: {most} at most"
            )
        return
    with pool_of(cells, slots) as pool:
        if study.until is None:
            SweepSession(cells, pool, logger).run()
        else:
            UntilSession(cells, pool, logger, jobs_at_a_time=jobs).run()


def planned(cells: StudyCells, jobs: int) -> StudyCells:
    """Return the cells, each with the threads of its process when so many jobs run at a time."""
    for state in cells:
        state.threads = threads_per_job(jobs, state.threads)
    return cells


@contextmanager
def pool_of(cells: StudyCells, slots: Sequence[Mapping[str, str]]) -> Iterator[Pool]:
    """Yield the pool of the only session that runs these cells now.

    Raises:
        InputError: another one runs them.
    """
    with only_one(cells.folder, cells.shard) as held:
        for state in cells:
            state.find_run(cells.folder)  # those of a sweep that was killed have stopped by now
        yield Pool(slots, held)
