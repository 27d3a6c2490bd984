"""Checks of what a method declares of itself: that it is so, and that it is declared where it is so."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import ExponentialLR

from fl_lightning.conformance.bench import Bench
from fl_lightning.conformance.scaffold import Round, diagnosis, distance, path
from fl_lightning.conformance.toy import LR
from fl_lightning.conformance.verdicts import NotApplicable, require, show
from fl_lightning.conformance.watch import Answers, Only, Slow

COUNTS, EPOCHS, BATCH, ROUNDS, DECAY = (2, 4, 6, 2, 4, 6), 2, 2, 8, 0.8
SLOW, WORK = (1, 3, 5), 0.5


def federation_size(bench: Bench) -> None:
    """Clients that never take part do not matter, unless so declared."""
    runs = [bench.points((3, 1, *[2] * more), Only(0, 1)) for more in (1, 4)]
    few, many = (run.answers()[:2] for run in runs)
    difference = max(float((a - b).abs().max()) for a, b in zip(few, many, strict=True))
    if runs[0].method.scales_with_federation:
        require(
            difference > bench.subject.noise,
            (
                "it declares scales_with_federation, and three more clients that never take part change "
                "nothing: take that back"
            ),
        )
    else:
        require(
            difference <= bench.subject.noise,
            (
                "three more clients that never take part change the model's answers by "
                f"{difference:.3g}; weigh those that returned, or declare scales_with_federation = True "
                "if that is meant"
            ),
        )


def control_variates(bench: Bench) -> str:
    """2 of 6, stragglers, a falling lr: the path of SCAFFOLD."""
    if not bench.subject.make().control_variates:
        raise NotApplicable("it declares no control variates")
    bench.require_known()
    answers, slow = Answers(), Slow(SLOW, WORK)
    settings: dict[str, Any] = {
        "max_rounds": ROUNDS,
        "participation": 2 / 6,
        "local_epochs": EPOCHS,
        "batch_size": BATCH,
    }
    run = bench.points(COUNTS, slow, answers, scheduler=partial(ExponentialLR, gamma=DECAY), **settings)
    planned = {k: EPOCHS * n // BATCH for k, n in enumerate(COUNTS)}
    made = {k: math.ceil(steps * (WORK if k in SLOW else 1)) for k, steps in planned.items()}
    rounds = [
        Round({k: made[k] for k in cohort}, planned, LR * DECAY**number)
        for number, cohort in enumerate(run.log.cohorts)
    ]
    weights = [1] * len(COUNTS) if run.method.uniform_clients else COUNTS
    (start,) = bench.start_on_points(run.trainer.data)
    expected, found = path(start, rounds, weights), answers.seen
    wrong = next(
        (
            r
            for r in range(ROUNDS)
            if not distance(expected[r : r + 1], found[r : r + 1]) <= bench.subject.noise
        ),
        None,
    )
    if wrong is not None:
        why = diagnosis(start, rounds, weights, found, bench.subject.noise)
        if not any(run.log.kept.values()):
            why = "its clients keep nothing: c_i stays with the client, in client.state"
        shown = (
            f"after round {wrong + 1} the model is at {show(found[wrong])}, and SCAFFOLD at "
            f"{show(expected[wrong])}"
        )
        require(False, f"{why}; {shown}" if why else shown)
    return "declared: SCAFFOLD's, option II"
