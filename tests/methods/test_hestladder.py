"""HESTLadder on small federations: its stages, what travels, and budgets that are kept."""

from __future__ import annotations

import logging
import math
from functools import partial

import numpy as np
import pytest
import torch
from budgeted import loss_in_use, told_loss
from laddered import (
    LEVELS,
    branch_costs,
    built_ladder,
    disturbed,
    ladder_of,
    ledger_of,
    rows_of,
    some,
    three_blocks,
    two_blocks,
    with_ladder,
)
from tiny_language import adam, fit, records, written_then_read
from toy import run

from fl_lightning.energy.budgets.ladder import BranchCosts, all_masks, next_mask, protected_by
from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.energy.options import HIGH
from fl_lightning.energy.switched.branches import SwitchedBlock
from fl_lightning.energy.table_files import shipped_table
from fl_lightning.methods import FedAvg, HESTLadder
from fl_lightning.models import LlamaTiny, LlamaTinyDeep
from fl_lightning.models.language.llama import Block


def fedavg() -> FedAvg:
    return FedAvg(network=two_blocks, optimizer=adam())


# Stages


def test_ii_stage_a_and_an_infinite_budget_are_fedavg_bit_for_bit(tmp_path):
    plain = fedavg()
    ledger = ledger_of(fit(plain, tmp_path / "plain"))
    for name, settings in {
        "stage a": {"all_on_rounds": 2},
        "no budget": {"budget": math.inf},
    }.items():
        method = ladder_of(**settings)
        assert ledger_of(fit(method, tmp_path / name)) == ledger
        assert torch.equal(plain.server["weights"], method.server["weights"])


def test_ix_the_first_steps_of_stage_b_have_stage_as_minimiser():
    """At s_t = 1 the gradient is twice FedAvg's: 2 CE and a divergence of nothing from nothing."""
    method, data = built_ladder(round=2)
    assert method.plan.lowest_share(method.round) == 1.0
    disturbed(method)
    client = data.client(0)
    method.receive(method.broadcast(client), client)
    batch = next(iter(data.train_batches(client, round=2, epochs=1)))
    losses = method.training_step(batch)
    losses["loss"].backward()
    twice = [p.grad.clone() for p in method.parameters() if p.requires_grad]
    method.zero_grad()
    task, _ = method.task_and_logits(batch, 0)
    task.backward()
    for grad, parameter in zip(
        twice, (p for p in method.parameters() if p.requires_grad), strict=True
    ):
        assert torch.allclose(grad, 2 * parameter.grad, atol=1e-6)
    found = {name: float(loss.detach()) for name, loss in losses.items()}
    assert found["loss_distilled"] == pytest.approx(0, abs=1e-6)
    assert found["loss_subset"] == pytest.approx(found["loss_task"])


def test_the_stages_of_a_run(tmp_path):
    method = ladder_of(budget=[0.9, 0.6])
    found = rows_of(fit(method, tmp_path, records(), max_rounds=5))
    assert "train/loss_subset" not in found[0]
    assert all("train/loss_subset" in row for row in found[1:])
    assert [row["energy/levels"] for row in found] == [1, 1, 2, 3, 3]
    # all branches alone cost more than a budget
    assert all(row["energy/refused"] > 0 for row in found[:2])
    assert found[-1]["energy/refused"] == 0
    assert all(row["energy/over_budget"] == 0 for row in found)
    assert 0 < found[-1]["energy/joules"] < 0.9 * found[-1]["energy/joules_high"]


def test_the_share_of_what_is_drawn_falls_to_the_smallest_budget():
    method, _ = built_ladder(all_on_rounds=4, subset_rounds=8, levels=2, budget=[0.9, 0.5])
    shares = []
    for round in range(5, 13):
        method.round = round
        shares.append(method.plan.lowest_share(method.round))
    assert shares == pytest.approx([1.0, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5, 0.5])


