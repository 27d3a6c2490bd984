"""FedDyn and FedDC on the quadratic, written out without the code of any method.

Source: Acar et al., ICLR 2021, Algorithm 1, with h_i = -a H_i and h = -a H.

    y_i <- y_i - eta (y_i - c_i* + a (y_i - x + H_i)),  K times from x
    H_i <- H_i + y_i - x
    H <- H + 1/N sum_{i in S} (y_i - x)
    x <- 1/|S| sum_{i in S} y_i + H

FedDC (Gao et al., CVPR 2022) adds G - g_i to the gradient, and

    g_i+ = g_i - G - (y_i - x) / (K eta)
    G <- G + 1/N sum (g_i+ - g_i)

c_i* is the client's centre. All values are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fl_lightning.conformance.declarations import declared
from fl_lightning.conformance.expectations import Expectation, QuadraticRun
from fl_lightning.conformance.scaffold import distance
from fl_lightning.conformance.toy import CENTRES, LR
from fl_lightning.conformance.verdicts import Violation, expect, show


def feddyn_path(
    start: Tensor,
    cohorts: Sequence[Sequence[int]],
    clients: int,
    epochs: int,
    alpha: float,
    controls: bool = False,
    *,
    signs: tuple[float, float] = (1.0, 1.0),
    keeps: float = 1.0,
    divisor: Callable[[int, int], int] = max,
    adds: float = 1.0,
    forgets: bool = False,
    weights: Sequence[int] = (),
) -> list[Tensor]:
    """Return x after each round, float64 ``[6]``.

    The defaults are FedDyn; the keywords stand for known mistakes.

    Args:
        start: x before the first round, ``[6]``.
        cohorts: ids of the clients of each round.
        clients: N.
        epochs: K.
        alpha: a.
        controls: whether there are G and g_i, as in FedDC.
        signs: factors of the linear and of the quadratic term.
        keeps: share of H_i that is left in the client's next update of it.
        divisor: what the sum of the clients' steps is divided by, given N and |S|.
        adds: share of H that is added to the mean.
        forgets: whether a client that sits out a round loses its H_i.
        weights: of each client of the federation in the mean; empty: all alike.
    """
    linear, quadratic = signs
    weights = weights or [1] * clients
    x, zero = start.double(), torch.zeros(6, dtype=torch.float64)
    shift, G, own, answers = zero, zero, dict[int, tuple[Tensor, Tensor]](), []
    for cohort in cohorts:
        ended, changes = [], zero
        for k in cohort:
            (history, g), y = own.get(k, (zero, zero)), x
            for _ in range(epochs):
                y = y - LR * (
                    y - CENTRES[k] + alpha * (quadratic * (y - x) + linear * history) + G - g
                )
            change = -G - (y - x) / (epochs * LR) if controls else zero
            own[k] = keeps * history + y - x, g + change
            ended.append(y)
            changes = changes + change
        if forgets:
            own = {k: own[k] for k in cohort}
        G = G + changes / clients
        mean = torch.tensor([weights[k] for k in cohort]).double() @ torch.stack(ended)
        mean = mean / sum(weights[k] for k in cohort)
        shift = shift + len(cohort) / divisor(clients, len(cohort)) * (mean - x)
        x = mean + adds * shift
        answers.append(x)
    return answers


def diagnose(
    path: Callable[..., list[Tensor]], counts: Sequence[int], found: Sequence[Tensor], noise: float
) -> str:
    """Name the known mistake that explains the path ``found``; return an empty text if none does.

    Args:
        path: :func:`feddyn_path` of the run, which takes its keywords.
        counts: examples of each client.
        found: x after each round.
        noise: largest deviation that rounding may cause.
    """
    near = [(distance(wrong(), found), mistake) for mistake, wrong in _known_mistakes(path, counts)]
    least, mistake = min(near)
    return mistake if least <= noise else ""


def _known_mistakes(
    path: Callable[..., list[Tensor]], counts: Sequence[int]
) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Yield the description of each known mistake, and the path of an implementation that makes
    it."""
    yield (
        "the linear term has the wrong sign: it is + alpha <H_i, y - x>, with H_i <- H_i + y_i - x",
        partial(path, signs=(-1.0, 1.0)),
    )
    yield (
        "the linear term is not there: add alpha <H_i, y - x>, with H_i from client.state",
        partial(path, signs=(0.0, 1.0)),
    )
    yield (
        "the quadratic term is not there: add alpha / 2 ||y - x||^2",
        partial(path, signs=(1.0, 0.0)),
    )
    yield (
        "the quadratic term is twice as strong: it is alpha / 2 ||y - x||^2",
        partial(path, signs=(1.0, 2.0)),
    )
    yield (
        "H moves by the mean step of the clients that returned: it is |S|/N of that, the sum divided by N",
        partial(path, divisor=lambda N, S: S),
    )
    yield (
        "H moves by the sum of the clients' steps: divide it by N, the clients of the federation",
        partial(path, divisor=lambda N, S: 1),
    )
    yield (
        "H_i is the last step alone: add y_i - x to the H_i that is in client.state",
        partial(path, keeps=0.0),
    )
    yield (
        "the H_i of a client that sits out a round is lost: it stays as it is until the client trains again",
        partial(path, forgets=True),
    )
    yield (
        "clients count by n_k: weigh them alike, by weigh_by='clients' in the call of super().__init__",
        partial(path, weights=counts),
    )
    yield "H is not added to the mean: x <- mean y_i + H", partial(path, adds=0.0)
    yield "H is taken away from the mean: x <- mean y_i + H", partial(path, adds=-1.0)


class DynamicRegularisation(Expectation):
    """The path of FedDyn when all clients make the same number of local steps.

    Args:
        controls: whether there are G and g_i, as in FedDC.
    """

    def __init__(self, controls: bool = False) -> None:
        self.controls = controls

    def expect_limit(self, run: QuadraticRun) -> None:
        (start,), (end,) = run.start, run.end
        clients, controls, alpha = len(run.counts), self.controls, alpha_of(run.method)
        path = partial(feddyn_path, start, run.cohorts, clients, run.epochs, alpha)
        # with alpha 0 a method may leave out all vectors, and is the mean of its clients
        ends = [path(adds=0.0, weights=run.weights)[-1]] if alpha == 0 else []
        ends.append(path(controls)[-1])
        right = any(bool(((end - each).abs() <= run.noise).all()) for each in ends)
        known = declared(run.method).dynamic_regularisation
        expect(
            right,
            f"it ends at {show(end)}",
            f"{show(ends[0])}, where its formula ends",
            "see dynamic regularisation" if known else "",
        )

    expect_one_step = expect_limit


def alpha_of(method: Any) -> float:
    """Return the weight of both terms.

    Raises:
        Violation: the method has no attribute ``alpha``.
    """
    if not hasattr(method, "alpha"):
        raise Violation(
            "it has no attribute alpha, by which the kit knows the weight of both terms; write self.alpha"
        )
    return float(method.alpha)
