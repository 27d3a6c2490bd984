"""Known answers of averaging among peers: exact means, rates, and the total that no drop-out
changes."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from peers import Exchange, normal, spread
from refusals import refused

from fl_lightning.aggregation.averages import NormClipping
from fl_lightning.errors import MisuseError
from fl_lightning.topology import (
    Complete,
    Exponential,
    Gossip,
    Graph,
    GraphFile,
    Hierarchy,
    Moshpit,
    RandomGraph,
    RandomGroups,
    Ring,
    Torus,
)
from fl_lightning.wire import Payload


def test_moshpit_of_side_to_the_dims_is_exact_after_dims_rounds():
    """4^3 peers: the distance from consensus is 0 at round 3, and not before."""
    peers = Exchange(Moshpit(side=4, dims=3), normal(64))
    mean = peers.vectors.double().mean(0)
    distances = [peers.exchange()[0]["consensus/distance"] for _ in range(3)]
    assert distances[0] > distances[1] > 1e-2
    assert distances[2] < 1e-12
    torch.testing.assert_close(peers.vectors.double(), mean.expand(64, -1), rtol=0, atol=1e-6)


def test_moshpit_with_several_averagings_a_round():
    peers = Exchange(Moshpit(side=2, dims=3, averagings=3), normal(8))
    assert peers.exchange()[0]["consensus/distance"] < 1e-12


@pytest.mark.parametrize("away", [(), (3,), (0, 1, 5)])
def test_a_moshpit_groups_mean_is_over_those_present(away):
    before = normal(9)
    peers = Exchange(Moshpit(side=3, dims=2), before)
    peers.exchange(away=away)
    for place in range(9):
        members = [other for other in range(place % 3, 9, 3) if other not in away]
        wanted = before[place] if place in away else before[members].double().mean(0).float()
        torch.testing.assert_close(peers.vectors[place], wanted)
    peers.exchange()
    torch.testing.assert_close(peers.vectors[:3], peers.vectors[:1].expand(3, -1))


def test_a_random_groups_mean_is_over_those_present():
    """One group of all: who is there has their mean."""
    before = normal(6)
    peers = Exchange(Gossip(RandomGroups(1)), before)
    peers.exchange(away=[1], lost=[4])
    mean = before[[0, 2, 3, 5]].double().mean(0).float()
    wanted = torch.stack([before[id] if id in (1, 4) else mean for id in range(6)])
    torch.testing.assert_close(peers.vectors, wanted)


@pytest.mark.parametrize("count", [5, 8, 16])
def test_a_rings_slowest_wave_shrinks_by_one_third_plus_two_thirds_of_a_cosine(count):
    angles = 2 * math.pi * torch.arange(count) / count
    peers = Exchange(Gossip(Ring()), torch.stack([angles.cos(), angles.sin()], 1))
    rate = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / count)
    for round in range(1, 6):
        distance = peers.exchange()[0]["consensus/distance"]
        assert distance == pytest.approx(rate ** (2 * round), rel=1e-5)


def test_random_groups_leave_r_minus_1_in_n_minus_1_of_the_variance():
    """64 peers in 16 groups: 15 / 63 = 0.2381, whatever the groups, over vectors of many random
    values."""
    peers = Exchange(Gossip(RandomGroups(16)), normal(64, size=40_000))
    before, seen = spread(peers.vectors), []
    for _ in range(2):
        after = peers.exchange()[0]["consensus/distance"]
        seen, before = [*seen, after / before], after
    assert seen[0] == pytest.approx(15 / 63, rel=0.01)
    # the second partition depends on no first
    many = Exchange(Gossip(RandomGroups(16)), normal(64, size=2000))
    ratios = []
    for seed in range(12):
        many.start(normal(64, 2000, seed))
        first = many.exchange()[0]["consensus/distance"]
        ratios.append(many.exchange()[0]["consensus/distance"] / first)
    assert sum(ratios) / len(ratios) == pytest.approx(15 / 63, rel=0.05)


@pytest.mark.parametrize("hops", [1, 3, 5])
def test_the_exponential_graph_of_2_to_the_k_is_exact_after_k_rounds(hops):
    peers = Exchange(Gossip(Exponential()), normal(2**hops))
    distances = [peers.exchange()[0]["consensus/distance"] for _ in range(hops)]
    assert distances[-1] < 1e-12
    assert min([1.0, *distances[:-1]]) > 1e-2


class Uneven(Graph):
    """Rows add up to 1, and columns do not: the first peers are heard by more than the last."""

    symmetric = False

    def mixing(self, peers, seed, round):
        rows = {}
        for i in range(peers):
            heard = Counter([i, i, (i + 1) % peers, i // 2])
            rows[i] = {j: Fraction(times, 4) for j, times in heard.items()}
        return rows


GRAPHS = [
    Ring(),
    Torus(),
    Complete(),
    Exponential(),
    Uneven(),
    RandomGraph(3),
    RandomGroups(3),
    GraphFile("star.txt"),
]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: type(graph).__name__)
def test_no_drop_out_changes_the_total(graph, tmp_path, monkeypatch):
    """sum m_i x_i / sum m_i stays, m_i the weights of push-sum, also where a peer that is away is
    drawn."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "star.txt").write_text(
        "".join(f"0 {leaf}\n" for leaf in range(1, 12)) + "# a star\n3,4\n"
    )
    before, random = normal(12), torch.Generator().manual_seed(1)
    peers = Exchange(Gossip(graph), before)
    for _ in range(12):
        away, lost = torch.randperm(12, generator=random)[:5].split([3, 2])
        metrics, _ = peers.exchange(away=away.tolist(), lost=lost.tolist())
        torch.testing.assert_close(
            peers.method.server["weights"], before.double().mean(0).float(), rtol=0, atol=2e-6
        )
    masses = [float(peers.method.server.get(f"peer/{id}/mass", 1.0)) for id in range(12)]
    assert sum(masses) == pytest.approx(12)
    assert (min(masses) < 0.9) == (not graph.symmetric)
    assert metrics["consensus/distance"] < 0.5 * spread(before)


