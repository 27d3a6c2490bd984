"""Mixing matrices: doubly stochastic, and of the graphs that they are named after."""

from __future__ import annotations

from fractions import Fraction

import pytest
from peers import Exchange, normal
from refusals import refused

from fl_lightning.topology import (
    Complete,
    Exponential,
    Gossip,
    GraphFile,
    Hierarchy,
    Moshpit,
    RandomGraph,
    RandomGroups,
    Ring,
    Torus,
)
from fl_lightning.topology.graphs import of_present

DEGREES = {
    Ring(): {2},
    Torus(): {4},
    Complete(): {11},
    Exponential(): {1},
    RandomGraph(1): {1},
    RandomGraph(5): {3, 4, 5},
    RandomGroups(3): {3},
}


@pytest.mark.parametrize("graph", DEGREES, ids=lambda graph: type(graph).__name__)
def test_rows_and_columns_add_up_to_1(graph):
    for round in range(1, 6):
        mixing = graph.mixing(12, 7, round)
        assert {i: sum(row.values()) for i, row in mixing.items()} == dict.fromkeys(range(12), 1)
        columns = {j: sum(mixing[i].get(j, 0) for i in range(12)) for j in range(12)}
        assert columns == dict.fromkeys(range(12), 1)
        symmetric = all(mixing[j].get(i) == w for i, row in mixing.items() for j, w in row.items())
        assert symmetric >= graph.symmetric
        assert {len(row.keys() - {i}) for i, row in mixing.items()} <= DEGREES[graph]
        assert (mixing == graph.mixing(12, 7, round + 1)) == graph.stays


def test_random_neighbours_are_a_function_of_the_seed_and_perhaps_of_the_round():
    drawn, kept = RandomGraph(4), RandomGraph(4, redraw=False)
    assert drawn.mixing(30, 1, 1) == drawn.mixing(30, 1, 1) != drawn.mixing(30, 1, 2)
    assert kept.mixing(30, 1, 1) == kept.mixing(30, 1, 2) != kept.mixing(30, 2, 1)


@pytest.mark.parametrize("push", [True, False])
def test_what_was_meant_for_one_who_is_away_stays(push):
    """On a directed graph a sender keeps it, or a receiver takes it from itself."""
    half = Fraction(1, 2)
    mixing = Exponential().mixing(4, 0, 1)  # i hears i + 1
    found = of_present(mixing, [0, 1, 3], push)
    if push:
        assert found == {0: {0: half, 1: half}, 1: {1: half}, 3: {0: half, 3: Fraction(1)}}
    else:
        assert found == {0: {0: half, 1: half}, 1: {1: Fraction(1)}, 3: {0: half, 3: half}}


def test_graphs_have_short_names():
    kinds = {
        "ring": Ring,
        "torus": Torus,
        "complete": Complete,
        "exponential": Exponential,
        "random": RandomGraph,
    }
    assert {name: type(Gossip(name).graph) for name in kinds} == kinds
    with refused("graph", "ring"):
        Gossip("circle")


BAD = {
    "prime": (Gossip(Torus()), "Torus of 7 peers", "Ring"),
    "degree": (Gossip(RandomGraph(7)), "degree 7", "6"),
    "groups": (Gossip(RandomGroups(7)), "groups 7", "3"),
    "edges": (Hierarchy(8), "groups 8 of 7", "7"),
    "places": (Moshpit(2, 2), "7 clients on 2^2", "side 3"),
    "no file": (Gossip(GraphFile("nowhere.txt")), "nowhere.txt", "name a text file"),
    "digits": (Gossip(GraphFile("digits.txt")), "digits.txt, line 1: 0 99", "0 3"),
    "pairs": (Gossip(RandomGraph(1, redraw=False)), "degree 1", "degree 2"),
    "words": (Gossip(GraphFile("words.txt")), "words.txt, line 2: 1 7", "0 3"),
    "apart": (Gossip(GraphFile("apart.txt")), "from peer 0 to 2", "edge"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_graphs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("0 1\n1 7\n")
    (tmp_path / "digits.txt").write_text("0 " + "9" * 5000)
    (tmp_path / "apart.txt").write_text("0 1\n2,3 # these\n3 4\n4 5\n5 6\n")
    topology, given, instead = BAD[name]
    with refused(given, instead):
        Exchange(topology, normal(7))


def test_a_moshpit_says_how_many_places_are_enough():
    """The smallest side: 5^2 places for 25; one client is no federation of peers, on any grid."""
    with refused("25 clients on 4^2", "side 5"):
        Exchange(Moshpit(4, 2), normal(25))
    with refused("of one client", "leave it out"):
        Exchange(Moshpit(), normal(1))
    with refused("dims 1000000000"):  # 4^dims has half a billion digits
        Moshpit(4, 1_000_000_000)
