"""The command ``tune``: Optuna chooses settings by validation, then one run with the best of them
joins the study; or, for all methods of a study, a record of what was chosen for each.

The search is in ``<root>/<study>-tune/optuna.db``. Trial n is drawn from the trials before it by a
sampler seeded with (seed, n). A trial that was at work when the search was killed continues from
its checkpoint: with ``--jobs 1``, killed or not, the search is the same. The threads of a trial are
those of the first start.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from os.path import expanduser
from pathlib import Path

from fl_lightning.errors import InputError, as_bad_input
from fl_lightning.run.directory import read_json, to_json
from fl_lightning.study.execute.jobs import Pool, slots_for, threads_per_job
from fl_lightning.study.execute.lock import only_one
from fl_lightning.study.execute.trials import DATABASE, STORE_ERRORS, SearchSession
from fl_lightning.study.execute.tune_study import StudySearchSession, check_record
from fl_lightning.study.plan.search import Search
from fl_lightning.support.disk import replace

THREADS = "threads.json"
"""The file in the folder of the trials that keeps their threads."""


def tune(
    config: str,
    jobs: int = 1,
    root: str = "runs",
    devices: str = "auto",
    logger: bool = True,
    *,
    resolve: Callable[[list[str]], str],
) -> None:
    """Search for the best settings, then run once with them in the study.

    Started again, it does what is left. Where the search file names a study file, every method of
    the study is tuned with the same number of trials, and a record of what was chosen is written,
    which the study reads by ``tuned``.

    Args:
        config: the search file.
        jobs: trials that run at a time, at least 1. With more than one, what is tried depends on
            which trials end first; not so for the methods of a study, each of which runs one trial
            at a time.
        root: folder of all runs; trials go to ``<root>/<study>-tune/``, the final run to
            ``<root>/<study>/``.
        devices: GPUs that trials are dealt to in turn: ``auto`` for all, ``none``, or their
            numbers, as in ``0,2``.
        logger: false: no MLflow.
    """
    search = Search.read(config)
    slots = slots_for(jobs, devices)
    for part in search.parts or (search,):
        for corner in part.corners():
            try:
                resolve(part.args(corner))
            except InputError as error:
                of = f" of {part.label}" if part.label else ""
                raise error.within(
                    f"{search.path}, a trial{of} with {json.dumps(corner)}"
                ) from error
    if not search.parts:
        resolve(search.args(search.corners()[0], final=True))
    else:
        check_record(search)
    folder = Path(expanduser(root)) / search.name
    with only_one(folder) as held:
        environment = {"OMP_NUM_THREADS": str(_threads(folder, jobs))}
        pool = Pool(slots, held)
        session = StudySearchSession if search.parts else SearchSession
        rule = "the search's database cannot be read or written"
        instead = "make room or end what holds it, then give the command again"
        with as_bad_input(f"{folder / DATABASE}", rule, instead, *STORE_ERRORS):
            session(search, folder, pool, logger, environment, resolve).run()


def _threads(folder: Path, jobs: int) -> int:
    """Return the threads of each trial, which the first start decides, and keep them in the folder:
    they change how sums are rounded."""
    before = read_json(folder / THREADS).get("threads", 0)
    threads = threads_per_job(jobs, before if isinstance(before, int) else 0)
    replace(folder / THREADS, to_json({"threads": threads}).encode())
    return threads
