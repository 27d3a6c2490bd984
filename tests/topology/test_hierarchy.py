"""Edge servers: their means by hand, who starts from what, and both links in the ledger."""

from __future__ import annotations

import pytest
import torch
from peers import Exchange, normal

from fl_lightning.methods import FedAvg
from fl_lightning.topology import Hierarchy
from fl_lightning.wire import Payload

EXAMPLES = (3, 1, 2, 5, 4)
EDGES = ((0, 1, 2), (3, 4))
"""Five clients in two blocks."""


def mean(vectors, ids):
    weights = torch.tensor([EXAMPLES[id] for id in ids]).double()
    return ((weights[:, None] * vectors[list(ids)].double()).sum(0) / weights.sum()).float()


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_edges_average_their_clients_and_every_third_round_each_other():
    """Weights are n_k of those that returned; between their averages the cloud's model is the mean
    of the edges' by all their examples."""
    tiers = Exchange(Hierarchy(groups=2, every=3), torch.zeros(2, 50), EXAMPLES)
    for round, away in enumerate([(), (1,), (4,)], 1):
        sent = normal(5, seed=round)
        there = [[id for id in ids if id not in away] for ids in EDGES]
        metrics, entries = tiers.exchange(away=away, local=sent)
        if round < 3:
            wanted = torch.stack([mean(sent, ids) for ids in there])
            near(tiers.vectors, wanted)
            all_examples = torch.tensor([6.0, 9.0])
            cloud = (all_examples[:, None] * wanted).sum(0) / 15
            assert len(entries) == 5
        else:
            cloud = mean(sent, [*there[0], *there[1]])
            near(tiers.vectors, cloud.expand(2, -1))
        near(tiers.method.server["weights"], cloud)
        distance = (tiers.vectors - tiers.method.server["weights"]).square().sum(1).mean()
        assert metrics["consensus/distance"] == pytest.approx(float(distance), rel=1e-6)


def test_an_edge_that_nobody_answers_keeps_its_model_until_the_edges_meet():
    start = normal(2)
    tiers = Exchange(Hierarchy(groups=2, every=2), start, EXAMPLES)
    sent = normal(5, seed=3)
    tiers.exchange(away=EDGES[1], local=sent)
    near(tiers.vectors, torch.stack([mean(sent, EDGES[0]), start[1]]))
    _, entries = tiers.exchange(away=EDGES[1], local=sent)
    near(tiers.vectors, mean(sent, EDGES[0]).expand(2, -1))
    (first, second) = entries[5:]
    assert (first.client, first.status, second.client) == (-1, "edge", -2)
    assert first.upload > 0
    assert second.upload == 0


def test_edges_that_meet_and_cannot_make_a_model_keep_their_own(monkeypatch):
    made = FedAvg.next_state

    def blown(method, sums):
        made(method, sums)
        method.server["weights"] = method.server["weights"] * torch.inf

    start = normal(2)
    tiers = Exchange(Hierarchy(groups=2, every=1), start, EXAMPLES)
    monkeypatch.setattr(FedAvg, "next_state", blown)
    _, entries = tiers.exchange(local=normal(5, seed=3))
    near(tiers.vectors, start)
    assert {entry.status for entry in entries if entry.client >= 0} == {"lost"}
    assert all(edge.upload > 0 and edge.download == 0 for edge in entries[5:])


def test_both_links_are_in_the_ledger():
    """Up go exact sums, 8 bytes a value and the sum of weights; down the state of the cloud."""
    tiers = Exchange(Hierarchy(groups=2, every=1), torch.zeros(2, 50), EXAMPLES)
    _, entries = tiers.exchange(local=normal(5))
    up = Payload({"weights": torch.zeros(51, dtype=torch.int64)}).nbytes
    down = Payload({"weights": torch.zeros(50)}).nbytes
    assert [(e.round, e.client, e.upload, e.download) for e in entries[5:]] == [
        (1, -1, up, down),
        (1, -2, up, down),
    ]
