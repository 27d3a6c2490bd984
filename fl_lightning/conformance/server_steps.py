"""Server optimisers written out once more, as their papers have them, and what follows for a method
that has one: its path on the quadratic, and its next broadcast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.conformance.expectations import Expectation, QuadraticRun
from fl_lightning.conformance.references import History
from fl_lightning.conformance.toy import CENTRES, LR
from fl_lightning.conformance.verdicts import expect, show
from fl_lightning.methods import Method

Memory = dict[str, Tensor]
Rule = Callable[[Any, Memory, Tensor, Tensor, float, int], tuple[Tensor, Tensor]]
"""What the server does with x and D = sum p_i (y_i - x): it gets the optimiser's settings, what it
remembers, which it changes, x, D, sum p_i ||y_i - x||^2 and the number of the round, and returns
what is sent next and what is evaluated."""


def momentum(
    o: Any, memory: Memory, x: Tensor, D: Tensor, squares: float, t: int
) -> tuple[Tensor, Tensor]:
    """Hsu et al. (2019): v <- B v - D, x <- x - g v; with Nesterov x <- x - g (B v - D)."""
    memory["velocity"] = v = o.momentum * memory.get("velocity", torch.zeros_like(D)) - D
    x = x - o.lr * (o.momentum * v - D if o.nesterov else v)
    return x, x


def adaptive(second: Callable[[Tensor, Tensor, float], Tensor]) -> Rule:
    """Return the rule of Reddi et al. (2021), algorithm 2, given v of the last v, D^2 and
    beta_2."""

    def rule(
        o: Any, memory: Memory, x: Tensor, D: Tensor, squares: float, t: int
    ) -> tuple[Tensor, Tensor]:
        beta_1, beta_2 = o.betas
        m = beta_1 * memory.get("first_moment", torch.zeros_like(D)) + (1 - beta_1) * D
        v = second(memory.get("second_moment", torch.full_like(D, o.tau**2)), D**2, beta_2)
        memory |= {"first_moment": m, "second_moment": v}
        x = x + o.lr * m / (v**0.5 + o.tau)
        return x, x

    return rule


adam = adaptive(lambda v, square, beta: beta * v + (1 - beta) * square)
yogi = adaptive(lambda v, square, beta: v - (1 - beta) * square * (v - square).sign())
adagrad = adaptive(lambda v, square, beta: v + square)


def exp(
    o: Any, memory: Memory, x: Tensor, D: Tensor, squares: float, t: int
) -> tuple[Tensor, Tensor]:
    """Jhunjhunwala et al. (2023): x <- x + max(1, squares / (2 (||D||^2 + eps_t))) D."""
    ratio = squares / (2 * (float(D @ D) + o.eps * o.eps_decay ** (t - 1)))
    after, first = x + max(1.0, ratio) * D, not float(memory.get("gain", torch.zeros(1)))
    memory["gain"] = torch.ones(1)
    return after, (x + after) / 2 if o.mean_of_two and not first else after


def acg(
    o: Any, memory: Memory, x: Tensor, D: Tensor, squares: float, t: int
) -> tuple[Tensor, Tensor]:
    """Kim et al. (2024), from x as it was sent: M <- lam M + D, evaluated is x + D, sent is x + D +
    lam M."""
    memory["momentum"] = M = o.lam * memory.get("momentum", torch.zeros_like(D)) + D
    return x + D + o.lam * M, x + D


class ServerPath(Expectation):
    """The path of a method whose server makes the step of a rule with the mean of its clients."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def expect_limit(self, run: QuadraticRun) -> None:
        (end,), expected = run.end, self.solve(run)
        right = float((end.double() - expected).abs().max()) <= run.noise
        expect(right, f"it ends at {show(end)}", f"{show(expected)}, where its server's rule leads")

    expect_one_step = expect_limit

    def solve(self, run: QuadraticRun) -> Tensor:
        """Return what is evaluated after the run, float64 ``[6]``."""
        sent = evaluated = run.start[0].double()
        memory: Memory = {}
        mu = sum(getattr(term, "mu", 0.0) for term in run.method.terms)
        for t, cohort in enumerate(run.cohorts, start=1):
            ended = {}
            for k in cohort:
                y = sent
                for _ in range(run.epochs):
                    y = y - LR * (y - CENTRES[k].double() + mu * (y - sent))
                ended[k] = y
            D, squares = _change(ended, sent, run.weights)
            sent, evaluated = self.rule(run.method.server_optimizer, memory, sent, D, squares, t)
        return evaluated


def next_weights(rule: Rule) -> Callable[[History, Sequence[int], Method, int], Tensor]:
    """Return the formula of the weights that are sent after the last round of a history, float64
    ``[P]``: the rule's for parameters, the mean for statistics."""

    def formula(history: History, sizes: Sequence[int], method: Method, client: int) -> Tensor:
        x = method.server["weights"].double()
        P = sum(p.numel() for p in method.network.parameters())
        ended = {id: method.decode(upload).double() for id, upload in history[-1].items()}
        memory = {
            name.partition("/")[2]: tensor.double()
            for name, tensor in method.server.items()
            if "/" in name
        }
        D, squares = _change({id: y[:P] for id, y in ended.items()}, x[:P], sizes)
        sent, _ = rule(method.server_optimizer, memory, x[:P], D, squares, len(history))
        statistics, _ = _change({id: y[P:] for id, y in ended.items()}, x[P:], sizes)
        return torch.cat([sent, x[P:] + statistics])

    return formula


def _change(ended: Mapping[int, Tensor], x: Tensor, weights: Sequence[int]) -> tuple[Tensor, float]:
    """Return sum p_i (y_i - x) and sum p_i ||y_i - x||^2."""
    total = sum(weights[k] for k in ended)
    updates = [(weights[k] / total, y - x) for k, y in ended.items()]
    return torch.stack([p * u for p, u in updates]).sum(0), sum(
        p * float(u @ u) for p, u in updates
    )
