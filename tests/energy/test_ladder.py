"""Ladders by elimination, the subsets that are drawn, and budgets over levels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from laddered import branch_costs
from tiny_language import records

from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.ladder import (
    BranchCosts,
    all_masks,
    best_within,
    distinct,
    drawn_mask,
    next_mask,
    protected_by,
    without_each,
)
from fl_lightning.energy.budgets.ladder_network import LadderNetwork
from fl_lightning.energy.budgets.ladder_search import Budgeted, LadderSearch
from fl_lightning.energy.budgets.ledger import REFUSED, UNITS_PER_JOULE
from fl_lightning.energy.budgets.levels import LevelLedger, levels_of
from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.energy.budgets.tables import branch_devices
from fl_lightning.models import LlamaTiny
from fl_lightning.models.language.llama import Block

FREE = torch.zeros(6, dtype=torch.bool)


def eliminated(loss_of, costs, protected=None):
    """The masks of a ladder, the full one first, and the branches in the order in which they go."""
    masks, branches = [torch.ones(len(costs), dtype=torch.bool)], []
    protected = torch.zeros(len(costs), dtype=torch.bool) if protected is None else protected
    while True:
        losses = torch.stack([loss_of(mask) for mask in without_each(masks[-1])])
        mask, branch = next_mask(masks[-1], losses, costs, protected)
        if branch < 0:
            return torch.stack(masks), branches
        masks.append(mask)
        branches.append(branch)


# Ladders


def test_v_a_ladder_is_nested_and_its_cost_falls():
    draws = torch.Generator().manual_seed(0)
    costs = torch.rand(6, generator=draws).double() + 0.1
    table = {tuple(m.tolist()): torch.rand((), generator=draws) for m in all_masks(6)}
    masks, branches = eliminated(
        lambda mask: table[tuple(mask.tolist())], costs, torch.tensor([1, 0, 0, 0, 1, 0]).bool()
    )
    assert masks[0].all()
    assert len(masks) == 5
    assert not {0, 4} & {*branches}
    shares = BranchCosts(0.3, costs).share(masks)
    for (mask, share), (below, less) in pairwise(zip(masks, shares.tolist(), strict=True)):
        assert (below <= mask).all()
        assert less < share


@pytest.mark.parametrize("seed", range(5))
def test_vi_elimination_is_enumeration_where_losses_add_up(seed):
    """No subset of the 2^6 that costs no more has a smaller loss than the ladder's."""
    draws = torch.Generator().manual_seed(seed)
    costs, worth = (torch.rand(6, generator=draws).double() + 0.05 for _ in range(2))
    masks, branches = eliminated(lambda mask: 0.2 + worth[~mask].sum(), costs)
    assert len(masks) == 7
    every = all_masks(6)
    assert len({tuple(m) for m in every.tolist()}) == 64
    shares = BranchCosts(0.1, costs).share(every)
    losses = torch.stack([0.2 + worth[~mask].sum() for mask in every])
    for mask in masks:
        own = float(BranchCosts(0.1, costs).share(mask.unsqueeze(0)))
        best = best_within(shares <= own + 1e-9, shares, losses)
        assert float(losses[best]) == pytest.approx(float(0.2 + worth[~mask].sum()))
    ratios = (worth / costs)[branches]
    assert torch.equal(ratios, ratios.sort().values)


def test_a_ladder_goes_on_until_prompts_fit_too():
    """The shipped table measures 32 tokens as dear as they were: without two attentions and a
    feed-forward layer one token fits a budget of 0.6, and a prompt of 32 with three tokens after it
    does not."""
    device = branch_devices([None], [0.6], 4)[0]
    search = LadderSearch("elimination", 1, 6, 4, [0.6])
    budgeted = Budgeted.of([device], Lengths(torch.tensor([20, 32, 32]), torch.tensor([9, 3, 3])))
    known = search.start(8)
    for round, cheapest in ((2, 6), (3, 5), (4, 3), (5, 4)):
        losses = torch.full((9,), 0.9)
        losses[[0, cheapest]] = 0.1
        known |= search.next_entries(known, losses, round, budgeted, np.random.default_rng(0))
    ladder = known["ladder"].bool()
    assert (~ladder).sum(1).tolist() == [0, 1, 2, 3, 4]
    assert BranchCosts.of(device, "q99").share(ladder[3:4]) <= 0.6
    assert budgeted.refused(ladder, 0.6).tolist() == [3, 3, 3, 2, 0]