def test_a_client_trains_the_levels_of_its_own_budget():
    method, data = built_ladder(budget=[1.0, 0.5])
    with_ladder(method, LEVELS)
    _, target = some(data, 12)
    for id, first in ((0, 0), (1, 2)):
        client = data.client(id)
        method.receive(method.broadcast(client), client)
        noise = np.random.default_rng(id)
        method.laddered.run_on(method.on, method.levels)
        drawn = torch.cat([method.laddered.drawn_levels(target, noise) for _ in range(8)])
        levels = {tuple(mask) for mask in method.laddered.gates_of(drawn).int().tolist()}
        assert levels == {tuple(level) for level in LEVELS[first:]}


# The ladder


def test_clients_report_sums_and_the_server_chooses_by_them(tmp_path):
    """The server's choice is that of one reader who sees all validation examples at the same
    weights."""
    method, data = built_ladder(round=2)
    disturbed(method)
    client_ids = [id for id in range(4) if len(data.client(id).val)]
    uploads, expected, examples = {}, torch.zeros(5, dtype=torch.float64), 0
    for id in client_ids:
        client = data.client(id)
        method.receive(method.broadcast(client), client)
        list(method.local_batches(data, client, epochs=1, labels=data.labels(client), steps=1))
        uploads[id] = method.upload(client)
        method.check(uploads[id], client)
        assert set(uploads[id]) == {"examples", "weights", "losses"}
        expected += len(client.train) * uploads[id].tensor("losses").double()
        examples += len(client.train)
    expected /= examples
    method.aggregate(uploads)
    assert method.server["protected"].bool().tolist() == protected_by(expected).tolist()
    method.server["protected"].zero_()
    method.round = 3
    uploads = {}
    for id in client_ids:
        client = data.client(id)
        method.receive(method.broadcast(client), client)
        next(
            iter(method.local_batches(data, client, epochs=1, labels=data.labels(client), steps=1))
        )
        uploads[id] = method.upload(client)
    total = sum(
        len(data.client(id).train) * u.tensor("losses").double() for id, u in uploads.items()
    )
    costs = BranchCosts.of(method.devices[0]).branches
    ones = torch.ones(4, dtype=torch.bool)
    mask, branch = next_mask(ones, total / examples, costs, ~ones)
    method.aggregate(uploads)
    assert method.server["ladder"].bool().tolist() == [ones.tolist(), mask.tolist(), mask.tolist()]
    assert float(method.server["ladder_losses"][1]) == pytest.approx(
        float(total[branch + 1] / examples)
    )


@pytest.mark.slow
@pytest.mark.essential
def test_x_a_planted_slack_is_found_by_the_federation(tmp_path):
    """Both branches of a block whose outputs are zero go first, and cost nothing. LoRA is not on
    that block."""

    def padded(vocab_size: int) -> LlamaTiny:
        network = LlamaTiny(vocab_size)
        block = Block(96, 4, 256).requires_grad_(False)
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
        network.layers.append(block)
        return network

    method = HESTLadder(
        network=padded,
        optimizer=adam(0.005),
        costs=branch_costs(5),
        budget=0.6,
        all_on_rounds=3,
        subset_rounds=3,
        levels=2,
    )
    data = records(generate=False, examples_per_client=60, batch_size=16)
    run(method, data, tmp_path, max_rounds=6, max_local_steps=3, workers=1)
    ladder, losses = method.server["ladder"].int(), method.server["ladder_losses"]
    gone = [(1 - row).nonzero()[:, 0].tolist() for row in ladder[:3]]
    assert gone[0] == []
    assert gone[1] in ([8], [9])
    assert gone[2] == [8, 9]
    assert float(losses[1]) == pytest.approx(float(losses[0]), abs=1e-5)


@pytest.mark.parametrize("search", ["random", "enumeration"])
def test_other_searches_make_a_ladder_that_fits(search, tmp_path):
    method = ladder_of(search=search, budget=[0.8, 0.6], levels=3, subset_rounds=4)
    found = rows_of(fit(method, tmp_path, max_rounds=5))[-1]
    ladder = method.server["ladder"].bool()
    charged = BranchCosts.of(method.devices[0], "q99").share(ladder)
    assert ladder[0].all()
    assert (charged[1:] <= charged[:-1]).all()
    assert float(charged[-1]) <= 0.6
    assert found["energy/refused"] == found["energy/over_budget"] == 0


