"""What ``test`` measured is put side by side only where it is of the same checkpoint."""

from __future__ import annotations

from dataclasses import replace

from fl_lightning.study.results.runs import Results, Run, Uncounted, run_metrics


def with_one_checkpoint(results: Results) -> Results:
    """Leave out the metrics of ``test`` that are of another checkpoint than those of other runs, and say so.

    ``last`` is the run's final round: a test made before the run went on is of an earlier one. When some runs
    were tested at ``last`` and some at ``best``, none of their tests counts, since nothing says which was
    meant.
    """
    reasons = {id(run): reason for run in results.runs if (reason := _outdated(run))}
    tested = [run for run in results.runs if run.found.tested and id(run) not in reasons]
    kinds = sorted({run.found.checkpoint for run in tested})
    if len(kinds) > 1:
        reasons |= {
            id(run): (
                f"it is of the checkpoint {run.found.checkpoint}, those of other runs of "
                f"{', '.join(kind for kind in kinds if kind != run.found.checkpoint)}; test all with "
                "one --checkpoint"
            )
            for run in tested
        }
    if not reasons:
        return results
    target = results.study.target_accuracy
    runs = [_without_test(run, target) if id(run) in reasons else run for run in results.runs]
    said = [
        Uncounted(f"test.json of {run.name}", reasons[id(run)]) for run in results.runs if id(run) in reasons
    ]
    return replace(results, runs=runs, uncounted=[*results.uncounted, *said])


def _outdated(run: Run) -> str:
    found = run.found
    if not found.tested or found.checkpoint != "last" or found.tested_round == run.rounds:
        return ""
    return f"it is of round {found.tested_round}, the run has {run.rounds}; test it again"


def _without_test(run: Run, target: float | None) -> Run:
    found = replace(run.found, tested={})
    return replace(run, found=found, metrics=run_metrics(found, target))