def test_of_branches_that_cost_no_loss_the_dearest_goes_first():
    costs = torch.tensor([1.0, 3.0, 2.0, 1.0, 1.0, 1.0]).double()
    losses = torch.tensor([0.5, 0.5, 0.4, 0.5, 0.6, 0.6, 0.6])
    assert next_mask(~FREE, losses, costs, FREE)[1] == 1


def test_a_branch_that_costs_nothing_leaves_the_protected_ones_alone():
    costs = torch.tensor([1.0, 3.0, 2.0, 1.0, 0.0, 0.0]).double()
    losses = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.5])
    protected = torch.tensor([True, True, True, True, False, False])
    assert next_mask(~FREE, losses, costs, protected)[1] == 5


def test_protected_branches_are_those_of_large_losses():
    """By hand, the losses of the prototype: ppl 80, 263, 4.8, 1.7, 5.0, 1.45, 25 and 3.7 leave
    three."""
    alone = torch.tensor([80.2, 262.6, 4.77, 1.69, 4.99, 1.45, 24.8, 3.71]).log()
    losses = torch.cat((torch.tensor([1.21]).log(), alone))
    assert protected_by(losses).tolist() == [True, True, False, False, False, False, True, False]


def test_x_a_planted_slack_goes_first_at_no_loss():
    """A block whose outputs are zero is appended to the shipped network; both its branches go
    first."""
    network = LlamaTiny(259, rank=0)
    block = Block(96, 4, 256)
    with torch.no_grad():
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    network.layers.append(block)
    device = Device(branch_costs(5), 0.8, whole=True)
    laddered = LadderNetwork(network.eval(), device, full_prompt=False)
    data = records(generate=False)
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    inputs = data.inputs("test", torch.arange(8))
    # what the network says itself is what it knows; these answers it has not learned
    with torch.no_grad():
        target = network(inputs).argmax(-1)
    mask, costs, found = torch.ones(10, dtype=torch.bool), BranchCosts.of(device), []
    first = laddered.losses(inputs, target, mask.unsqueeze(0))
    for _ in range(2):
        losses = laddered.losses(inputs, target, without_each(mask))
        mask, branch = next_mask(mask, losses, costs.branches, torch.zeros(10, dtype=torch.bool))
        found.append(branch)
        assert float(losses[branch + 1]) == float(first)
    assert sorted(found) == [8, 9]


# What is drawn


def test_ix_at_the_share_1_all_branches_are_drawn():
    noise, costs = np.random.default_rng(0), BranchCosts(1.0, torch.full((6,), 2.0).double())
    assert all(bool(drawn_mask(noise, costs, FREE, 1.0).all()) for _ in range(20))


def test_drawn_subsets_cost_no_more_than_their_share_and_keep_what_is_protected():
    protected = torch.tensor([1, 0, 0, 0, 0, 0]).bool()
    costs = BranchCosts(1.2, torch.tensor([4.0, 2.5, 4.0, 2.5, 4.0, 2.5]).double())
    noise = np.random.default_rng(1)
    drawn = torch.stack([drawn_mask(noise, costs, protected, 0.4) for _ in range(300)])
    shares = costs.share(drawn)
    assert drawn[:, 0].all()
    assert not drawn[:, 1:].all(0).any()
    assert float(shares.min()) > 0.4 - 4.0 / 20.7
    assert float(shares.max()) < 1.0
    bare = drawn_mask(noise, costs, ~FREE, 0.4)
    assert bare.all()


def test_levels_that_repeat_are_one():
    ladder = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 1], [1, 0, 0]], dtype=torch.uint8)
    assert distinct(ladder).int().tolist() == [[1, 1, 1], [1, 0, 1], [1, 0, 0]]


# Budgets over levels