def test_a_ladder_whose_rounds_were_void_is_said(caplog):
    for round in (4, 5, 6):
        method, data = built_ladder(search="enumeration", round=round)
        method.deploy(data.client(0))
        method.deploy(data.client(1))
        assert caplog.text.count("leaves no branch out") == max(0, round - 4)


def test_a_level_whose_round_was_void_leaves_the_whole_network_its_loss():
    method, _ = built_ladder(round=4)
    losses = torch.tensor([1.5, 1.8, 1.9, 1.6, 1.7])
    known = method.server | {"protected": torch.zeros(4)}
    found = method.plan.next_entries(known, losses, 4, method.budgeted, method.stream("x"))
    assert found["ladder_losses"].tolist() == pytest.approx([1.5, 1.5, 1.6])


def test_enumeration_takes_the_best_of_all_subsets():
    method, _ = built_ladder(search="enumeration", budget=[0.8, 0.5], round=4)
    assert method.searches
    losses = torch.rand(16, generator=torch.Generator().manual_seed(0))
    method.server |= method.plan.next_entries(
        method.server, losses, 4, method.budgeted, method.stream("x")
    )
    shares = BranchCosts.of(method.devices[0], "q99").share(all_masks(4))
    for row, budget in ((1, 0.8), (2, 0.5)):
        assert float(method.server["ladder_losses"][row]) == float(losses[shares <= budget].min())


def test_a_level_may_leave_out_several_branches():
    """By hand: of attention 4 and feed-forward 2.5 millijoules, the prices are .03/4, .02/2.5,
    .2/4, .04/2.5, .1/4 and .0/2.5; two go in a level, and then one is enough for the budget. What
    each adds to the loss is added up."""
    method, _ = built_ladder(
        network=three_blocks, costs=branch_costs(3), budget=0.6, branches_per_level=2, round=4
    )
    alone = torch.tensor([0.5, 0.53, 0.52, 0.7, 0.54, 0.6, 0.5])
    method.server["ladder"], method.server["protected"] = (
        torch.ones(3, 6).to(torch.uint8),
        torch.zeros(6),
    )
    for round in (3, 4):
        method.server |= method.plan.next_entries(
            method.server, alone, round, method.budgeted, method.stream("ladder")
        )
    assert method.server["ladder"].tolist() == [
        [1, 1, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 0],
    ]
    assert method.server["ladder_losses"].tolist() == pytest.approx([0.5, 0.53, 0.52])
    shares = BranchCosts.of(method.devices[0], "q99").share(method.server["ladder"].bool())
    assert shares.tolist() == pytest.approx([1.0, 14.2 / 20.7, 11.7 / 20.7])


def test_a_ladder_that_ends_above_the_budget_says_so(tmp_path, caplog):
    method = ladder_of(levels=1, subset_rounds=2, budget=0.3)
    with caplog.at_level(logging.WARNING, logger="fl_lightning"):
        found = rows_of(fit(method, tmp_path, max_rounds=4))[-1]
    assert "the ladder ends at" in caplog.text
    assert found["energy/refused"] > 0
    assert found["energy/over_budget"] == 0


# Shallower bases, and a deeper one


