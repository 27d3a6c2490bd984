"""The seeds of a study that adds seeds: which are complete, and the results of some of them.

Seeds are looked at in the order in which they are run, and only whole: seed number n counts when
every cell of the first n seeds is finished, and tested where the study asks for tests. So which
seeds count depends on the results alone, and not on which cell ended first, on ``--jobs``, or on
whether the sweep was killed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fl_lightning.study.plan.study import Study
from fl_lightning.study.results.runs import NO_RUN, ExcludedRun, Results


def complete_seeds(results: Results) -> list[int]:
    """Return the seeds, in the study's order and up to the first gap, whose cells are all there and
    tested where the study asks for it."""
    study = results.study
    count = len(study.methods) * math.prod(map(len, study.grid.values()))
    done = dict.fromkeys(study.seed_order, 0)
    for run in results.runs:
        is_tested = study.test is None or run.record.test.is_there or not run.record.typed
        done[run.seed] = done.get(run.seed, 0) + is_tested
    complete = []
    for seed in study.seed_order:
        if done[seed] < count:
            break
        complete.append(seed)
    return complete


def of_seeds(results: Results, seeds: Sequence[int]) -> Results:
    """Return the results of these seeds, as those of a study that has them; nothing is said of
    others."""
    study = results.study
    others = _cells(study, [seed for seed in study.seed_order if seed not in seeds])
    kept = [run for run in results.runs if run.seed in seeds]
    excluded = [entry for entry in results.excluded if _cell_of(entry, others) is None]
    tests = {f"test.json of {run.name}" for run in kept}
    other_tests = [entry for entry in results.other_tests if entry.name in tests]
    study = replace(study, seeds=list(seeds))
    return replace(results, study=study, runs=kept, excluded=excluded, other_tests=other_tests)


def begun_beyond(results: Results, seeds: Sequence[int]) -> list[int]:
    """Return the seeds other than these that have a run, finished or not."""
    others = _cells(results.study, [seed for seed in results.study.seed_order if seed not in seeds])
    begun = {run.seed for run in results.runs}
    for entry in results.excluded:
        cell = _cell_of(entry, others)
        begun |= {others[cell]} if cell and not entry.reason.startswith(NO_RUN) else set()
    return sorted(begun - {*seeds})


def _cells(study: Study, seeds: list[int]) -> dict[str, int]:
    """Return the seed of each cell of these seeds, by name."""
    return {cell.name: cell.seed for cell in replace(study, seeds=seeds).cells()}


def _cell_of(entry: ExcludedRun, cells: Mapping[str, int]) -> str | None:
    """Return the one of these cells that an entry is about; a second run of a cell has a number at
    its end."""
    return next(
        (name for name in (entry.name, re.sub(r"-\d+$", "", entry.name)) if name in cells), None
    )
