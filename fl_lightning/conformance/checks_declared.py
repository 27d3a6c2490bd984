"""Checks of the properties that a method declares: each is declared exactly if the method has
it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from fl_lightning.aggregation.averages import CoordinateMedian
from fl_lightning.aggregation.server_optimizers import ServerSGD
from fl_lightning.compatibility import why_not
from fl_lightning.compatibility.features import overrides_hook
from fl_lightning.conformance.bench import Bench
from fl_lightning.conformance.declarations import declared
from fl_lightning.conformance.feddyn import alpha_of, feddyn_path
from fl_lightning.conformance.feddyn import diagnose as diagnose_feddyn
from fl_lightning.conformance.scaffold import ScaffoldRound, diagnose, distance, scaffold_path
from fl_lightning.conformance.toy import LR
from fl_lightning.conformance.verdicts import NotApplicable, expect, show
from fl_lightning.conformance.watch import (
    AnswerRecorder,
    OnlyClients,
    SlowClients,
    equal_with_nan,
)
from fl_lightning.errors import InputError

EXAMPLES, EPOCHS, BATCH_SIZE, ROUNDS, LR_DECAY = (2, 4, 6, 2, 4, 6), 2, 2, 8, 0.8
SLOW_CLIENTS, WORK_SHARE = (1, 3, 5), 0.5


def federation_size(bench: Bench) -> None:
    """Clients that never take part change nothing, unless declared."""
    runs = [bench.points((3, 1, *[2] * more), OnlyClients(0, 1)) for more in (1, 4)]
    few, many = (run.answers()[:2] for run in runs)
    difference = max(float((a - b).abs().max()) for a, b in zip(few, many, strict=True))
    if declared(runs[0].method).scales_with_federation:
        expect(
            difference > bench.subject.noise,
            (
                "it declares scales_with_federation, and three more clients that never take part change "
                "nothing: divide by N, len(data.active), where the formula does, and not by the clients "
                "that returned; or remove that declaration"
            ),
        )
    else:
        expect(
            difference <= bench.subject.noise,
            (
                "three more clients that never take part change the model's answers by "
                f"{difference:.3g}; weigh those that returned, or declare scales_with_federation = True "
                "if that is meant"
            ),
        )


def settings_of_the_server(bench: Bench) -> str:
    """An average and a server optimiser that the method is said to take change a round's result."""
    run, kind = bench.everyone, bench.untrained()
    asked: dict[str, Any] = {}
    if not overrides_hook(kind, "aggregate"):
        asked["average"] = CoordinateMedian()
    if not why_not(kind, "server_optimizer"):
        asked["server_optimizer"] = ServerSGD(lr=0.5)
    taken = []
    for name, setting in asked.items():
        try:
            method = bench.subject.make(**{name: setting})
        except (InputError, TypeError):  # its constructor, or another setting, has no room for it
            continue
        expected, found = run.log.servers[1], bench.run(method=method, max_rounds=1).method.server
        expect(
            any(not equal_with_nan(expected[one], found[one]) for one in expected if one in found),
            f"with {name} {type(setting).__name__} the server's next state is the same",
            cause="an own next_state that does not ask self.next_weights(sums), or an own addends "
            "whose Addend has no start",
        )
        taken.append(name)
    if not taken:
        raise NotApplicable("it takes neither an average nor a server optimiser")
    return f"it takes {' and '.join(taken)}"


def control_variates(bench: Bench) -> str:
    """2 of 6 clients, stragglers and a falling lr follow SCAFFOLD's path."""
    if not declared(bench.subject.make()).control_variates:
        raise NotApplicable("it declares no control variates")
    bench.require_known()
    answers, slow = AnswerRecorder(), SlowClients(SLOW_CLIENTS, WORK_SHARE)
    settings: dict[str, Any] = {
        "max_rounds": ROUNDS,
        "participation": 2 / 6,
        "local_epochs": EPOCHS,
        "batch_size": BATCH_SIZE,
    }
    run = bench.points(
        EXAMPLES, slow, answers, scheduler=partial(ExponentialLR, gamma=LR_DECAY), **settings
    )
    planned = {k: EPOCHS * n // BATCH_SIZE for k, n in enumerate(EXAMPLES)}
    made = {
        k: math.ceil(steps * (WORK_SHARE if k in SLOW_CLIENTS else 1))
        for k, steps in planned.items()
    }
    rounds = [
        ScaffoldRound({k: made[k] for k in cohort}, planned, LR * LR_DECAY**number)
        for number, cohort in enumerate(run.log.cohorts)
    ]
    weights = [1] * len(EXAMPLES) if declared(run.method).uniform_clients else EXAMPLES
    (start,) = bench.start_on_points(run.trainer.data)
    expected, found = scaffold_path(start, rounds, weights), answers.seen
    wrong = _first_round_apart(expected, found, bench.subject.noise)
    if wrong is not None:
        why = diagnose(start, rounds, weights, found, bench.subject.noise)
        if not any(run.log.kept.values()):
            why = "its clients keep nothing: c_i stays with the client, in client.state"
        shown = (
            f"after round {wrong + 1} the model is at {show(found[wrong])}, and SCAFFOLD at "
            f"{show(expected[wrong])}"
        )
        expect(False, f"{why}; {shown}" if why else shown)
    return "declared: SCAFFOLD's, option II"


def dynamic_regularisation(bench: Bench) -> str:
    """2 of 6 clients follow FedDyn's path."""
    if not declared(bench.subject.make()).dynamic_regularisation:
        raise NotApplicable("it declares no dynamic regularisation")
    bench.require_known()
    answers = AnswerRecorder()
    run = bench.points(
        EXAMPLES, answers, max_rounds=ROUNDS, participation=2 / 6, local_epochs=EPOCHS
    )
    (start,) = bench.start_on_points(run.trainer.data)
    alpha, keeps = alpha_of(run.method), any(run.log.kept.values())
    path = partial(feddyn_path, start, run.log.cohorts, len(EXAMPLES), EPOCHS, alpha=alpha)
    if alpha == 0 and not keeps:  # then it has no H, and is the mean of its clients
        alike = declared(run.method).uniform_clients
        path = partial(path, adds=0.0, weights=() if alike else EXAMPLES)
    expected, found, noise = path(), answers.seen, bench.subject.noise
    expect(
        keeps or alpha == 0,
        "its clients keep nothing in client.state",
        "H_i, which upload puts there and receive reads",
        "H_i is an attribute of the module, which one process has for all clients, and no checkpoint",
    )
    wrong = _first_round_apart(expected, found, noise)
    if wrong is not None:
        clients = " and ".join(map(str, run.log.cohorts[wrong]))
        seen = f"after round {wrong + 1}, of clients {clients}, the model is at"
        right = f"{show(expected[wrong])}, FedDyn's"
        expect(
            False,
            f"{seen} {show(found[wrong])}",
            right,
            diagnose_feddyn(path, EXAMPLES, found, noise),
        )
    return "declared: FedDyn's"


def _first_round_apart(
    expected: Sequence[Tensor], found: Sequence[Tensor], noise: float
) -> int | None:
    """Return the first round, counted from 0, after which two paths differ by more than
    ``noise``."""
    paths = zip(expected, found, strict=True)
    return next((r for r, (a, b) in enumerate(paths) if not distance([a], [b]) <= noise), None)
