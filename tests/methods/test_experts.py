"""The algebra of Fed-VEMoE's experts against known answers: responsibilities, slots, merges."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from callbacks import ExpertFigure
from callbacks.figures.expert_figure import expert_figure, purity_of
from fl_lightning.methods.experts.merging import AdapterSpace
from fl_lightning.methods.experts.responsibilities import (
    Paired,
    is_worse_than_own,
    responsibilities,
    seated,
)
from fl_lightning.methods.experts.slots import RULES, Slots
from fl_lightning.models.adapters.low_rank import FactorNames
from fl_lightning.wire import Layout

PRIOR = torch.tensor([0.0, 0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
ACTIVE = PRIOR > 0
OUT, IN, R = 40, 30, 4


def nats(*means: float, examples: int = 32, noise: float = 0.0) -> torch.Tensor:
    """Losses of examples of very different difficulty, with these differences between experts."""
    draws = np.random.default_rng(0)
    difficulty = draws.normal(size=(examples, 1))
    apart = draws.normal(size=(examples, len(means)))
    return torch.tensor(difficulty + np.array(means) + noise * (apart - apart.mean(0)))


def test_identical_experts_are_taken_by_the_prior():
    r, tau = responsibilities(nats(0, 1, 1, 1, 0), PRIOR, ACTIVE, tau=0.05, kappa=1.0)
    assert torch.allclose(r, PRIOR)
    assert tau == 0.05


def test_the_better_expert_has_all_as_the_temperature_falls():
    """The free slots 0 and 4 have the least loss, and get nothing."""
    r, _ = responsibilities(nats(0, 1.1, 1.0, 1.2, 0), PRIOR, ACTIVE, tau=1e-3, kappa=0.0)
    assert r[2] == 1
    assert not r[~ACTIVE].any()


def test_a_client_is_not_surer_than_its_probes_can_tell():
    losses = nats(9, 1.0, 1.05, 3.0, 9, noise=0.5)
    r, tau = responsibilities(losses, PRIOR, ACTIVE, tau=1e-6, kappa=1.0)
    difference = (losses[:, 2] - losses[:, 1]).numpy()
    assert tau == pytest.approx(difference.std(ddof=1) / math.sqrt(32))
    score = [
        math.log(p) - float(losses[:, k].mean()) / tau for k, p in enumerate(PRIOR.tolist()) if p
    ]
    expected = np.exp(score) / np.exp(score).sum()
    assert r[ACTIVE].numpy() == pytest.approx(expected)
    assert not r[~ACTIVE].any()


def test_slots_permuted_everything_is_permuted():
    order = torch.tensor([0, 3, 1, 2, 4])
    losses = nats(9, 1.0, 1.1, 1.3, 9, noise=0.1)
    r, _ = responsibilities(losses, PRIOR, ACTIVE, tau=0.1, kappa=1.0)
    permuted, _ = responsibilities(
        losses[:, order], PRIOR[order], ACTIVE[order], tau=0.1, kappa=1.0
    )
    assert torch.allclose(permuted, r[order], rtol=1e-12)


def test_the_largest_are_seated_and_the_lower_of_equals():
    slots, shares = seated(torch.tensor([0.0, 0.25, 0.25, 0.5, 0.0]), ACTIVE, seats=2)
    assert slots == [1, 3]
    assert shares.tolist() == pytest.approx([1 / 3, 2 / 3])
    slots, shares = seated(torch.tensor([0.0, 0.3, 0.3, 0.4, 0.0]), ACTIVE, seats=9)
    assert slots == [1, 2, 3]
    assert float(shares.sum()) == pytest.approx(1)


def test_a_share_that_the_server_counts_as_nothing_gets_no_seat():
    """Its logarithm could be infinite, and its place in the message empty."""
    for little in (0.0, 1e-60, 1e-4):
        slots, shares = seated(
            torch.tensor([0.0, little, 1 - little, 0.0, 0.0]).double(), ACTIVE, seats=2
        )
        assert slots == [2]
        assert shares.tolist() == [1]


@pytest.mark.parametrize(
    ("own", "rejects"), [(0.5, True), (0.97, False), (1.0, False), (1.5, False)]
)
def test_experts_are_rejected_where_the_own_adapter_is_better_by_the_test(own, rejects):
    """All three are equally bad, or all are good enough: what r is does not matter."""
    losses = nats(0, 1, 1, 1, 0)
    assert is_worse_than_own(losses, losses[:, 1] - 1 + own, ACTIVE, gap=0.05, z=2.0) is rejects


def test_a_difference_within_the_error_of_the_probes_is_no_reason():
    losses = nats(0, 1, 1, 1, 0)
    noisy = losses[:, 1] - 0.1 + torch.from_numpy(np.random.default_rng(1).normal(0, 1, 32))
    assert not is_worse_than_own(losses, noisy, ACTIVE, gap=0.0, z=2.0)
    assert is_worse_than_own(losses, noisy, ACTIVE, gap=0.0, z=0.0)
    assert Paired.of(losses[:, 1], noisy).error > 0.1


# The server's slots


def space() -> AdapterSpace:
    layout = Layout({"l.A": torch.zeros(R, IN), "l.B": torch.zeros(OUT, R)})
    return AdapterSpace(layout, [FactorNames("l.A", "l.B", "", 2.0, False)], {})


def factors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(R, IN, generator=draws), torch.randn(OUT, R, generator=draws)


def expert(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a.reshape(-1), b.reshape(-1)])


def product(row: torch.Tensor) -> torch.Tensor:
    a, b = row.double().split([R * IN, OUT * R])
    return 2.0 * b.view(OUT, R) @ a.view(R, IN)


def some_slots(rows: list[torch.Tensor], size: int = 5) -> Slots:
    """Slots of which the first ones after the shared one have these experts."""
    experts = torch.zeros(size, OUT * R + R * IN)
    for slot, row in enumerate(rows, start=1):
        experts[slot] = row
    return Slots.start(experts, features=3, count=len(rows))


def test_cosine_and_merge_see_the_product_and_not_the_factors():
    """An expert and the same in rotated factors are one, to float32's rounding."""
    a, b = factors(0)
    rotation = torch.linalg.qr(torch.randn(R, R, generator=torch.Generator().manual_seed(1)))[0]
    same, turned = expert(a, b), expert(rotation.T @ a, b @ rotation)
    assert space().cosine(same, turned) == pytest.approx(1, abs=1e-6)
    merged, lost = space().merged(torch.stack([same, turned]), torch.tensor([0.5, 0.5]).double())
    assert lost == pytest.approx(0, abs=1e-10)
    assert torch.dist(product(merged), product(same)) < 1e-5 * product(same).norm()
    mean = torch.stack([same, turned]).mean(0)
    # of factors, it is not
    assert torch.dist(product(mean), product(same)) > 0.3 * product(same).norm()