@pytest.mark.parametrize(
    ("blocks", "most", "costs"),
    [
        ([0, 1, 3], 0.8, None),
        ([0, 1], 0.6, "llama_tiny_branches"),
        ([0], 0.5, None),
        ([0, 1, 2, 3] * 2, 1.95, None),
    ],
)
def test_other_depths_cost_what_the_shipped_table_says_of_their_blocks(blocks, most, costs):
    """A sequence costs everything else and the blocks, by the table of four of them; the study has
    shallower bases where that is within a budget of the whole network. The deeper base has each of
    them twice."""
    network = LlamaTinyDeep if len(blocks) == 8 else partial(LlamaTiny, blocks=blocks)
    method, data = built_ladder(network=network, costs=costs, budget=1.0, round=1)
    network, (inputs, target) = method.deploy(data.client(0)).eval(), some(data)
    network.expect(target)
    with torch.no_grad():
        network(inputs)
    found, table = network.measured(), shipped_table("llama_tiny_branches")
    lengths = Lengths.of(target, inputs["input_ids"].shape[1])
    for kind, name in (("mean", "energy/joules"), ("q99", "energy/spent")):
        for joules, prompt, new in zip(found[name], lengths.prompts, lengths.new, strict=True):
            steps = ((int(prompt), 1), (1, int(new)))
            whole = sum(count * table.all_high(tokens, kind) for tokens, count in steps)
            costs = [
                (table.tensors(tokens, kind)[:, HIGH], table.fixed(tokens, kind))
                for tokens, _ in steps
            ]
            kept = sum(
                count * (rest + float(each.view(4, 2)[blocks].sum()))
                for (each, rest), (_, count) in zip(costs, steps, strict=True)
            )
            assert float(joules) == pytest.approx(kept, rel=1e-6)
            assert kept <= most * whole


# Budgets


@pytest.mark.parametrize("phase", ["all", "answer"])
@pytest.mark.parametrize("budget", [0.55, 0.8, 1.0])
def test_no_sequence_costs_more_than_its_budget(phase, budget):
    method, data = built_ladder(budget=budget, phase=phase)
    with_ladder(disturbed(method), LEVELS)
    network = method.deploy(data.client(0)).eval()
    inputs, target = some(data)
    ids = inputs["input_ids"]
    with torch.no_grad():
        network.expect(target)
        network(inputs)
        lengths = Lengths.of(target, ids.shape[1])
        mask = torch.arange(ids.shape[1]) < lengths.prompts.unsqueeze(1)
        network.generate(ids, mask, max_new_tokens=6, eos=257, pad=258)
    found = network.measured()
    assert not found["energy/over_budget"].any()
    assert not found["energy/refused"].any()
    assert not found["energy/clamped"].any()
    assert (found["energy/spent"] <= found["energy/granted"]).all()
    assert (found["energy/joules"] <= budget * found["energy/joules_high"] + 1e-12).all()
    assert torch.allclose(found["energy/joules_high"], found["energy/granted"] / 1.5 / budget)
    assert budget < 1 or torch.allclose(found["energy/joules"], found["energy/joules_high"])


@pytest.mark.parametrize("phase", ["all", "answer"])
def test_writing_an_answer_is_reading_it(phase):
    method, data = built_ladder(budget=0.7, phase=phase)
    with_ladder(disturbed(method), LEVELS)
    network = method.deploy(data.client(0)).eval()
    prompts = some(data, 4)[0]["input_ids"][:, :9]
    network.expect(torch.zeros(4, 1))
    whole, labels = written_then_read(network, prompts, max_new_tokens=16)
    options, _ = network.options_of(whole[:, :-1], labels[:, :-1])
    assert (options[:, :9].min() == 2) == (phase == "answer")
    assert (options[:, 9:] == 0).any()


def test_in_use_adapters_are_merged_and_afterwards_the_base_has_its_bits():
    method, data = built_ladder(budget=1.0)
    disturbed(method)
    network = method.deploy(data.client(0)).eval()
    layer = network.network.layers[0].mlp.down_proj
    assert isinstance(network.network.layers[0], SwitchedBlock)
    before, merged = layer.base_layer.weight.clone(), []
    layer.register_forward_hook(lambda module, *_: merged.append(module.merged))
    with torch.no_grad():
        network(some(data)[0])
    assert merged == [True]
    assert torch.equal(layer.base_layer.weight, before)


def test_a_client_that_is_asked_tells_the_loss_within_its_own_budget():
    """Whoever was evaluated last, and at the levels that it has received."""
    method, data = built_ladder(budget=[0.62, 1.0])
    with_ladder(disturbed(method), [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
    clients = data.client(0), data.client(1)
    expected = [loss_in_use(method, data, client) for client in clients]
    told = [told_loss(method, data, client) for client in clients]
    method.deploy(clients[0])
    again = [told_loss(method, data, client) for client in reversed(clients)]
    assert told == pytest.approx(expected, rel=1e-6)
    assert told == again[::-1]
