"""HESTLadder with a controller of levels: budgets, joules, what travels, and what its training
leaves alone."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from laddered import (
    LEVELS,
    branch_costs,
    built_ladder,
    disturbed,
    ladder_of,
    rows_of,
    some,
    with_ladder,
)
from refusals import refused
from tiny_language import fit, records, written_then_read

from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.energy.options import HIGH
from fl_lightning.privacy.secure.settings import SecureSum

KINDS = pytest.mark.parametrize("controller", ["sequence", "step"])
DECISION = 0.1e-3
"""Joules of a decision in ``branch_costs``."""
KEPT = [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]
"""A ladder that keeps the first block."""


def deciding(controller: str, bias=None, ladder=KEPT, size: float = 5.0, **settings):
    """A network in use whose controller has random weights, or these biases and no weights."""
    method, data = built_ladder(controller=controller, **settings)
    with_ladder(disturbed(method), ladder)
    network = method.deploy(data.client(0)).eval()
    with torch.no_grad():
        network.controller.weight.normal_(std=size, generator=torch.Generator().manual_seed(1))
        if bias is not None:
            network.controller.weight.zero_()
            network.controller.bias.copy_(torch.tensor(bias))
    return network, data


@KINDS
@pytest.mark.parametrize("phase", ["all", "answer"])
@pytest.mark.parametrize("budget", [0.62, 0.8, 1.0])
@pytest.mark.parametrize("broken", [False, True])
def test_no_sequence_costs_more_than_its_budget(controller, phase, budget, broken):
    """Whatever the controller says, also where it says nothing that is a number."""
    network, data = deciding(controller, budget=budget, phase=phase)
    if broken:
        network.controller.weight.data.fill_(math.nan)
    inputs, target = some(data)
    ids = inputs["input_ids"]
    with torch.no_grad():
        network.expect(target)
        network(inputs)
        mask = torch.arange(ids.shape[1]) < Lengths.of(target, ids.shape[1]).prompts.unsqueeze(1)
        network.generate(ids, mask, max_new_tokens=6, eos=257, pad=258)
    found = network.measured()
    assert not found["energy/over_budget"].any()
    assert not found["energy/refused"].any()
    assert (found["energy/spent"] <= found["energy/granted"]).all()
    assert (found["energy/joules"] <= budget * found["energy/joules_high"] + 1e-12).all()


@KINDS
@pytest.mark.parametrize("phase", ["all", "answer"])
def test_writing_an_answer_is_reading_it(controller, phase):
    network, data = deciding(controller, budget=0.75, phase=phase)
    prompts = some(data, 4)[0]["input_ids"][:, :9]
    network.expect(torch.zeros(4, 1))
    whole, labels = written_then_read(network, prompts, max_new_tokens=16)
    options, _ = network.options_of(whole[:, :-1], labels[:, :-1])
    assert (options[:, :, :2] == 2).all()  # the first block is always computed
    several = [len({*map(tuple, row[9:].tolist())}) > 1 for row in options]
    assert any(several) == (controller == "step")


def test_a_prompt_that_can_be_read_whole_is_read_whole():
    """Also where the budget would pay for an answer of all branches, which nothing wishes for."""
    network, data = deciding("sequence", bias=[-1.0, -2.0], budget=1.2, phase="answer")
    inputs, target = some(data)
    options, _ = network.options_of(inputs, target)
    assert (options[:, 0] == 2).all()
    ends = Lengths.of(target, inputs["input_ids"].shape[1]).prompts
    assert (options[torch.arange(len(options)), ends] == torch.tensor([2, 2, 0, 0])).all()


@pytest.mark.parametrize(("controller", "each"), [("sequence", False), ("step", True)])
def test_decisions_cost_joules_by_hand(controller, each):
    """Where all tokens wish for the last level, a decision a sequence or a token is all that is
    added."""
    plain, data = deciding(controller, bias=[0.0, -9.0], budget=0.8)
    inputs, target = some(data)
    plain.expect(target)
    with torch.no_grad():
        plain(inputs)
    joules = plain.measured()["energy/joules"]
    lengths = Lengths.of(target, inputs["input_ids"].shape[1])
    options, _ = plain.options_of(inputs, target)
    network_alone = torch.tensor(
        [
            plain.on.undecided.spent(row[:end], prompt, "mean")
            for row, prompt, end in zip(
                options, lengths.prompts.tolist(), lengths.ends.tolist(), strict=True
            )
        ],
        dtype=torch.float64,
    )
    decisions = lengths.new if each else torch.ones_like(lengths.new)
    shares = [each["share"] for each in plain.levels_in_words()]
    one, decided = 14.2e-3, DECISION if each else 0.0
    assert shares == [round((joules + decided) / one, 4) for joules in (one, 11.7e-3, 7.7e-3)]
    assert torch.allclose(joules - network_alone, decisions.double() * DECISION)
    rows = torch.arange(len(options))
    assert (options[rows, lengths.prompts] == torch.tensor([2, 2, 0, 0])).all()


def test_steps_spend_what_a_level_leaves_over():
    """A controller that fears every lower level takes the best one until the ledger says no."""
    network, data = deciding("step", bias=[9.0, 9.0], budget=0.6)
    inputs, target = some(data)
    options, lengths = network.options_of(inputs, target)
    seen = set()
    for row, prompt, end in zip(
        options, lengths.prompts.tolist(), lengths.ends.tolist(), strict=True
    ):
        on = (row[prompt:end] == HIGH).sum(-1).tolist()
        assert on == sorted(on, reverse=True)
        seen |= {*on}
    assert {2, 4} <= seen


def test_sequences_take_no_level_that_they_cannot_afford_to_their_end():
    network, data = deciding("sequence", bias=[9.0, 9.0], budget=0.8)
    inputs, target = some(data)
    network.expect(target)
    with torch.no_grad():
        network(inputs)
    found = network.measured()
    assert not found["energy/clamped"].any()
    assert (found["energy/joules"] < found["energy/joules_high"]).all()


def test_before_there_is_a_ladder_nothing_is_decided(tmp_path):
    found = rows_of(
        fit(ladder_of(controller="step", budget=1.0), tmp_path, records(), max_rounds=1)
    )[-1]
    assert found["energy/refused"] == 0
    assert found["energy/joules"] == found["energy/joules_high"]


def test_the_first_block_is_kept_and_the_controller_learns(tmp_path):
    method = ladder_of(controller="step", search="random", budget=[0.9, 0.7])
    found = rows_of(fit(method, tmp_path, max_rounds=5))[-1]
    ladder = method.server["ladder"].bool()
    assert ladder[:, :2].all()
    assert not ladder[-1].all()
    assert found["energy/over_budget"] == found["energy/refused"] == 0
    assert found["train/loss_regret"] >= 0
    assert method.server["weights"][-3 * 16 :][: 2 * 16].any()  # w of two levels, 16 features


def test_enumeration_keeps_the_first_block_too():
    method, _ = built_ladder(
        search="enumeration", controller="sequence", budget=[0.8, 0.65], round=4
    )
    losses = torch.rand(16, generator=torch.Generator().manual_seed(0))
    losses[0b1100] = 0.0  # without the first block, which is then the best of all
    method.server |= method.plan.next_entries(
        method.server, losses, 4, method.budgeted, method.stream("x")
    )
    assert method.server["ladder"][:, :2].all()


def test_the_adapter_is_trained_as_without_it():
    """Its loss has no gradient but in its own numbers, so a sequence's controller changes nothing
    else."""
    gradients = []
    for controller in ("none", "sequence"):
        method, data = built_ladder(controller=controller, budget=0.8)
        with_ladder(method, KEPT)
        client = data.client(0)
        method.receive(method.broadcast(client), client)
        batch = next(iter(data.train_batches(client, round=5, epochs=1)))
        method.training_step(batch)["loss"].backward()
        gradients.append(
            {n: p.grad for n, p in method.network.network.named_parameters() if p.requires_grad}
        )
        if controller == "sequence":
            assert method.laddered.controller.bias.grad.any()
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_what_travels_is_a_number_for_each_feature_and_level_and_the_price_stays():
    plain, _ = built_ladder()
    method, data = built_ladder(controller="step")
    assert method.layout.size == plain.layout.size + 2 * (16 + 1)
    with_ladder(method, KEPT)
    client = data.client(0)
    assert method.keeps_state
    assert not plain.keeps_state
    for _ in range(2):
        method.receive(method.broadcast(client), client)
        for batch in data.train_batches(client, round=5, epochs=1):
            method.training_step(batch)
        upload = method.upload(client)
        assert {*upload} == {"examples", "weights"}
        upload.require_within(method.upload_limits(client))
    assert float(client.state["price"]) == pytest.approx(method.price)
    method.receive(method.broadcast(data.client(1)), data.client(1))
    assert method.price == 0.0
    assert method.deploy(client).price == pytest.approx(float(client.state["price"]))


@pytest.mark.slow
@pytest.mark.essential
def test_a_run_that_was_cut_in_stage_c_goes_on_as_it_was(tmp_path):
    """Prices are kept by the clients, and so are in the checkpoint."""
    settings = {"controller": "step", "search": "random"}
    whole, cut, rest = (ladder_of(**settings) for _ in range(3))
    fit(whole, tmp_path / "whole", max_rounds=6)
    half = fit(cut, tmp_path / "cut", max_rounds=5)
    fit(rest, tmp_path / "cut", max_rounds=6, ckpt_path=str(half.run_dir), allow_changed=True)
    assert whole.price > 0
    assert rest.price == whole.price
    assert all(torch.equal(tensor, rest.server[name]) for name, tensor in whole.server.items())


@pytest.mark.slow
@pytest.mark.essential
def test_a_secure_run_is_the_plain_one(tmp_path):
    plain, secret = ladder_of(controller="step"), ladder_of(controller="step")
    fit(plain, tmp_path / "plain", max_rounds=6)
    fit(secret, tmp_path / "secret", max_rounds=6, secure_sum=SecureSum())
    assert all(torch.equal(tensor, secret.server[name]) for name, tensor in plain.server.items())


def test_bad_settings_are_refused():
    with refused("--model.controller token"):
        ladder_of(controller="token")
    free = dataclasses.replace(branch_costs(), controller=None)
    with refused("--model.controller step with a table of costs that has none of a controller"):
        built_ladder(controller="step", costs=free)
    assert built_ladder(costs=free)[0].devices[0].deciding == "none"
    assert LEVELS[0] == KEPT[0]