class Shift(Graph):
    """Each takes the model of the one after it, and nothing of its own."""

    symmetric = False

    def mixing(self, peers, seed, round):
        return {i: {(i + 1) % peers: Fraction(1)} for i in range(peers)}


def test_where_one_next_state_is_not_finite_all_stay(monkeypatch):
    peers = Exchange(Gossip(Ring()), normal(5))
    before, make = peers.vectors, peers.method.next_state
    broken = {"weights": before[0] * math.nan}
    monkeypatch.setattr(peers.method, "next_state", lambda sums: peers.method.server.update(broken))
    _, entries = peers.exchange()
    assert torch.equal(peers.vectors, before)
    assert Counter(entry.status for entry in entries) == {"lost": 5}
    monkeypatch.setattr(peers.method, "next_state", make)
    assert spread(peers.vectors) > spread(peers.exchange() and peers.vectors)


def test_with_push_sum_each_peer_keeps_a_share_of_its_mass():
    with refused("peer 0 takes nothing of itself", "push_sum false", MisuseError):
        Exchange(Gossip(Shift()), normal(4)).exchange()
    peers = Exchange(Gossip(Shift(), push_sum=False), before := normal(4))
    peers.exchange()
    torch.testing.assert_close(peers.vectors, before.roll(-1, 0))


@pytest.mark.parametrize(("topology", "apart"), [(Gossip("complete"), 0), (Hierarchy(6, 2), 1)])
def test_each_update_is_cut_from_what_its_own_client_started_from(topology, apart):
    """Sun et al. (2019): u_k = v_k - w_k, however far the models of nodes are apart."""
    before, learnt = 10 * normal(6), normal(6, seed=1)
    peers = Exchange(topology, before, average=NormClipping(0.5))
    for _ in range(apart):
        peers.exchange()
    cut = learnt * (0.5 / learnt.norm(dim=1, keepdim=True)).clamp(max=1)
    peers.exchange(local=before + learnt)
    wanted = (before + cut).mean(0).expand(6, -1)
    torch.testing.assert_close(peers.vectors, wanted, rtol=0, atol=1e-5)


def test_without_push_sum_a_directed_graph_loses_the_mean():
    before = normal(8)
    peers = Exchange(Gossip(Exponential(), push_sum=False), before)
    for round in range(6):
        peers.exchange(away=[round])
    assert (peers.method.server["weights"] - before.mean(0)).abs().max() > 1e-2


def test_every_message_is_in_the_ledger_at_both_ends():
    """On a ring each sends to two; who is away gets nothing, and what is lost was sent."""
    peers = Exchange(Gossip(Ring()), normal(5))
    one = Payload(
        {"examples": torch.tensor(1, dtype=torch.int32), "weights": torch.zeros(50)}
    ).nbytes
    metrics, entries = peers.exchange()
    assert {(e.upload, e.download, e.wasted) for e in entries} == {(2 * one, 2 * one, 0)}
    assert metrics["comm/bytes_per_peer"] == 4 * one
    assert metrics["comm/bytes_per_link"] == one
    _, entries = peers.exchange(away=[1], lost=[3])
    found = [(e.status, e.download // one, e.upload // one, e.wasted // one) for e in entries]
    assert found == [
        ("trained", 1, 1, 0),  # 4 hears 0, 1 is away
        ("dropped", 0, 0, 0),
        ("trained", 0, 0, 0),  # 1 is away, and 3 is gone once it has sent
        ("lost", 0, 2, 2),
        ("trained", 1, 1, 0),
    ]
