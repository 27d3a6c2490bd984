"""SCAFFOLD on the quadratic, written out without the code of any method.

Source: Karimireddy et al., ICML 2020, Algorithm 1 with option II.

    y_i <- y_i - eta_l (g_i(y_i) - c_i + c)     K_i times from x
    c_i+ = c_i - c + (x - y_i) / (K_i eta_l)
    x <- x + sum_{i in S} p_i (y_i - x)
    c <- c + 1/N sum_{i in S} (c_i+ - c_i)

g_i(y) = y - c_i*, where c_i* is the client's centre. p_i is what the method declares; it is
1 / |S| in the paper. All values are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fl_lightning.conformance.declarations import declared
from fl_lightning.conformance.expectations import Expectation, QuadraticRun
from fl_lightning.conformance.toy import CENTRES, LR
from fl_lightning.conformance.verdicts import expect, show


@dataclass(frozen=True)
class ScaffoldRound:
    """The local steps of one round.

    Args:
        made: local steps that each client of the cohort makes, by id.
        planned: local steps that each client would make if it were no straggler, by id.
        lr: local learning rate eta_l.
    """

    made: Mapping[int, int]
    planned: Mapping[int, int]
    lr: float


Factor = Callable[[ScaffoldRound, int], float]


def scaffold_path(
    start: Tensor,
    rounds: Sequence[ScaffoldRound],
    weights: Sequence[float],
    *,
    sign: float = 1.0,
    keeps: bool = True,
    divisor: Callable[[int, int], int] = max,
    factor: Factor = lambda round, k: 1.0,
) -> list[Tensor]:
    """Return x after each round, float64 ``[6]``.

    The defaults are SCAFFOLD; other keywords stand for known mistakes.

    Args:
        start: x before the first round, ``[6]``.
        rounds: the local steps of each round.
        weights: weight of each client of the federation in the mean.
        sign: sign of the correction c - c_i.
        keeps: whether a client keeps c_i until its next round.
        divisor: what the sum of the clients' changes is divided by, given N and |S|.
        factor: factor of (x - y_i) / (K_i eta_l), given the round and the client.
    """
    x = start.double()
    c = torch.zeros(CENTRES.shape[1], dtype=torch.float64)
    own = dict[int, Tensor]()
    answers = []
    for round in rounds:
        moved, changes = torch.zeros_like(x), torch.zeros_like(c)
        total = sum(weights[k] for k in round.made)
        for k, steps in round.made.items():
            c_k, y = own.get(k, torch.zeros_like(c)), x.clone()
            for _ in range(steps):
                y = y - round.lr * (y - CENTRES[k] + sign * (c - c_k))
            new = c_k - c + factor(round, k) * (x - y) / (steps * round.lr)
            moved, changes = moved + weights[k] / total * (y - x), changes + new - c_k
            if keeps:
                own[k] = new
        x, c = x + moved, c + changes / divisor(len(weights), len(round.made))
        answers.append(x)
    return answers


def diagnose(
    start: Tensor,
    rounds: Sequence[ScaffoldRound],
    weights: Sequence[float],
    found: Sequence[Tensor],
    noise: float,
) -> str:
    """Name the known mistake that explains the path ``found``; return an empty text if none
    does."""
    for mistake, wrong in _known_mistakes():
        if distance(wrong(start, rounds, weights), found) <= 10 * noise:
            return mistake
    # after two rounds x is a linear function of the factor
    zero = scaffold_path(start, rounds[:2], weights, factor=lambda r, k: 0.0)[-1]
    unit = scaffold_path(start, rounds[:2], weights, factor=lambda r, k: 1.0)[-1]
    factor = float((found[1].double() - zero) @ (unit - zero) / ((unit - zero) @ (unit - zero)))
    if (
        distance(scaffold_path(start, rounds, weights, factor=lambda r, k: factor), found)
        <= 10 * noise
    ):
        return (
            f"c_i+ takes {factor:.3g} (x - y_i) / (K eta_l): K is local_steps and eta_l is local_lr, "
            "which upload may read"
        )
    return ""


def _known_mistakes() -> Iterator[tuple[str, Callable[..., list[Tensor]]]]:
    """Yield the description of each known mistake, and the path of an implementation that makes
    it."""
    yield (
        "the correction has the wrong sign: a local step goes along g - c_i + c",
        partial(scaffold_path, sign=-1.0),
    )
    yield (
        "c moves by the sum of the clients' changes: divide it by N, the clients of the federation",
        partial(scaffold_path, divisor=lambda N, S: 1),
    )
    yield (
        "c moves by the mean change of the clients that returned: it is |S|/N of that, the sum divided by N",
        partial(scaffold_path, divisor=lambda N, S: S),
    )
    yield (
        "c_i is not there in the client's next round: keep it in client.state and read it in receive",
        partial(scaffold_path, keeps=False),
    )
    factors: list[tuple[str, Factor]] = [
        ("(x - y_i) / eta_l: divide by K too, which is local_steps", lambda r, k: r.made[k]),
        ("(x - y_i) / K: divide by eta_l too, which is local_lr", lambda r, k: r.lr),
        (
            "the steps that were planned for K: a straggler makes fewer, local_steps",
            lambda r, k: r.made[k] / r.planned[k],
        ),
        (
            "the first round's learning rate for eta_l: that of this round is local_lr",
            lambda r, k: r.lr / LR,
        ),
    ]
    for takes, factor in factors:
        yield f"c_i+ takes {takes}", partial(scaffold_path, factor=factor)


def distance(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Return the largest difference between two paths; infinity if one of them is not finite."""
    difference = (torch.stack(list(expected)).double() - torch.stack(list(found)).double()).abs()
    return float(difference.nan_to_num(float("inf"), float("inf")).max())


class ControlVariates(Expectation):
    """The path of SCAFFOLD when all clients make the same number of local steps; the mean's where
    it has no control variates."""

    def expect_limit(self, run: QuadraticRun) -> None:
        (start,), (end,) = run.start, run.end
        rounds = [
            ScaffoldRound(dict.fromkeys(cohort, run.epochs), dict.fromkeys(cohort, run.epochs), LR)
            for cohort in run.cohorts
        ]
        sign = float(declared(run.method).control_variates)
        expected = scaffold_path(start, rounds, run.weights, sign=sign)[-1]
        right = distance([expected], [end]) <= run.noise
        expect(
            right,
            f"it ends at {show(end)}",
            f"{show(expected)}, where SCAFFOLD ends",
            "see control variates",
        )

    expect_one_step = expect_limit
