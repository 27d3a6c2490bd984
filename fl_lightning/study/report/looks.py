"""The looks at a study that adds seeds: after each complete seed, which criteria are decided.

The intervals are confidence sequences, which hold the truth at all looks together, so that looking
costs nothing and any reason to stop is a fair one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fl_lightning.study.plan.criteria import Inequality
from fl_lightning.study.plan.stopping import Ending, Stopping
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.report.verdicts import Verdict, verdicts
from fl_lightning.study.results.runs import Results
from fl_lightning.study.results.seeds import begun_beyond, complete_seeds, of_seeds


def is_awaited(verdict: Verdict) -> bool:
    """Return whether seeds are added because of this verdict.

    They are not where no seed can decide it any more, and where it is not of seeds, see
    :func:`is_of_seeds`.
    """
    return verdict.is_open and is_of_seeds(verdict)


def is_of_seeds(verdict: Verdict) -> bool:
    """Return whether seeds are a way to decide such a criterion.

    They are not for what a clock measured, since two sweeps would then stop at different seeds, nor
    for what is only counted (bytes): it has no interval that more seeds would narrow.
    """
    is_counted = all(
        isinstance(one, Inequality) and all(quantity.is_exact for quantity in one.quantities)
        for one in verdict.criterion.conditions
    )
    return not verdict.is_timing and not is_counted


def looks(results: Results, listed: int) -> Iterator[Stopping]:
    """Yield one look after each complete seed, beginning with the last that the study lists, up to
    the first at which every criterion is decided.

    Args:
        results: the results of all seeds that there are.
        listed: the number of seeds that the study lists.
    """
    rule, complete = results.study.until, complete_seeds(results)
    assert rule is not None
    for count in range(listed, len(complete) + 1):
        seeds = tuple(complete[:count])
        judged = verdicts(Comparison(of_seeds(results, seeds)))
        undecided: tuple[str, ...] = ()
        ending: Ending = "decided"
        if any(map(is_awaited, judged)):
            found = [one for one in judged if one.decision == "undecided" and is_of_seeds(one)]
            undecided = tuple(one.criterion.title for one in found)
            ending = "max_seeds" if count == rule.max_seeds else "open"
        yield Stopping(seeds, ending, undecided)
        if not undecided:
            return


def counted(results: Results) -> Results:
    """Return the results of the seeds that count.

    Of a study whose seeds are fixed, these are all of them. Of one that adds seeds, they are the
    complete seeds up to the first look at which every criterion is decided. As long as not all
    seeds that it lists are complete, these count as far as they are there.
    """
    study = results.study
    if study.until is None:
        return results
    *_, stopping = [Stopping(), *looks(results, len(study.seeds))]
    seeds = stopping.seeds or study.seeds
    if stopping.ending == "open" and any(entry.has_failed for entry in results.excluded):
        stopping = replace(stopping, ending="failed")
    stopping = replace(stopping, beyond=tuple(begun_beyond(results, seeds)))
    return replace(of_seeds(results, seeds), stopping=stopping)
