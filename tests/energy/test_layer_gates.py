"""Gates that read their own block: what they choose within a budget, and a planted slack that they
find."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from laddered import branch_costs, built_ladder, ladder_of, rows_of, some, three_blocks, two_blocks
from refusals import refused
from tiny_language import fit, written_then_read
from torch.nn import functional as F

from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.gates import energy_of
from fl_lightning.energy.budgets.ladder import BranchCosts, all_masks
from fl_lightning.energy.budgets.ladder_network import LadderNetwork
from fl_lightning.energy.budgets.layer_gates import LayerGates
from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.energy.options import HIGH
from fl_lightning.models.language.llama import Block

KNOWN = [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
"""What the server says when gates choose from now on, and no branch is protected."""


def gated(budget: float, bias=None, size: float = 0.0, protected=(0, 0, 0, 0), **settings):
    """A network in use whose gates have these biases, or random weights; and its data."""
    method, data = built_ladder(search="tabs", budget=budget, **settings)
    method.server["ladder"] = torch.tensor([KNOWN[0], protected, protected], dtype=torch.uint8)
    network = method.deploy(data.client(0)).eval()
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        network.gates.weight.normal_(std=size, generator=draws) if size else None
        network.gates.theta.copy_(torch.tensor(bias if bias is not None else [0.0] * 4))
    return network, data


def taken(network, data, count: int = 6):
    """Which branches each of the first test sequences has, bool ``[B, G]``, and its logits."""
    inputs, target = some(data, count)
    options, _ = network.options_of(inputs, target)
    assert (options == options[:, :1]).all()  # one subset for a whole sequence
    return options[:, 0] == HIGH


@pytest.mark.parametrize("budget", [0.4, 0.6, 0.8, 1.0])
def test_gates_without_weights_choose_the_knapsacks_subset(budget):
    """By enumeration, of attention 4, feed-forward 2.5 and everything else 1.2 millijoules a
    token."""
    theta = torch.tensor([0.5, 2.0, 1.0, -0.1])
    network, data = gated(budget, theta.tolist())
    inputs, target = some(data)
    lengths = Lengths.of(target, inputs["input_ids"].shape[1])
    for row, prompt, new in zip(taken(network, data), lengths.prompts, lengths.new, strict=True):
        worth = {}
        for mask in all_masks(4):
            each = torch.tensor([3.0 + prompt, 1 + 1.5 * prompt] * 2) + new * torch.tensor(
                [4.0, 2.5] * 2
            )
            rest = 1 + 0.2 * prompt + 1.2 * new
            if float(mask.float() @ each + rest) <= budget * float(each.sum() + rest) + 1e-6:
                worth[tuple(mask.tolist())] = float(mask.float() @ theta)
        assert tuple(row.tolist()) == max(worth, key=worth.__getitem__)
        assert not row[3]


def test_a_protected_branch_is_in_every_subset_however_low_its_gate_is():
    network, data = gated(0.6, [2.0, 2.0, -3.0, 2.0], protected=(0, 0, 1, 0))
    rows = taken(network, data)
    assert bool(rows[:, 2].all())
    assert not bool(rows.all(1).any())


def test_gates_read_their_own_block_and_choose_for_each_sequence():
    """What is chosen for a sequence depends on its prompt alone, and for a block on the blocks
    before it."""
    network, data = gated(0.8, size=30.0)
    rows = taken(network, data, 12)
    assert len({tuple(row) for row in rows.tolist()}) > 2
    assert torch.equal(rows[3:5], taken(network, data, 5)[3:])
    found = []
    handle = network.network.layers[1].register_forward_pre_hook(
        lambda module, x: found.append(x[0])
    )
    ids, target = some(data, 3)
    taken(network, data, 3)
    handle.remove()
    lengths = Lengths.of(target, ids["input_ids"].shape[1])
    # where the gates choose
    own = network.gates.logits(1, network.gates.read(found[0], lengths.prompts))
    free = own.max(1).values > 0
    assert (taken(network, data, 3)[:, 2:].any(1) <= free).all()


@pytest.mark.parametrize("budget", [0.45, 0.8, 1.0])
@pytest.mark.parametrize("broken", [False, True])
def test_no_sequence_costs_more_than_its_budget(budget, broken):
    network, data = gated(budget, [3.0, 3.0, 3.0, 3.0], size=20.0)
    if broken:
        network.gates.weight.data.fill_(math.nan)
    inputs, target = some(data)
    network.expect(target)
    with torch.no_grad():
        network(inputs)
        ids = inputs["input_ids"]
        mask = torch.arange(ids.shape[1]) < Lengths.of(target, ids.shape[1]).prompts.unsqueeze(1)
        network.generate(ids, mask, max_new_tokens=6, eos=257, pad=258)
    found = network.measured()
    for name in ("over_budget", "refused", "clamped"):
        assert not found[f"energy/{name}"].any()
    assert (found["energy/spent"] <= found["energy/granted"]).all()
    assert int(found["energy/controller_parameters"][0]) == 4 * 16 + 4 + 2 * 16


def test_stage_c_trains_the_subsets_that_are_chosen_in_use():
    network, data = gated(0.7, size=30.0)
    inputs, target = some(data, 12)
    levels = network.levels_to_train(inputs, target, np.random.default_rng(0))
    trained = network.levels[levels].bool()
    assert len(trained.unique(dim=0)) > 1
    assert torch.equal(trained, taken(network, data, 12).bool())


def test_writing_an_answer_is_reading_it():
    network, data = gated(0.7, size=30.0)
    prompts = some(data, 4)[0]["input_ids"][:, :9]
    network.expect(torch.zeros(4, 1))
    written_then_read(network, prompts, max_new_tokens=12)


def test_drawn_weights_have_the_chances_of_their_prompts_and_a_gradient():
    gates, noise = LayerGates(4, 16), np.random.default_rng(0)
    states = torch.randn(4000, 5, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    prompts, protected = torch.full((4000,), 3), torch.tensor([False, True, False, False])
    with torch.no_grad():
        gates.weight[2, 0] = 200.0
        gates.means[1, 1] = 9.0  # which its weights do not read
    drawn = gates.weights(prompts, noise, protected)
    for block in (0, 1):
        drawn.enter(block, states)
    weights = torch.cat(drawn.columns, dim=1)
    first = states.detach()[:, :3, 0].mean(1) > 0
    assert weights.detach()[first].mean(0).tolist() == pytest.approx(
        [0.84, 1.0, 0.9, 0.84], abs=0.04
    )
    assert weights.detach()[~first].mean(0).tolist() == pytest.approx(
        [0.84, 1.0, 0.14, 0.84], abs=0.08
    )
    costs = BranchCosts.of(Device(branch_costs(2), 0.5, whole=True))
    losses = drawn.losses()["loss_means"] + energy_of(drawn.chances, costs, 0.5)
    (losses + weights.sum()).backward()
    assert states.grad is None
    assert gates.weight.grad[2].abs().sum() > 0
    expected = gates.means.detach() - gates.read(states, prompts).mean(0)
    assert torch.allclose(gates.means.grad, expected, atol=1e-6)


def test_x_a_planted_slack_is_what_gates_learn_to_leave_out():
    """A block whose outputs are zero stands between two others, which say what the labels are. Its
    gates have the price of joules alone, and become the lowest; all sequences leave out both, and
    all logits stay."""
    torch.manual_seed(0)
    network = two_blocks(50, rank=0)
    planted = Block(16, 2, 40)
    with torch.no_grad():
        planted.self_attn.o_proj.weight.zero_()
        planted.mlp.down_proj.weight.zero_()
    network.layers.insert(1, planted)
    costs = BranchCosts.of(device := Device(branch_costs(3), 0.7, whole=True))
    gates = LayerGates(6, 16)
    laddered = LadderNetwork(network.requires_grad_(False), device, full_prompt=False, gates=gates)
    ids = torch.randint(0, 50, (32, 12), generator=torch.Generator().manual_seed(1))
    target = torch.where(torch.arange(12) < 4, -100, network(ids).argmax(-1))
    optimizer, noise = torch.optim.Adam(gates.parameters(), lr=0.05), np.random.default_rng(0)
    for _ in range(60):
        drawn = gates.weights(
            Lengths.of(target, 12).prompts, noise, torch.zeros(6, dtype=torch.bool)
        )
        _, subset, _ = laddered.sandwich(ids, target, drawn)
        loss = F.cross_entropy(subset.flatten(0, 1), target.flatten())
        (
            loss + 0.05 * energy_of(drawn.chances, costs, 0.7) + drawn.losses()["loss_means"]
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert gates.theta.argsort()[:2].sort().values.tolist() == [2, 3]
    laddered.eval().run_on(device, torch.tensor([[1] * 6, [0] * 6]))
    options, _ = laddered.options_of(ids, target)
    without_planted = torch.tensor([1, 1, 0, 0, 1, 1]).bool()
    assert torch.equal(options == HIGH, without_planted.expand_as(options))
    laddered.expect(target)
    with torch.no_grad():
        assert torch.allclose(laddered(ids), network(ids), atol=1e-5)
    assert not laddered.measured()["energy/over_budget"].any()


def test_a_run_trains_gates_and_then_the_subsets_that_they_choose(tmp_path):
    method = ladder_of(search="tabs", budget=0.6, gates_lr=0.02)
    found = rows_of(fit(method, tmp_path, max_rounds=5))
    assert torch.equal(method.server["ladder"][1:], method.server["protected"].expand(2, -1))
    assert all({"train/loss_energy", "train/loss_means"} <= {*row} for row in found[1:4])
    assert "train/loss_energy" not in found[4]
    assert found[-1]["energy/refused"] == found[-1]["energy/over_budget"] == 0
    sent = method.layout.unpack(method.server["weights"])
    assert sent["gates.weight"].abs().sum() > 0
    assert not torch.equal(sent["gates.theta"], torch.full((4,), 2.0))
    assert not {name for name in found[-1] if name in ("energy/levels", "energy/least_share")}


def test_what_gates_cannot_choose_for_is_refused():
    for search in ("tabs", "gates"):
        for settings in ({"phase": "answer"}, {"controller": "step"}, {"controller": "sequence"}):
            with refused(f"--model.search {search}", "leave phase and controller out"):
                ladder_of(search=search, **settings)
    with refused("--model.gates_lr 0.1 with --model.search random", "write --model.search gates"):
        ladder_of(search="random", gates_lr=0.1)
    many = {"network": lambda size: two_blocks(size, blocks=6), "costs": branch_costs(6)}
    with refused("--model.search tabs", "write --model.search elimination"):
        built_ladder(search="tabs", **many)
    built_ladder(search="tabs", network=three_blocks, costs=branch_costs(3))
