"""Static gates of branches: what is drawn, its gradient, their energy and their price."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from laddered import built_ladder, ladder_of, rows_of, some
from tiny_language import fit

from fl_lightning.energy.budgets.gates import BranchGates, energy_of, next_price
from fl_lightning.energy.budgets.ladder import BranchCosts
from fl_lightning.energy.switched.branches import BranchPlan

COSTS = BranchCosts(1.0, torch.tensor([4.0, 2.0, 4.0]).double())
FREE = torch.zeros(3, dtype=torch.bool)


def gates(*theta: float) -> BranchGates:
    found = BranchGates(len(theta))
    with torch.no_grad():
        found.theta.copy_(torch.tensor(theta))
    return found


def test_both_options_keep_a_chance_of_a_twentieth():
    """However large a logit is, and a gradient that leads it back."""
    found = gates(50.0, -50.0, 0.0)
    assert found.chances.tolist() == pytest.approx([0.907, 0.093, 0.5], abs=0.001)
    drawn = found.drawn(4000, np.random.default_rng(0), FREE)
    assert set(drawn.detach().flatten().tolist()) == {0.0, 1.0}
    assert drawn.detach().mean(0).tolist() == pytest.approx([0.907, 0.093, 0.5], abs=0.02)
    for signs in (
        [1.0, -1.0, 1.0],
        [-1.0, 1.0, 1.0],
    ):  # descent of the first leads both back, of the second away
        (gradient,) = torch.autograd.grad(found.chances @ torch.tensor(signs), found.theta)
        assert ((gradient * torch.tensor(signs))[:2] > 0.03).tolist() == [signs[0] > 0] * 2
    inside = gates(2.96, -2.96, 0.0)
    inside.chances.sum().backward()
    assert bool((inside.theta.grad > 0.03).all())
    kept = found.drawn(50, np.random.default_rng(0), torch.tensor([False, True, False]))
    assert bool((kept[:, 1] == 1).all())


def test_energy_and_its_gradient_by_hand():
    """E = 1 + sum p c = 1 + 2 + 1 + 2 of 11 joules; dE / dtheta = 0.9 sigmoid (1 - sigmoid) c."""
    found = gates(0.0, 0.0, 0.0)
    energy = energy_of(found.chances, COSTS, target=0.5)
    assert float(energy.detach()) == pytest.approx(6.0 / 5.5)
    energy.backward()
    assert torch.allclose(found.theta.grad, 0.9 * torch.tensor([1.0, 0.5, 1.0]) / 5.5)


def test_a_protected_branch_is_always_computed_and_paid_for_and_its_gate_stays():
    found = gates(0.0, 0.0, 0.0)
    drawn = found.weights(
        torch.ones(50), np.random.default_rng(0), torch.tensor([False, True, False])
    )
    energy = energy_of(drawn.chances, COSTS, target=0.5)
    assert float(energy.detach()) == pytest.approx(7.0 / 5.5)
    (energy + drawn.weights.sum()).backward()
    assert (found.theta.grad == 0).tolist() == [False, True, False]


def test_the_price_cannot_pass_half_of_the_task_in_50_steps():
    found = 0.0
    for _ in range(50):
        found = next_price(found, energy=1e6, task=1.6, budget=0.8)
    assert found == pytest.approx(0.8)
    assert next_price(0.0, energy=1.125, task=1.6, budget=0.8) == pytest.approx(1.6 / 100 / 2)
    assert next_price(0.001, energy=0.0, task=1.6, budget=0.8) == 0.0
    assert next_price(0.0, energy=1.5, task=1.6, budget=1.0) == pytest.approx(1.6 / 100 / 2)


def test_weights_of_0_and_1_are_branches_off_and_on():
    method, data = built_ladder()
    network, (inputs, _) = method.laddered, some(data, 4)
    weights = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 0, 1], [1, 1, 1, 1]])
    tokens = inputs["input_ids"].shape[1]
    with torch.no_grad():
        with network.board.weighted(weights.float()):
            found = network.network(inputs)
        with network.board.using(BranchPlan.of_sequences(weights.bool(), tokens)):
            expected = network.network(inputs)
    assert torch.allclose(found, expected, atol=1e-5)
    assert network.board.weights is None


def test_gates_have_a_learning_rate_of_their_own():
    for given, rates in ((None, [0.01]), (0.02, [0.01, 0.02])):
        method, _ = built_ladder(search="gates", gates_lr=given)
        groups = method.configure_optimizers().param_groups
        assert [group["lr"] for group in groups] == rates
        trained = [p for p in method.parameters() if p.requires_grad]
        assert {id(p) for group in groups for p in group["params"]} == {*map(id, trained)}
        assert given is None or groups[1]["params"] == [method.laddered.gates.theta]


def test_the_lowest_gates_go_first(tmp_path):
    """A run whose gates are trained, and whose ladder is nested in the order of what the server
    averaged."""
    method = ladder_of(search="gates", budget=0.6)
    found = rows_of(fit(method, tmp_path, max_rounds=5))
    assert all("train/loss_energy" in row for row in found[1:4])
    assert "train/loss_energy" not in found[4]
    assert found[-1]["energy/refused"] == found[-1]["energy/over_budget"] == 0
    theta = method.layout.unpack(method.server["weights"])["gates.theta"]
    assert not torch.equal(theta, torch.full((4,), 2.0))
    logits = torch.tensor([0.3, -0.2, 0.1, 0.4])
    entries = method.plan.start(4)
    alone = torch.tensor([0.1, 0.2, 9.0, 0.3, 0.2])  # without the second branch the loss is high
    for round, losses in ((2, alone), (3, None), (4, None)):
        noise = np.random.default_rng(0)
        entries |= method.plan.next_entries(entries, losses, round, method.budgeted, noise, logits)
    assert entries["protected"].tolist() == [0, 1, 0, 0]
    assert entries["ladder"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 0, 1]]
