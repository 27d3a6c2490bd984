"""Choices of options under a bound on their cost, in whole units; the arithmetic of the ledger."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST_LOGIT = 1e30
LARGEST_PRICED = 1e300
"""Largest price x joules: a logit of any size less that is still finite."""
UNLIMITED = 2**62
"""An infinite budget or cost, in units: 4 million joules."""
PROMPT_PRICES = 40
"""Prices that a prompt is tried at, half of them to find one that fits; each is a pass over its
logits."""


def finite_logits(theta: Tensor, joules: Tensor) -> Tensor:
    """Return logits as float64, minus infinity where there is no option and else finite.

    A controller may say anything: what is not a number counts as the least logit.

    Args:
        theta: logits ``[..., G, 3]``.
        joules: costs ``[G, 3]``, infinite where there is no option.
    """
    known = (
        theta.detach()
        .double()
        .nan_to_num(nan=-LARGEST_LOGIT, posinf=LARGEST_LOGIT, neginf=-LARGEST_LOGIT)
    )
    return known.clamp(-LARGEST_LOGIT, LARGEST_LOGIT).masked_fill(joules.isinf(), -math.inf)


def finite_prices(price: float | Tensor, joules: Tensor) -> Tensor:
    """Return prices as float64, cut to what keeps price x joules finite; one that is not a number
    is 0.

    A price that is cut still has every joule count more than any logit.

    Args:
        price: logits per joule.
        joules: finite costs.
    """
    most = LARGEST_PRICED / max(1.0, float(joules.max()))
    known = torch.as_tensor(price, dtype=torch.float64)
    return known.nan_to_num(nan=0.0, posinf=most, neginf=-most).clamp(-most, most)


def sum_of_units(units: Tensor) -> int:
    """Return the sum of units, each 0 to ``UNLIMITED``, or ``UNLIMITED`` where it is that or more:
    integers of 64 bits would wrap around at twice that."""
    return min(sum(map(int, units.flatten().tolist())), UNLIMITED)


def cheapest_first(
    theta: Tensor, wish: Tensor, costs: Tensor, room: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Downgrade groups in the order of loss of theta per unit saved, until the cost is at most
    ``room``.

    From each option a group steps to the cheaper one that loses least per unit saved. That is the
    way along the upper hull of (cost, theta), so the result is argmax theta - lambda c for the
    smallest lambda that fits (Everett, Operations Research 1963), except that the last of equally
    good steps may be spared. A group has two steps at most, and the steps of all groups are sorted
    once.

    Args:
        theta: logits ``[B, G, 3]``.
        wish: the options to begin with, int64 ``[B, G]``.
        costs: units of each option, int64 ``[G, 3]``.
        room: units that may be spent, int64 ``[B]``.

    Returns:
        the choices int64 ``[B, G]``, their cost int64 ``[B]``, and whether any differs from the
        wish, bool ``[B]``. Where even the cheapest options cost more than the room, the choices are
        these.
    """
    every = costs.expand(len(wish), -1, -1)
    cost = every.gather(-1, wish.unsqueeze(-1)).sum((-2, -1))
    over = cost - room
    if not bool((over > 0).any()):
        return wish, cost, torch.zeros_like(over, dtype=torch.bool)
    logits = (
        theta.detach().double().nan_to_num(nan=-LARGEST_LOGIT).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    )
    first, loss, saved = _cheaper(logits, wish, every)
    second, next_loss, next_saved = _cheaper(logits, first, every)
    # [B, 2 G], all first steps first
    losses = torch.cat((loss, torch.maximum(loss, next_loss)), dim=1)
    order = losses.argsort(dim=1, stable=True)
    total = torch.cat((saved, next_saved), dim=1).gather(1, order).cumsum(1)
    needed = (total - torch.cat((saved, next_saved), dim=1).gather(1, order)) < over.unsqueeze(1)
    done = torch.zeros_like(needed).scatter(1, order, needed)
    took_first, took_second = done.chunk(2, dim=1)
    choices = torch.where(took_second, second, torch.where(took_first, first, wish))
    return choices, every.gather(-1, choices.unsqueeze(-1)).sum((-2, -1)), (choices != wish).any(-1)


def _cheaper(logits: Tensor, now: Tensor, costs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cheaper option that loses least per unit, this loss, and the units saved, ``[B,
    G]``.

    Where there is none, the option stays, at an infinite loss and no saving.
    """
    at = now.unsqueeze(-1)
    saved = costs.gather(-1, at) - costs
    lost = logits.gather(-1, at) - logits
    per_unit = (lost / saved.clamp_min(1)).masked_fill(saved <= 0, math.inf)
    loss, option = per_unit.min(-1)
    none = loss.isinf()
    option = torch.where(none, now, option)
    return option, loss, saved.gather(-1, option.unsqueeze(-1)).squeeze(-1)


def cost_of_prompt(choices: Tensor, units: Tensor) -> int:
    """Return the units of a step.

    Args:
        choices: options of each token, int64 ``[T, G]``.
        units: units of an option that 0, 1 ... T tokens take, int64 ``[G, 3, T + 1]``.
    """
    return sum_of_units(costs_by_count(choices, units))


def costs_by_count(choices: Tensor, costs: Tensor) -> Tensor:
    """Return what each option costs in a step, ``[G, 3]``.

    Args:
        choices: options of each token, int64 ``[T, G]``.
        costs: of an option that 0, 1 ... T tokens take, ``[G, 3, T + 1]``.
    """
    counts = torch.stack([(choices == option).sum(0) for option in range(costs.shape[1])], dim=1)
    return costs.gather(-1, counts.unsqueeze(-1)).squeeze(-1)
