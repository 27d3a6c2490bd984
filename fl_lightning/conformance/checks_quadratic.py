"""Checks on the quadratic: where a method goes, and how it weighs its clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.conformance.bench import Bench
from fl_lightning.conformance.verdicts import NotApplicable, require
from fl_lightning.conformance.watch import Only

ROUNDS = 60
"""Of two steps that each leave 0.9 of the way: 3e-6 of it is left."""


def known_optimum(bench: Bench) -> None:
    """Clients of 3 and 1 examples: it ends where it should."""
    bench.subject.expects.settled(bench.walk((3, 1), max_rounds=ROUNDS))


def agreement(bench: Bench) -> None:
    """One client: its optimum is reached."""
    bench.subject.expects.settled(bench.walk((3,), max_rounds=ROUNDS))


def partial_participation(bench: Bench) -> None:
    """2 of 6: only they count, and all of it."""
    walk = bench.walk((1, 2, 3, 4, 5, 6), max_rounds=1, participation=2 / 6, local_epochs=1)
    bench.subject.expects.stepped(walk)


def learning(bench: Bench) -> None:
    """One client, its own loss: the loss falls."""
    losses = bench.points((3,), max_rounds=10).log.losses
    require(losses[-1] < losses[0], f"it goes from {losses[0]:.4g} in round 1 to {losses[-1]:.4g} in round 10")


def weights_by_examples(bench: Bench) -> None:
    """A client of 3 examples counts as 3 clients of one."""
    one = bench.points((3, 1, 5, 2), Only(0, 1), labels=(0, 1, 4, 5))
    if one.method.personalised:
        raise NotApplicable("it is personalised: what a client is sent need not go by n_k")
    three = bench.points((1, 1, 1, 1, 1, 1), Only(0, 1, 2, 3), labels=(0, 0, 0, 1, 4, 5))
    _require_same(bench, one.answers(), three.answers())


def copies(bench: Bench) -> None:
    """A client with each example three times learns the same."""
    once, thrice = (bench.points((n,), labels=(1,)) for n in (1, 3))  # blank examples, of class 0, would pull elsewhere
    _require_same(bench, once.answers(), thrice.answers())


def permutation(bench: Bench) -> None:
    """Numbering the clients otherwise changes nothing."""
    order = (2, 0, 1)
    first, second = bench.points((3, 1, 2)), bench.points((2, 3, 1), labels=order)
    expected = [first.answers()[k] for k in order] if first.method.personalised else first.answers()
    _require_same(bench, expected, second.answers())


def _require_same(bench: Bench, expected: list[Tensor], found: list[Tensor]) -> None:
    difference = float((torch.stack(expected) - torch.stack(found)).abs().max())
    require(difference <= bench.subject.noise, f"the answers of the deployed model differ by {difference:.3g}")
