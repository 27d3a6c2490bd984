"""Calibration of branches: with a meter that counts calls the table is known, and the shipped one
is of the network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from laddered import two_blocks
from refusals import refused

from fl_lightning.energy import from_json, shipped_table, to_json
from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.calibration import branches
from fl_lightning.energy.calibration.branches import WHOLE, calibrate_branches
from fl_lightning.energy.calibration.meters import JouleMeter
from fl_lightning.energy.command import energy
from fl_lightning.energy.options import HIGH
from fl_lightning.energy.switched.branches import branch_names
from fl_lightning.models.language.llama import Attention, FeedForward, Llama

SHORT = (1, 2, 4)
KINDS = ("mean", "q99")


class CountingMeter(JouleMeter):
    """Joules of 4 for each attention, 2.5 for each feed-forward layer, and 1 for each pass."""

    label = "modelled: CPU seconds x 1 W"
    joules = 0.0

    def read(self) -> float:
        return self.joules


@pytest.fixture
def meter(monkeypatch):
    found = CountingMeter()
    for kind, joules in ((Attention, 4.0), (FeedForward, 2.5), (Llama, 1.0)):
        name = "logits" if kind is Llama else "forward"
        original = getattr(kind, name)

        def counted(self, *arguments, original=original, joules=joules, **more):
            found.joules += joules
            return original(self, *arguments, **more)

        monkeypatch.setattr(kind, name, counted)
    monkeypatch.setattr(branches, "KNOTS", SHORT)
    monkeypatch.setattr(branches, "HELD_OUT", (3,))
    return found


def test_costs_are_those_of_the_calls(meter):
    network = two_blocks(259)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = calibrate_branches(network, meter, seconds=0.01, context=8)
    table = found.table
    assert (table.scope, table.adapter, list(table.groups)) == ("branch", "merged", branch_names(2))
    for tokens in SHORT:
        for kind in ("mean", "q99"):
            costs = table.tensors(tokens, kind)
            assert torch.allclose(costs[:, 2], torch.tensor([4.0, 2.5, 4.0, 2.5]).double())
            assert not costs[:, 0].any()
            assert table.fixed(tokens, kind) == pytest.approx(1.0)
    assert found.largest_error(WHOLE) == pytest.approx(0.0, abs=1e-9)
    assert from_json(to_json(table)) == table
    assert not table.without_useless().available(1)[:, 1].any()  # int8 costs what high does
    after = network.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_quantiles_charge_a_whole_step_no_less_than_its_own(meter, monkeypatch):
    """Where every fifth whole step takes twice as long, so is what a ledger charges."""
    original = branches.measure

    def sometimes_twice(works, meter, seconds):
        times = np.where(np.arange(100) % 5 == 4, 2.0, 1.0)
        samples = original(works, meter, seconds).items()
        return {
            key: values.mean() * (times if key[0] == WHOLE else np.ones(100))
            for key, values in samples
        }

    monkeypatch.setattr(branches, "measure", sometimes_twice)
    table = calibrate_branches(two_blocks(259), meter, seconds=0.01, context=8).table
    for tokens in SHORT:
        assert table.all_high(tokens, "q99") >= 2 * 14.0 - 1e-9
        assert (table.tensors(tokens, "q99")[:, 2] >= table.tensors(tokens)[:, 2]).all()


def test_other_networks_and_numbers_are_refused(meter):
    with refused("network Linear"):
        calibrate_branches(torch.nn.Linear(2, 2), meter)
    with refused("--seconds 0"):
        calibrate_branches(two_blocks(259), meter, seconds=0)


def test_the_shipped_table_is_of_the_network_and_by_it_attention_is_dear():
    """What the pages say of it: three times a feed-forward layer in a step of one token."""
    table = shipped_table("llama_tiny_branches")
    assert list(table.groups) == branch_names(4)
    costs = table.tensors(1)[:, 2]
    assert 3.0 < float(costs[0] / costs[1]) < 3.6
    whole = table.all_high(1)
    assert float(costs[0]) / whole == pytest.approx(0.174, abs=0.001)
    assert 1 - float(costs[1]) / whole == pytest.approx(0.947, abs=0.001)
    assert 1 - float(costs[0] + costs[1]) / whole == pytest.approx(0.774, abs=0.001)


def test_quantiles_of_the_shipped_table_are_as_the_pages_say():
    table = shipped_table("llama_tiny_branches")
    each = [*table.groups.values()]
    for tokens in table.rest.q99.tokens:
        branches = [float(one["high"].q99.at(tokens) / one["high"].mean.at(tokens)) for one in each]
        rest = float(table.rest.q99.at(tokens) / table.rest.mean.at(tokens))
        if tokens == 32:
            assert branches == pytest.approx([4.4] * 8, abs=0.05)
            assert rest == pytest.approx(10, abs=0.05)
        else:
            assert 2.0 <= min(*branches, rest) <= max(*branches, rest) < 3.3
    device = Device(table, 1.0, whole=True)
    mask = torch.tensor([1, 1, 0, 0, 0, 0, 1, 1]).double()

    def share(prompt: int, new: int, kind: str) -> float:
        first, later = (
            float(device.prompt_costs(n, kind)[:, HIGH, -1] @ mask) + device.fixed(n, kind)
            for n in (prompt, 1)
        )
        return (first + new * later) / device.all_high(prompt, new, kind)

    for new, most in ((1, 0.02), (10, 0.0045)):
        more = [share(p, new, "q99") - share(p, new, "mean") for p in range(25, 48)]
        assert most / 2 < max(more) < most
    assert share(32, 20, "mean") == pytest.approx(0.546, abs=5e-4)
    of_prompt = [device.all_high(32, 0, kind) / device.all_high(32, 20, kind) for kind in KINDS]
    assert of_prompt == pytest.approx([0.09, 0.17], abs=0.005)


def test_branches_are_measured_in_float32_alone():
    with refused("--high bfloat16 --scope branch"):
        energy(calibrate=True, scope="branch", high="bfloat16", seconds=0.1)
