"""The controller of levels: predicted regrets, the price of joules, and decisions by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from refusals import refused

from fl_lightning.energy.budgets.ledger import UNITS_PER_JOULE
from fl_lightning.energy.budgets.levels import LevelLedger, mixed_levels
from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.energy.regret import (
    LARGEST_PRICE,
    PRICE_STEP,
    RegretController,
    next_price,
    prompt_states,
    token_losses,
)

COSTS = torch.tensor([10, 6, 4])


def known() -> RegretController:
    """r_1 = h and r_2 = 3 h, of states of one feature."""
    found = RegretController(1, 2)
    with torch.no_grad():
        found.weight.copy_(torch.tensor([[1.0], [3.0]]))
    return found


def at(price: float, *states: float) -> list[int]:
    return known().priced(COSTS, price)(torch.tensor(states).unsqueeze(1)).argmin(-1).tolist()


def test_vii_the_regret_of_level_0_is_0():
    controller = RegretController(3, 2)
    torch.nn.init.normal_(controller.weight)
    torch.nn.init.normal_(controller.bias)
    states = torch.randn(4, 5, 3, requires_grad=True)
    assert not controller(states)[..., 0].any()
    logits, labels = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    lengths = Lengths(torch.full((4,), 2), torch.full((4,), 3))
    for levels in (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 5, dtype=torch.int64)):
        loss = controller.regression(states, labels, levels, logits, torch.randn(4, 5, 7), lengths)
        assert float(loss.detach()) == 0  # nothing is learnt of it
        loss.backward()
    assert states.grad is None or not states.grad.any()
    assert not controller.weight.grad.any()


def test_vii_with_known_regrets_levels_are_those_by_hand():
    """Scores at a price of 1: 1, h + 0.6 and 3 h + 0.4."""
    assert at(0.0, 0.05, 0.1, 0.5) == [0, 0, 0]
    assert at(1.0, 0.05, 0.125, 0.5) == [2, 1, 0]
    assert at(0.0, -0.1) == [2]  # a level that is predicted to gain costs nothing
    assert at(LARGEST_PRICE, 0.05, 0.1, 0.5) == [2, 2, 1]


def test_vii_with_known_regrets_the_price_is_the_one_by_hand():
    """Of two tokens with h = 0.1 and 0.5 the first leaves level 0 above a price of 0.1 / 0.4, where
    both cost 16 in place of 20. A budget of 16 stops the price there, one of 7 never, and one of 25
    leaves it at 0."""
    for budget, price in ((16, 0.25), (7, LARGEST_PRICE), (25, 0.0)):
        found, granted = 0.0, torch.tensor([budget])
        for _ in range(400):
            found = next_price(found, COSTS[at(found, 0.1, 0.5)].sum().unsqueeze(0), granted)
        assert price <= found <= price + PRICE_STEP * 0.25 + 1e-9
    assert next_price(0.1, torch.tensor([0]), torch.tensor([16])) == pytest.approx(0.1 - PRICE_STEP)
    assert next_price(0.01, torch.tensor([0]), torch.tensor([16])) == 0.0


def test_regrets_are_learnt_where_they_are_linear():
    """Two levels, of which the second loses h_0 + 0.5 nats: least squares of what is measured."""
    draws = torch.Generator().manual_seed(0)
    controller, states = RegretController(2, 2), torch.randn(200, 2, generator=draws)
    levels = torch.arange(200) % 3
    measured = torch.where(levels == 2, states[:, 0] + 0.5, 0.1)
    optimizer = torch.optim.Adam(controller.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        controller.loss(states, levels, measured).backward()
        optimizer.step()
    assert torch.allclose(controller.weight, torch.tensor([[0.0, 0.0], [1.0, 0.0]]), atol=1e-3)
    assert torch.allclose(controller.bias, torch.tensor([0.1, 0.5]), atol=1e-3)


def test_what_a_sequence_and_a_token_learn_from():
    """Sequences are predicted from the mean state of their prompts, tokens after prompts from their
    own."""
    states = torch.arange(12.0).reshape(2, 3, 2)
    prompts = torch.tensor([1, 2])
    assert prompt_states(states, prompts).tolist() == [[0.0, 1.0], [7.0, 8.0]]
    labels = torch.tensor([[0, 1, 1], [-100, 1, 0]])
    full, subset = torch.zeros(2, 3, 2), torch.zeros(2, 3, 2)
    subset[0, 2, 0] = 1.0  # the only token that loses something
    lost = math.log(1 + math.e) - math.log(2)
    regrets = token_losses(subset, labels) - token_losses(full, labels)
    assert regrets.flatten().tolist() == pytest.approx([0, 0, lost, 0, 0, 0])
    lengths, controller = Lengths(prompts, torch.tensor([2, 1])), RegretController(2, 1)
    by_token = controller.regression(
        states, labels, torch.ones(2, 3, dtype=torch.int64), full, subset, lengths
    )
    # three tokens come after prompts
    assert float(by_token.detach()) == pytest.approx(lost**2 / 2 / 3)
    by_sequence = controller.regression(
        states, labels, torch.ones(2, dtype=torch.int64), full, subset, lengths
    )
    assert float(by_sequence.detach()) == pytest.approx((lost / 3) ** 2 / 2 / 2)


def test_tokens_are_trained_at_better_levels_as_often_as_the_budget_pays_for():
    """Level 2 costs 4, and the mean of the levels 0 and 1 is 4 more; a prompt at level 0 costs 120
    more."""
    count, new = 400, 20
    owed, levels = torch.full((count,), new), torch.full((count,), 2)
    lengths, best = Lengths(torch.full((count,), 5), owed), torch.zeros_like(levels)
    cases = (
        (0, levels, 0.0),
        (24, levels, 0.3),
        (80, levels, 1.0),
        (500, levels, 1.0),
        (144, best, 0.3),
    )
    for left, prompts, chance in cases:
        budget = torch.full((count,), (20 + new) * 4 + left).double() / UNITS_PER_JOULE
        ledger = LevelLedger(budget, (20 * COSTS).expand(count, -1), COSTS, owed)
        found = mixed_levels(ledger, lengths, prompts, levels, 25, np.random.default_rng(0))
        assert (found[:, :5] == 2).all()
        assert (found[:, 5:] < 2).double().mean() == pytest.approx(chance, abs=0.02)
    assert {0, 1, 2} == set(found[:, 5:].flatten().tolist())
    assert not mixed_levels(ledger, lengths, best, best, 25, np.random.default_rng(0)).any()


def test_a_controller_of_no_size_is_refused():
    with refused("a controller of width=0, levels=2"):
        RegretController(0, 2)
