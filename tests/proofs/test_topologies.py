"""Who talks to whom, from end to end: neutral settings are bit for bit, and nothing of a run depends on who executes
it, or on how often it was stopped."""

from __future__ import annotations

import csv

import pytest
import torch
from ranked import result
from ten import make, same
from toy import run

from callbacks import StragglerDropout
from fl_lightning.conformance.toy import images
from fl_lightning.topology import Complete, Exponential, Gossip, Hierarchy, Moshpit, RandomGraph, Ring, Star

OVER_EDGES = ["FedAvg", "FedProx", "FedNTD", "AQFL", "FedMPQ", "FedMPQKD"]
"""Methods whose uploads say the weights by themselves."""
CODED = ["QFedAvg", "FedPQ"]
"""Methods whose uploads are updates."""


def fit(name, folder, over=None, **settings):
    """Three rounds of six unequal clients, in which some drop out."""
    settings = {"max_rounds": 3, "workers": 1, "engine": "sequential", **settings}
    own = {"weigh_by": settings.pop("weigh_by", "clients")}
    return run(make(name, **own), images(), folder, topology=over, **settings)


def late(share=0.4):
    """Drop-outs before training and after it."""
    return [StragglerDropout(share)]


def shared(one, other):
    """Whether two servers have the same tensors, those of nodes aside."""
    names = [name for name in other if "/" not in name]
    return all(torch.equal(one[name], other[name]) for name in names)


@pytest.mark.parametrize("name", OVER_EDGES)
def test_a_complete_graph_is_a_server_bit_for_bit(name, tmp_path):
    star = fit(name, tmp_path / "star", Star())
    peers = fit(name, tmp_path / "peers", Gossip(Complete()))
    assert shared(peers.method.server, star.method.server)
    assert [row["test/accuracy"] for row in metrics(peers)] == [row["test/accuracy"] for row in metrics(star)]
    assert {row["consensus/distance"] for row in metrics(peers)} == {"0.0"}


@pytest.mark.parametrize("name", [*OVER_EDGES, *CODED])
def test_edges_that_average_every_round_are_a_server_bit_for_bit(name, tmp_path):
    settings = {"weigh_by": "examples", "participation": 0.5, "callbacks": late()}
    star = fit(name, tmp_path / "star", **settings)
    tiers = fit(name, tmp_path / "tiers", Hierarchy(groups=3, every=1), **settings)
    assert shared(tiers.method.server, star.method.server)


def metrics(trainer):
    with (trainer.run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_star_is_what_there_was_before(tmp_path):
    one, star = fit("FedMPQKD", tmp_path / "one"), fit("FedMPQKD", tmp_path / "star", Star())
    assert same(one.method.server, star.method.server)
    assert result(one.run_dir) == result(star.run_dir)


FORMS = {
    "FedMPQKD over Moshpit": ("FedMPQKD", Moshpit(side=2, dims=3)),
    "FedMPQ over an exponential graph": ("FedMPQ", Gossip(Exponential())),
    "QFedAvg over a ring": ("QFedAvg", Gossip(Ring())),
    "FedAvg over a random graph": ("FedAvg", Gossip(RandomGraph(3))),
    "QFedAvg over edges": ("QFedAvg", Hierarchy(groups=2, every=2)),
    "FedMPQKD over edges": ("FedMPQKD", Hierarchy(groups=3, every=3)),
}


@pytest.mark.parametrize("form", FORMS)
def test_workers_and_stops_change_nothing(form, tmp_path):
    """One worker, two, and a run that was stopped after any round and continued; some of the clients drop out."""
    name, over = FORMS[form]
    settings = {"callbacks": late(), "max_rounds": 4}
    whole = result(fit(name, tmp_path / "one", over, **settings).run_dir)
    assert result(fit(name, tmp_path / "two", over, workers=2, **settings).run_dir) == whole
    first = fit(name, tmp_path / "half", over, **{**settings, "max_rounds": 1})
    for rounds in (3, 4):
        settings |= {"max_rounds": rounds, "ckpt_path": str(first.run_dir), "allow_changed": True}
        again = fit(name, tmp_path / "half", over, **settings)
    assert result(again.run_dir) == whole


@pytest.mark.parametrize("form", ["FedMPQKD over Moshpit", "QFedAvg over edges"])
def test_stacked_clients_leave_the_same(form, tmp_path):
    name, over = FORMS[form]
    one = fit(name, tmp_path / "one", over).method.server
    stacked = fit(name, tmp_path / "stack", over, engine="batched").method.server
    for key, tensor in one.items():
        torch.testing.assert_close(stacked[key], tensor, rtol=1e-3, atol=1e-4)