def test_the_costs_of_levels_by_hand():
    device = Device(branch_costs(2), 0.5, whole=True)
    masks = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()
    one, prompt = BranchCosts.of(device), BranchCosts.of(device, "mean", 10)
    assert one.share(masks).tolist() == pytest.approx([1.0, 9.2 / 14.2, 1.2 / 14.2])
    assert prompt.share(masks).tolist() == pytest.approx([1.0, 29 / 61, 3 / 61])
    charged = BranchCosts.of(device, "q99").units(masks)
    assert (charged / UNITS_PER_JOULE).tolist() == pytest.approx([0.0213, 0.0138, 0.0018])
    assert int(charged[0]) / UNITS_PER_JOULE == device.all_high(0, 1, "q99")


def test_viii_no_sequence_spends_more_than_its_budget_and_refusals_are_those_that_must_be():
    """2 000 sequences that wish for anything, some without a prompt."""
    draws = torch.Generator().manual_seed(0)

    def some(low, high, *shape):
        return torch.randint(low, high, shape, generator=draws)

    for _ in range(20):
        count = int(some(1, 6, 1))
        costs = some(1, 1000, count + 1)  # also of ladders that are not nested
        owed, lengths = some(1, 12, 100), some(0, 5, 100)
        prompts = lengths.unsqueeze(1) * costs
        budget = (
            torch.rand(100, generator=draws) * 1.5 * (owed + lengths) * int(costs.max())
        ) / UNITS_PER_JOULE
        ledger = LevelLedger(budget, prompts, costs, owed)
        must = prompts.min(1).values + costs.min() * owed > (budget * UNITS_PER_JOULE).floor()
        ledger.decide_prompts(some(-1, count + 3, 100))
        assert torch.equal(ledger.refused, must)
        for _ in range(int(owed.max())):
            taken = ledger.decide(some(-1, count + 3, 100), ledger.owed > 0)
            assert ((taken == REFUSED) == (must | (taken == REFUSED))).all()
        assert torch.equal(ledger.refused, must)
        assert (ledger.owed[~must] == 0).all()
        assert (ledger.spent <= budget.double()).all()
        ledger.decide(torch.zeros(100, dtype=torch.int64), ~ledger.refused)
        assert ledger.refused.all()  # one token more than it was to have


def test_the_level_of_a_sequence_by_hand():
    """Levels cost 10, 6 and 4, a prompt five times that."""
    unit = 1 / UNITS_PER_JOULE
    costs, prompts = torch.tensor([10, 6, 4]), torch.tensor([[50, 30, 20]] * 4)
    budget = torch.tensor([100.0, 74.0, 58.0, 39.0], dtype=torch.float64) * unit
    owed = torch.tensor([5, 5, 5, 5])
    ledger = LevelLedger(budget, prompts, costs, owed)
    assert ledger.constant().tolist() == [0, 1, 2, 2]
    prompt, later = ledger.after_full_prompt()
    assert prompt.tolist() == [0, 0, 2, 2]
    assert later.tolist() == [0, 2, 2, 2]
    lengths = Lengths(torch.full((4,), 2), owed)
    wish = ledger.constant()
    levels, granted = levels_of(ledger, lengths, wish, wish.unsqueeze(1).expand(-1, 8))
    assert granted.tolist() == [True, True, True, False]
    assert levels[:3].tolist() == [[0] * 8, [1] * 8, [2] * 8]
    assert (levels[3] == REFUSED).all()
    assert (ledger.spent / unit).tolist() == [100, 60, 40, 0]
    assert not ledger.clamped.any()


def test_a_wish_that_does_not_fit_takes_the_best_level_that_does():
    costs, unit = torch.tensor([10, 6, 4]), 1 / UNITS_PER_JOULE
    ledger = LevelLedger(
        torch.tensor([19.0 * unit]).double(), torch.zeros(1, 3).long(), costs, torch.tensor([3])
    )
    taken = [int(ledger.decide(torch.tensor([0]), torch.tensor([True]))) for _ in range(3)]
    assert taken == [0, 2, 2]
    assert int(ledger.clamped) == 2
