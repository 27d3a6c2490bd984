"""SCAFFOLD on the quadratic (Karimireddy et al., ICML 2020, Algorithm 1 with option II), written out without
any method's code.

    y_i <- y_i - eta_l (g_i(y_i) - c_i + c),  K_i times from x   c_i+ = c_i - c + (x - y_i) / (K_i eta_l)
    x <- x + sum_{i in S} p_i (y_i - x)                          c <- c + 1/N sum_{i in S} (c_i+ - c_i)

g_i(y) = y - c_i* with c_i* the client's centre; p_i as the method declares, 1 / |S| in the paper. All in
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fl_lightning.conformance.expectations import Expectation, Walk
from fl_lightning.conformance.toy import CENTRES, LR
from fl_lightning.conformance.verdicts import require, show


@dataclass(frozen=True)
class Round:
    """What is done in a round.

    Args:
        made: local steps that each client of the cohort makes, by id.
        planned: those that it would make if it were not a straggler.
        lr: eta_l.
    """

    made: Mapping[int, int]
    planned: Mapping[int, int]
    lr: float


Factor = Callable[[Round, int], float]


def one(round: Round, k: int) -> float:
    return 1.0


def path(
    start: Tensor,
    rounds: Sequence[Round],
    weights: Sequence[float],
    *,
    sign: float = 1.0,
    keeps: bool = True,
    divisor: Callable[[int, int], int] = max,
    factor: Factor = one,
) -> list[Tensor]:
    """x after each round, float64 ``[6]``; the keywords are the ways to get it wrong.

    Args:
        weights: what each client of the federation counts for in the mean.
        sign: of the correction c - c_i.
        keeps: whether c_i is there in the client's next round.
        divisor: of the sum of the clients' changes, from N and |S|.
        factor: of (x - y_i) / (K_i eta_l), from the round and the client.
    """
    x, c, own = start.double(), torch.zeros(CENTRES.shape[1], dtype=torch.float64), dict[int, Tensor]()
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


def diagnosis(
    start: Tensor, rounds: Sequence[Round], weights: Sequence[float], found: Sequence[Tensor], noise: float
) -> str:
    """Which known mistake leads along the path that was found; empty when none does."""
    for slip, wrong in _slips():
        if distance(wrong(start, rounds, weights), found) <= 10 * noise:
            return slip
    # after two rounds x is a linear function of the factor
    zero, unit = (path(start, rounds[:2], weights, factor=lambda r, k, f=f: f)[-1] for f in (0.0, 1.0))  # type: ignore[misc]
    factor = float((found[1].double() - zero) @ (unit - zero) / ((unit - zero) @ (unit - zero)))
    if distance(path(start, rounds, weights, factor=lambda r, k: factor), found) <= 10 * noise:
        return (
            f"c_i+ takes {factor:.3g} (x - y_i) / (K eta_l): K is local_steps and eta_l is local_lr, "
            "which upload may read"
        )
    return ""


def _slips() -> Iterator[tuple[str, Callable[..., list[Tensor]]]]:
    yield "the correction has the wrong sign: a local step goes along g - c_i + c", partial(path, sign=-1.0)
    yield (
        "c moves by the sum of the clients' changes: divide it by N, the clients of the federation",
        partial(path, divisor=lambda N, S: 1),
    )
    yield (
        "c moves by the mean change of the clients that returned: it is |S|/N of that, the sum divided by N",
        partial(path, divisor=lambda N, S: S),
    )
    yield (
        "c_i is not there in the client's next round: keep it in client.state and read it in receive",
        partial(path, keeps=False),
    )
    factors: list[tuple[str, Factor]] = [
        ("(x - y_i) / eta_l: divide by K too, which is local_steps", lambda r, k: r.made[k]),
        ("(x - y_i) / K: divide by eta_l too, which is local_lr", lambda r, k: r.lr),
        (
            "the steps that were planned for K: a straggler makes fewer, local_steps",
            lambda r, k: r.made[k] / r.planned[k],
        ),
        ("the first round's learning rate for eta_l: that of this round is local_lr", lambda r, k: r.lr / LR),
    ]
    for takes, factor in factors:
        yield f"c_i+ takes {takes}", partial(path, factor=factor)


def distance(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest difference between two paths; infinite where one of them is not finite."""
    difference = (torch.stack(list(expected)).double() - torch.stack(list(found)).double()).abs()
    return float(difference.nan_to_num(float("inf"), float("inf")).max())


class ControlVariates(Expectation):
    """The path of SCAFFOLD, with every client making as many steps."""

    def settled(self, walk: Walk) -> None:
        (start,), (end,) = walk.start, walk.end
        rounds = [
            Round(dict.fromkeys(cohort, walk.epochs), dict.fromkeys(cohort, walk.epochs), LR)
            for cohort in walk.cohorts
        ]
        expected = path(start, rounds, walk.weights)[-1]
        right = distance([expected], [end]) <= walk.noise
        require(right, f"it ends at {show(end)}, and SCAFFOLD at {show(expected)}: see control variates")

    stepped = settled
