"""Methods with personal models on the quadratic, written out without the code of any method.

c is the client's centre, x what it receives, ``own`` what it keeps. All values are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl_lightning.conformance.expectations import Expectation, QuadraticRun
from fl_lightning.conformance.toy import CENTRES, LR
from fl_lightning.conformance.verdicts import expect, show

Local = Callable[[Any, int, Tensor, Tensor, Any], tuple[Tensor, Any]]


class PersonalPath(Expectation):
    """The path of a method whose server averages the clients' weights, and whose clients keep
    something.

    Args:
        local: returns the weights that a client sends and what it keeps, given the method, the
            number of steps, c, x and ``own``.
        first: what a client keeps before its first round, given the method and the initial weights.
        model: the personal model, given the method, the server's weights and ``own``.
    """

    def __init__(
        self,
        local: Local,
        first: Callable[[Any, Tensor], Any] = lambda method, start: start,
        model: Callable[[Any, Tensor, Any], Tensor] = lambda method, x, own: own,
    ) -> None:
        self.local, self.first, self.model = local, first, model

    def expect_limit(self, run: QuadraticRun) -> None:
        for k, (end, expected) in enumerate(zip(run.end, self.ends(run), strict=True)):
            right = bool(((end - expected).abs() <= run.noise).all())
            rule = f"{show(expected)}, where its formula ends"
            expect(right, f"the model of client {k} ends at {show(end)}", rule)

    expect_one_step = expect_limit

    def ends(self, run: QuadraticRun) -> list[Tensor]:
        """Return every client's model after the run."""
        x, own = run.start[0].double(), dict[int, Any]()
        first = self.first(run.method, x)
        for cohort in run.cohorts:
            sent = {}
            for k in cohort:
                centre = CENTRES[k].double()
                sent[k], own[k] = self.local(run.method, run.epochs, centre, x, own.get(k, first))
            total = sum(run.weights[k] for k in cohort)
            x = torch.stack([run.weights[k] / total * y for k, y in sent.items()]).sum(0)
        return [self.model(run.method, x, own.get(k, first)) for k in range(len(run.counts))]


def ditto(method: Any, steps: int, centre: Tensor, x: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Steps of FedAvg, and those of v with the pull of ``lam``."""
    y, v = x, own
    for _ in range(steps):
        y, v = y - LR * (y - centre), v - LR * (v - centre + method.lam * (v - x))
    return y, v


def _with_head(
    method: Any, steps: int, centre: Tensor, x: Tensor, own: Tensor
) -> tuple[Tensor, Tensor]:
    y, P = x, own
    for _ in range(steps):
        y, P = y - LR * (y - centre), P - LR * (y + P - centre)
    return y, P


head_beside = PersonalPath(
    _with_head, lambda method, start: torch.zeros_like(start), lambda method, x, own: x + own
)
"""Steps of FedAvg, and those of a head P, whose feature is 1; the personal model is x + P."""


def _mixed(method: Any, steps: int, centre: Tensor, x: Tensor, own: Any) -> tuple[Tensor, Any]:
    y, (v, A) = x, own
    for step in range(steps):
        g = A * v + (1 - A) * y - centre
        learnt = (A - LR * (v - y) @ g).clamp(0, 1) if step == 0 and method.adaptive else A
        y, v, A = y - LR * (y - centre), v - LR * A * g, learnt
    return y, (v, A)


mixture = PersonalPath(
    _mixed,
    lambda method, start: (start, torch.tensor(method.alpha).double()),
    lambda method, x, own: own[1] * own[0] + (1 - own[1]) * x,
)
"""Steps of FedAvg, and those of v and A of APFL; the personal model is A v + (1 - A) x."""


def _adapted(method: Any, steps: int, centre: Tensor, x: Tensor, own: Any) -> tuple[Tensor, Any]:
    v, W = own
    for _ in range(method.ala_epochs):
        W = (W - method.ala_lr * (v + (x - v) * W - centre) * (x - v)).clamp(0, 1)
    y = v + (x - v) * W
    for _ in range(steps):
        y = y - LR * (y - centre)
    return y, (y, W)


adapted = PersonalPath(
    _adapted, lambda method, start: (start, torch.ones_like(start)), lambda method, x, own: own[0]
)
"""Steps of FedAvg from the mixture of FedALA, after steps of W; the personal model is v."""


def _alone(
    method: Any, steps: int, centre: Tensor, x: Tensor, own: Tensor
) -> tuple[Tensor, Tensor]:
    y = centre + (1 - LR) ** steps * (own - centre)
    return y, y


alone = PersonalPath(_alone)
"""Steps of each client from its own weights; features of the quadratic are inputs, and nothing
moves them."""
