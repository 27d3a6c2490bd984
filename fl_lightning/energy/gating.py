"""How a controller is trained: random choices with gradients, expected joules, and the price of a joule.

Logits theta ``[..., G, 3]`` are those of :mod:`fl_lightning.energy.controllers`; costs c are joules
``[G, 3]``, infinite where an option does not exist. The loss of a batch is

    L = CE + lambda (E / E_max - 1),    lambda <- max(0, lambda + eta (E_batch / E_max - 1))

In these relative units one eta serves all devices.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

TEMPERATURE = 2 / 3
"""tau of Jang, Gu and Poole and of Maddison, Mnih and Teh (ICLR 2017), where gates are nearly binary."""


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
    softmax(theta). The gradient is that of softmax((theta + noise) / tau): the straight-through estimator.

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


def expected_energy(theta: Tensor, costs: Tensor) -> Tensor:
    """Return expected joules ``sum_g sum_z p_gz c_gz`` with p = softmax(theta), ``[...]``.

    It is not detached: dE / dtheta_gz = p_gz (c_gz - E_g), where E_g is the expectation of group g.

    Args:
        theta: logits ``[..., G, 3]``.
        costs: joules of a token ``[G, 3]``; an infinite one means that there is no such option.
    """
    joules = costs.to(theta)
    joules = joules.masked_fill(joules.isinf(), 0.0)
    return (probabilities(theta, costs) * joules).sum(dim=(-2, -1))


def penalty(energy: Tensor, budget: float, price: float) -> Tensor:
    """Return ``lambda (E / E_max - 1)``, what the loss has beside the task's.

    Args:
        energy: E, joules, with its gradient.
        budget: E_max, joules, above 0; infinity: the penalty is 0 at any price.
        price: lambda, 0 or more.
    """
    if math.isinf(budget):
        return energy * 0.0
    return price * (energy / budget - 1.0)


def next_price(price: float, used: float, budget: float, eta: float) -> float:
    """Return ``max(0, lambda + eta (E_batch / E_max - 1))``, a projected step of dual ascent.

    Args:
        price: lambda, 0 or more.
        used: E_batch, joules.
        budget: E_max, joules, above 0 and perhaps infinite.
        eta: size of the step.
    """
    return max(0.0, price + eta * (used / budget - 1.0))