def test_a_merge_is_the_best_of_its_rank():
    """Eckart and Young: the error is that of a truncated SVD of the dense sum."""
    rows = torch.stack([expert(*factors(0)), expert(*factors(1))])
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    merged, lost = space().merged(rows, weights)
    dense = 0.3 * product(rows[0]) + 0.7 * product(rows[1])
    u, s, v = torch.linalg.svd(dense)
    best = (u[:, :R] * s[:R]) @ v[:R]
    assert torch.dist(product(merged), best) < 1e-5 * best.norm()
    assert lost == pytest.approx(float(s[R:].square().sum() / s.square().sum()))


@pytest.mark.parametrize("sides", [(40, 30), (30, 40), (30, 30)])
def test_a_merge_above_a_side_of_the_layer_loses_nothing(sides):
    """Experts of rank 35 add what a layer of 30 can hold; what is left of the factors is zero."""
    m, n = sides
    layout = Layout({"l.A": torch.zeros(35, n), "l.B": torch.zeros(m, 35)})
    wide = AdapterSpace(layout, [FactorNames("l.A", "l.B", "", 2.0, False)], {})
    rows = torch.randn(2, layout.size, generator=torch.Generator().manual_seed(0))
    merged, lost = wide.merged(rows, torch.tensor([0.3, 0.7], dtype=torch.float64))
    one, other, both = (
        named["l.B"] @ named["l.A"] for named in map(layout.unpack, [*rows, merged])
    )
    torch.testing.assert_close(both, 0.3 * one + 0.7 * other, rtol=1e-4, atol=1e-4)
    assert lost == pytest.approx(0, abs=1e-10)


def test_alike_experts_merge_after_two_rounds_and_unrelated_ones_do_not():
    a, b = factors(0)
    slots = some_slots([expert(a, b), expert(*factors(1)), expert(-a, -b)])
    slots = replace(slots, prior=torch.tensor([0, 0.5, 0.2, 0.3, 0], dtype=torch.float64))
    once = slots.merged(space(), RULES)
    assert torch.equal(once.active, slots.active)
    assert int(once.alike[1, 3]) == 1
    twice = once.merged(space(), RULES)
    assert twice.active.tolist() == [False, True, True, False, False]
    assert twice.prior.tolist() == pytest.approx([0, 0.8, 0.2, 0, 0])
    assert twice.changes.tolist() == [0, 0, 1]
    assert torch.dist(product(twice.experts[1]), product(slots.experts[1])) < 1e-4
    assert not twice.experts[3].any()
    assert torch.equal(twice.experts[2], slots.experts[2])


