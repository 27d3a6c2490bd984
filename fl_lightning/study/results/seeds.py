"""The seeds of a study that adds seeds: which are complete, and the results of some of them.

Seeds are looked at in the order in which they are run, and only whole: seed number n counts when every cell
of the first n seeds is finished, and tested where the study asks for tests. So which seeds count depends on
the results alone, and not on which cell ended first, on ``--jobs``, or on whether the sweep was killed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fl_lightning.study.results.runs import ExcludedRun, Results


def complete_seeds(results: Results) -> list[int]:
    """Return the seeds, in the study's order and up to the first gap, whose cells are all there and tested
    where the study asks for it."""
    study = results.study
    count = len(study.methods) * math.prod(map(len, study.grid.values()))
    done = dict.fromkeys(study.seed_order, 0)
    for run in results.runs:
        is_tested = study.test is None or bool(run.record.tested) or not run.record.typed
        done[run.seed] = done.get(run.seed, 0) + is_tested
    complete = []
    for seed in study.seed_order:
        if done[seed] < count:
            break
        complete.append(seed)
    return complete


def of_seeds(results: Results, seeds: Sequence[int]) -> Results:
    """Return the results of these seeds, as those of a study that has them.

    What is left out of the study's other seeds is said in one line a seed.
    """
    kept = [run for run in results.runs if run.seed in seeds]
    beyond = sorted({run.seed for run in results.runs} - {*seeds})
    others = {cell.name for cell in replace(results.study, seeds=results.study.seed_order).cells()}
    others -= {cell.name for cell in replace(results.study, seeds=list(seeds)).cells()}
    excluded = [entry for entry in results.excluded if entry.name not in others]
    excluded += [ExcludedRun(f"seed {seed}", "it is after the last seed that counts") for seed in beyond]
    return replace(results, study=replace(results.study, seeds=list(seeds)), runs=kept, excluded=excluded)
