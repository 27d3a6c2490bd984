"""How a controller is trained: random choices with gradients, expected joules, and the price of a
joule.

Logits theta ``[..., G, 3]`` are those of :mod:`fl_lightning.energy.controllers`; costs c are joules
``[G, 3]``, infinite where an option does not exist. The loss of a batch is

    L = CE + lambda (E / E_max - 1),    lambda <- max(0, lambda + eta (E_batch / E_max - 1))

In these relative units one eta serves all devices.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

TEMPERATURE = 2 / 3
"""tau of Jang, Gu and Poole and of Maddison, Mnih and Teh (ICLR 2017), where gates are nearly
binary."""
MOST_LOGIT = 8.0
"""Largest size of a logit in training: the least likely of two options is then drawn once in 3 000
times."""
MOST_VALUES = 2**27
"""Numbers that :func:`expected_energy` holds at a time: 512 MB of float32."""


def bounded(theta: Tensor, bound: float = MOST_LOGIT) -> Tensor:
    """Return logits no larger than ``bound`` in size, beyond which a gradient only leads back.

    Without a bound the logits of a controller grow until float32 knows no second option: p_z (c_z -
    E) is then 0, and no price moves it any more. Within the bound values and gradients are theta's;
    a plain clamp would hold what has left it outside for ever. This is the gradient *identity if
    towards* of Ballé's ``lower_bound`` in tensorflow-compression.

    Args:
        theta: logits of any shape; infinite ones stay.
        bound: above 0.
    """
    return _Bounded.apply(theta, bound)


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(theta)
        ctx.bound = bound
        return torch.where(theta.isinf(), theta, theta.clamp(-bound, bound))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (theta,) = ctx.saved_tensors
        # descent goes against the gradient
        back = (theta.abs() <= ctx.bound) | (outer[0] * theta > 0)
        return outer[0] * back, None


def probabilities(theta: Tensor, costs: Tensor) -> Tensor:
    """Return softmax(theta) over the options that exist, ``[..., G, 3]``.

    Args:
        theta: logits ``[..., G, 3]``.
        costs: joules ``[G, 3]``; an infinite one means that there is no such option.
    """
    return theta.masked_fill(costs.to(theta.device).isinf(), -math.inf).softmax(dim=-1)


def gumbel_choices(
    theta: Tensor, costs: Tensor, generator: np.random.Generator, temperature: float = TEMPERATURE
) -> Tensor:
    """Return a random option for each group as one-hot weights with a gradient, ``[..., G, 3]``.

    The values are those of argmax(theta + Gumbel noise), so an option is drawn with the probability
    softmax(theta). The gradient is that of softmax((theta + noise) / tau): the straight-through
    estimator.

    Args:
        theta: logits ``[..., G, 3]``.
        costs: joules ``[G, 3]``; options of infinite cost are never drawn.
        generator: the client's stream, as :func:`fl_lightning.rng.stream` makes it.
        temperature: tau, above 0.
    """
    noise = torch.from_numpy(generator.gumbel(size=tuple(theta.shape))).to(theta)
    soft = probabilities((theta + noise) / temperature, costs)
    hard = torch.zeros_like(soft).scatter(-1, soft.argmax(dim=-1, keepdim=True), 1.0)
    return hard + (soft - soft.detach())


def expected_energy(chances: Tensor, costs: Tensor) -> Tensor:
    """Return expected joules of a step whose T tokens draw their options independently, ``[...]``.

    An option that m of the tokens take costs c(m), whatever the shape of c: what does not grow with
    m is paid once, where any token takes it. E is the sum of E c_gz(M_gz) over groups and options,
    exactly, with M_gz the number of tokens that draw z in group g. For lines c(m) = a + b m that is
    a (1 - prod_t (1 - p_t)) + b sum_t p_t, and for a single token sum_z p_z c_z(1).

    It has a gradient in p that is exact and finite, also where p is 0 or 1: dE / dp_t is
    E c(M' + 1) - E c(M') with M' the tokens but t. With p = softmax(theta) of a single token,
    dE / dtheta_z = p_z (c_z - E_g), where E_g is the expectation of group g.

    Time is O(T^2) for each group and option: the distribution of M is that of a sum of unequal
    coins.

    Args:
        chances: p, the probability of each option ``[..., T, G, 3]``; 0 where there is no such
            option, and for tokens that are not computed.
        costs: joules of an option that 0, 1 ... T tokens take, ``[..., G, 3, T + 1]``; what is
            infinite is never taken, and counts 0.
    """
    tokens = chances.shape[-3]
    every = chances.movedim(-3, 0).reshape(tokens, -1)  # [T, R]
    joules = costs.to(chances)
    joules = joules.masked_fill(joules.isinf(), 0.0)
    joules = (
        joules.expand(*chances.shape[:-3], *costs.shape[-3:]).movedim(-1, 0).reshape(tokens + 1, -1)
    )
    rows = max(1, 2 * MOST_VALUES // (tokens + 1) ** 2)
    parts = zip(every.split(rows, dim=1), joules.split(rows, dim=1), strict=True)
    found: list[Any] = [_CoinCosts.apply(*part) for part in parts]
    shape = (*chances.shape[:-3], *chances.shape[-2:])
    return torch.cat(found).reshape(shape).sum(dim=(-2, -1))


class _CoinCosts(torch.autograd.Function):
    """E c(M) of M heads in T unequal coins, ``[R]``, from p ``[T, R]`` and c ``[T + 1, R]``.

    With v_t(m) the expectation where m heads are seen before coin t:

        v_T = c
        v_t(m) = v_{t+1}(m) + p_t (v_{t+1}(m + 1) - v_{t+1}(m))

    This only ever averages: nothing cancels, and nothing is divided. With f_t(m) the probability of
    m heads before coin t:

        dE / dp_t = sum_m f_t(m) (v_{t+1}(m + 1) - v_{t+1}(m))

    Autograd would keep all v until the step ends.
    """

    @staticmethod
    def forward(ctx: Any, chances: Tensor, costs: Tensor) -> Tensor:
        value, steps = costs, []
        for p in chances.flip(0):
            step = value[1:] - value[:-1]
            value = torch.addcmul(value[:-1], p, step)
            steps.append(step)
        if ctx.needs_input_grad[0]:
            seen, gradient = torch.ones_like(costs[:1]), torch.empty_like(chances)
            for t, (p, step) in enumerate(zip(chances, reversed(steps), strict=True)):
                gradient[t] = (seen * step).sum(0)
                heads = seen * p
                seen = torch.cat((seen - heads, torch.zeros_like(heads[:1])))
                seen[1:] += heads
            ctx.save_for_backward(gradient)
        return value[0]

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None