def test_unused_experts_go_after_three_rounds_and_free_slots_stay_free():
    slots = some_slots([expert(*factors(k)) for k in range(3)])
    mass = torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    for round in range(1, 6):
        slots = slots.used(mass, RULES).pruned(round, RULES)
        gone = round >= 4  # older than three rounds
        assert slots.active.tolist() == [False, True, True, not gone, False]
        assert float(slots.prior.sum()) == pytest.approx(1)
        assert not slots.prior[~slots.active].any()
        assert (slots.prior[slots.active] > 0).all()
    assert not slots.experts[3].any()


def test_the_last_expert_is_never_pruned():
    slots = replace(some_slots([expert(*factors(0))]), starving=torch.full((5,), 9))
    assert slots.pruned(20, RULES).active.tolist() == slots.active.tolist()


def test_a_birth_takes_two_rounds_of_rejections_a_seed_and_a_slot_that_was_free():
    slots, seed = some_slots([expert(*factors(0))]), expert(*factors(1))
    free = torch.tensor([False, False, False, True, True])
    assert not slots.with_birth(seed, free, rejects=0, clients=8, round=1, rules=RULES).unserved
    once = slots.with_birth(seed, free, rejects=2, clients=8, round=1, rules=RULES)
    assert int(once.unserved) == 1
    assert torch.equal(once.active, slots.active)
    nobody = once.with_birth(None, free, rejects=2, clients=8, round=2, rules=RULES)
    assert int(nobody.unserved) == 2
    assert torch.equal(nobody.active, slots.active)
    born = nobody.with_birth(seed, free, rejects=2, clients=8, round=3, rules=RULES)
    assert born.active.tolist() == [False, True, False, True, False]
    assert torch.equal(born.experts[3], seed)
    assert born.prior.tolist() == pytest.approx([0, 0.75, 0, 0.25, 0])
    assert int(born.born[3]) == 3
    assert not born.routers[3].any()
    assert born.changes.tolist() == [1, 0, 0]
    full = nobody.with_birth(seed, torch.zeros(5, dtype=torch.bool), 2, 8, round=3, rules=RULES)
    assert torch.equal(full.active, slots.active)


def test_an_expert_keeps_some_prior_where_all_clients_reject_it():
    """At 0 the one that was born for one of them would get all of them."""
    slots = replace(some_slots([expert(*factors(0))]), unserved=torch.tensor(1))
    free = torch.tensor([False, False, False, True, True])
    born = slots.with_birth(expert(*factors(1)), free, rejects=8, clients=8, round=2, rules=RULES)
    assert born.prior.tolist() == pytest.approx([0, 1 / 9, 0, 8 / 9, 0])


def test_purity_is_one_where_each_group_has_one_expert():
    groups = np.array([0, 0, 1, 1, 2, 2])
    assert purity_of(np.eye(4)[[3, 3, 1, 1, 2, 2]], groups) == pytest.approx(1)
    assert purity_of(np.eye(4)[[0] * 6], groups) == 0
    # one expert each
    assert purity_of(np.eye(6), groups) == pytest.approx(math.log(3) / math.log(6))
    assert purity_of(np.eye(4), np.zeros(4)) is None


@pytest.mark.parametrize("known", [False, True])
def test_the_figure_has_a_panel_of_transfer_where_it_is_known_and_no_parts_of_rounds(known):
    pytest.importorskip("matplotlib")
    use, r, groups = np.eye(4)[[0, 0, 1]], np.eye(4)[[0, 1, 0]], np.array([0, 1, 0])
    lost = (
        np.array([[0.3, 0.1], [0.3, 0.2], [np.nan, np.nan]]) if known else np.full((3, 2), np.nan)
    )
    figure = expert_figure(
        use, r, groups, ["0  a", "1  b", "2  a"], ([3], [9.0], [12.0]), "perplexity", lost
    )
    titles = [axes.get_title() for axes in figure.axes]
    assert ("loss against its own adapter" in titles) is known
    figure.canvas.draw()
    served = figure.axes[titles.index("perplexity on validation")]
    assert [tick for tick in served.get_xticks() if 0.5 < tick < 3.5] == [1, 2, 3]
    if known:  # clients 0, 2, 1, the unsure and the unknown one not red
        bars = figure.axes[titles.index("loss against its own adapter")].patches
        assert [bar.get_facecolor() == bars[0].get_facecolor() for bar in bars] == [
            True,
            False,
            False,
        ]


def test_a_checkpoint_of_before_there_was_the_panel_is_read():
    figure = ExpertFigure()
    old = {"use": [[1.0]], "clients": {"0": [0.0, 1.0]}, "evaluated": [], "mean": [], "worst": []}
    figure.load_state_dict(old)
    assert figure.seen == {**old, "lost": {}}
