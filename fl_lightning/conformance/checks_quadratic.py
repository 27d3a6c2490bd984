"""Checks on the quadratic: the point to which a method moves, and the weights that it gives to
clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.conformance.bench import Bench
from fl_lightning.conformance.declarations import declared
from fl_lightning.conformance.verdicts import NotApplicable, expect, show
from fl_lightning.conformance.watch import OnlyClients

ROUNDS = 60
"""Rounds of two steps; each step leaves 0.9 of the distance, so 3e-6 of it is left at the end."""


def known_optimum(bench: Bench) -> None:
    """With clients of 3 and 1 examples it ends at the known optimum."""
    bench.subject.expects.expect_limit(bench.quadratic_run((3, 1), max_rounds=ROUNDS))


def agreement(bench: Bench) -> None:
    """With one client it reaches that client's optimum."""
    bench.subject.expects.expect_limit(bench.quadratic_run((3,), max_rounds=ROUNDS))


def partial_participation(bench: Bench) -> None:
    """A step with 2 of 6 clients is the mean step of these two."""
    run = bench.quadratic_run((1, 2, 3, 4, 5, 6), max_rounds=1, participation=2 / 6, local_epochs=1)
    bench.subject.expects.expect_one_step(run)


def learning(bench: Bench) -> None:
    """With one client the training loss falls."""
    losses = bench.points((3,), max_rounds=10).log.losses
    expect(
        losses[-1] < losses[0],
        f"the loss goes from {losses[0]:.4g} in round 1 to {losses[-1]:.4g} in round 10",
    )


def weights_by_examples(bench: Bench) -> str:
    """A client of 3 examples counts like 3 clients of one example."""
    one = bench.points((3, 1, 5, 2, 1, 1), OnlyClients(0, 1), labels=(0, 1, 4, 5, 2, 3))
    if one.method.personalised:
        raise NotApplicable("it is personalised, so its broadcasts need not weigh clients by n_k")
    by_n = (
        "it declares uniform_clients, but a client of 3 examples counts for more than one of 1: remove "
        "that declaration, or weigh clients alike"
    )
    if declared(one.method).uniform_clients:
        _require_same(bench, one.answers(), _of_one_example(bench), by_n)
        return "declared: every client counts once"
    if declared(one.method).scales_with_federation:
        raise NotApplicable(
            "it declares scales_with_federation, so 3 clients need not count like one of 3 examples"
        )
    three = bench.points((1, 1, 1, 1, 1, 1), OnlyClients(0, 1, 2, 3), labels=(0, 0, 0, 1, 4, 5))
    if (
        _difference(one.answers(), three.answers())
        > bench.subject.noise
        >= _difference(one.answers(), _of_one_example(bench))
    ):
        alike = (
            "clients count alike, whatever their examples: weigh them by n_k, or declare "
            "uniform_clients = True if that is meant"
        )
        _require_same(bench, one.answers(), three.answers(), alike)
    _require_same(bench, one.answers(), three.answers())
    return ""


def _of_one_example(bench: Bench) -> list[Tensor]:
    """Return the answers when the two clients have one example each."""
    return bench.points((1, 1, 1, 1, 1, 1), OnlyClients(0, 1), labels=(0, 1, 4, 5, 2, 3)).answers()


def copies(bench: Bench) -> None:
    """Repeating each example of a client three times changes nothing."""
    # padding with blank examples, whose class is 0, would pull towards another centre
    once, thrice = (bench.points((n,), labels=(1,)) for n in (1, 3))
    _require_same(bench, once.answers(), thrice.answers())


def permutation(bench: Bench) -> None:
    """Numbering the clients in another order changes nothing."""
    order = (2, 0, 1)
    first, second = bench.points((3, 1, 2)), bench.points((2, 3, 1), labels=order)
    expected = [first.answers()[k] for k in order] if first.method.personalised else first.answers()
    _require_same(bench, expected, second.answers())


def _require_same(
    bench: Bench, expected: list[Tensor], found: list[Tensor], reason: str = ""
) -> None:
    difference = _difference(expected, found)
    expect(
        difference <= bench.subject.noise,
        f"the answers of the deployed model differ by {difference:.3g}: {show(found[0])}",
        show(expected[0]),
        reason,
    )


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    return float((torch.stack(expected) - torch.stack(found)).abs().max())
