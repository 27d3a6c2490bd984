"""Who talks to whom, from end to end: neutral settings are bit for bit, and nothing of a run
depends on who executes it, or on how often it was stopped."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from clocked import Fixed, Loses
from outcomes import rows_of
from ranked import result
from refusals import refused
from ten import SMALL, make, same
from toy import run, sgd

from callbacks import ByzantineClients, StragglerDropout
from fl_lightning import evaluation
from fl_lightning.clock import Clock, Lines, OverSelection, SameDevice
from fl_lightning.conformance.toy import images
from fl_lightning.data import IID
from fl_lightning.errors import InputError
from fl_lightning.hooks import Stressor
from fl_lightning.methods import FedAvg, TrimmedMean
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.sampling import PowerOfChoice
from fl_lightning.topology import (
    Complete,
    Exponential,
    Gossip,
    GraphFile,
    Hierarchy,
    Moshpit,
    RandomGraph,
    Ring,
    Star,
    meter,
)
from fl_lightning.topology.nodes import Nodes
from fl_lightning.wire import Ledger

CODED = ["QFedAvg", "FedPQ"]
"""Methods whose uploads are updates."""


def fit(name, folder, over=None, **settings):
    """Three rounds of six unequal clients, in which some drop out."""
    settings = {"max_rounds": 3, "workers": 1, "engine": "sequential", **settings}
    own = {"weigh_by": settings.pop("weigh_by", "clients")}
    return run(make(name, **own), images(), folder, topology=over, **settings)


def late():
    """Drop-outs before training and after it."""
    return [StragglerDropout(0.2), StragglerDropout(0.4, mode="after")]


def shared(one, other):
    """Whether two servers have the same tensors, those of nodes aside."""
    names = [name for name in other if "/" not in name]
    return all(torch.equal(one[name], other[name]) for name in names)


@pytest.mark.parametrize("name", ["FedAvg", "FedNTD", "AQFL", "FedMPQKD"])
def test_a_complete_graph_is_a_server_bit_for_bit(name, tmp_path):
    star = fit(name, tmp_path / "star", Star())
    peers = fit(name, tmp_path / "peers", Gossip(Complete()))
    assert shared(peers.method.server, star.method.server)
    assert [row["test/accuracy"] for row in metrics(peers)] == [
        row["test/accuracy"] for row in metrics(star)
    ]
    assert {row["consensus/distance"] for row in metrics(peers)} == {"0.0"}


@pytest.mark.parametrize("name", ["FedAvg", "FedMPQKD", *CODED])
def test_edges_that_average_every_round_are_a_server_bit_for_bit(name, tmp_path):
    settings = {"weigh_by": "examples", "participation": 0.5, "callbacks": late()}
    star = fit(name, tmp_path / "star", **settings)
    tiers = fit(name, tmp_path / "tiers", Hierarchy(groups=3, every=1), **settings)
    assert shared(tiers.method.server, star.method.server)


def metrics(trainer):
    return rows_of(trainer.run_dir / "metrics.csv")


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


QUICK = ("FedMPQ over an exponential graph", "QFedAvg over edges")


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.essential] * (form in QUICK)) for form in FORMS]
)
def test_workers_and_stops_change_nothing(form, tmp_path):
    """One worker, two, and a run that was stopped after any round and continued; some of the
    clients drop out."""
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
def test_stacked_clients_leave_the_same(form, tmp_path, caplog):
    name, over = FORMS[form]
    one = fit(name, tmp_path / "one", over).method.server
    stacked = fit(name, tmp_path / "stack", over, engine="batched").method.server
    assert "one by one" not in caplog.text
    for key, tensor in one.items():
        torch.testing.assert_close(stacked[key], tensor, rtol=1e-3, atol=1e-4)


def test_a_run_goes_on_under_a_server_without_what_its_peers_knew(tmp_path):
    """From the mean model as if it had been loaded: updates are cut from it, and not from what
    peers knew of each other; the other way there is nothing for a node to begin with."""
    settings = {"folder": tmp_path, "allow_changed": True}
    first = fit("QFedAvg", over=Gossip(Ring()), max_rounds=2, **settings)
    assert {"public", "peer/0/public"} <= first.method.server.keys()
    settings |= {"ckpt_path": str(first.run_dir), "max_rounds": 3}
    star = fit("QFedAvg", over=Star(), **settings).method
    assert star.server.keys() == {"weights"}
    with refused("--ckpt_path", "--trainer.topology"):
        fit("QFedAvg", over=Hierarchy(2), **settings)


def test_a_run_goes_on_with_the_same_file_of_edges_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 3\n3 4\n4 5\n")
    settings = {
        "over": Gossip(GraphFile("edges.txt")),
        "folder": tmp_path / "runs",
        "max_rounds": 1,
    }
    first = fit("FedAvg", **settings)
    edges.write_text(edges.read_text() + "0 5\n")
    settings |= {"ckpt_path": str(first.run_dir)}
    with refused("--ckpt_path", "same"):
        fit("FedAvg", **settings)
    edges.write_text("1 0 # the same\n1 2\n2 3\n3 4\n4 5\n")
    fit("FedAvg", **settings)


def test_a_refused_upload_was_sent_and_heard_and_is_in_no_average(tmp_path):
    class Breaks(Stressor):
        """What client 2 sends is not finite."""

        def change_upload(self, upload, *, client, round, context):
            weights = upload.tensor("weights")
            return type(upload)(
                {**upload, "weights": weights * float("nan" if client.id == 2 else 1)}
            )

    trainer = fit("FedAvg", tmp_path, Gossip(Ring()), callbacks=[Breaks()], max_rounds=1)
    server = trainer.method.server
    assert all(torch.isfinite(server[f"peer/{id}/weights"]).all() for id in range(6))
    entries = Ledger.from_csv((trainer.run_dir / "ledger.csv").read_text()).entries
    one = entries[5].upload // 2
    assert [(e.status, e.upload // one, e.download // one, e.wasted // one) for e in entries] == [
        ("trained", 2, 2, 0),
        ("trained", 1, 2, 0),
        ("rejected", 2, 0, 2),
        ("trained", 1, 2, 0),
        ("trained", 2, 2, 0),
        ("trained", 2, 2, 0),
    ]


def test_peers_take_virtual_time_by_what_they_send_and_receive(tmp_path):
    """A round lasts as long as the peer that takes longest: latency, bytes down, examples, bytes
    up."""
    clock = Clock(devices=SameDevice(0.01), network=Lines(down=2e6, up=1e6, latency=0.25))
    trainer = fit("FedMPQ", tmp_path, Gossip(Ring()), clock=clock, max_rounds=1)
    took = []
    for entry in Ledger.from_csv((trainer.run_dir / "ledger.csv").read_text()).entries:
        examples = 2 * max(len(trainer.data.client(entry.client).train), 2)
        took.append(0.25 + entry.download / 2e6 + 0.01 * examples + entry.upload / 1e6)
        assert entry.ended == pytest.approx(took[-1])
    assert float(metrics(trainer)[0]["clock/seconds"]) == pytest.approx(max(took))


def test_sums_of_edges_take_virtual_time_in_rounds_in_which_edges_meet(tmp_path):
    """Clients 0 to 2 of edge 0 take 1, 2 and 3 seconds, those of edge 1 take 4, 5 and 9, but 9's
    upload is lost. A sum takes 2 seconds up and the model 0.5 down, 0.25 are for the round trip: 5
    + 2 + 0.25 + 0.5."""
    settings = {"callbacks": [Loses({1: {5}, 2: {5}})], "weigh_by": "examples", "max_rounds": 2}
    plain = fit(
        "FedAvg",
        tmp_path / "plain",
        Hierarchy(2),
        clock=Clock(devices=Fixed(1, 2, 3, 4, 5, 9)),
        **settings,
    )
    entries = Ledger.from_csv((plain.run_dir / "ledger.csv").read_text()).entries
    up, down = entries[-1].upload, entries[-1].download
    lines = Lines(up=up / 2, down=down / 0.5, latency=0.25)
    clock = Clock(devices=Fixed(1, 2, 3, 4, 5, 9), edges=lines)
    timed = fit("FedAvg", tmp_path / "timed", Hierarchy(2), clock=clock, **settings)
    assert [row["clock/seconds"] for row in metrics(plain)] == ["5.0", "10.0"]
    assert [row["clock/seconds"] for row in metrics(timed)] == ["5.0", "12.75"]
    found = Ledger.from_csv((timed.run_dir / "ledger.csv").read_text()).entries
    assert [(e.client, e.started, e.ended) for e in found[-2:]] == [
        (-1, 8.0, 12.75),
        (-2, 10.0, 12.75),
    ]
    assert [replace(e, started=None, ended=None) for e in found[-2:]] == entries[-2:]
    assert found[:-2] == entries[:-2]
    assert shared(timed.method.server, plain.method.server)


def test_lines_of_edges_need_edges(tmp_path):
    clock = Clock(devices=SameDevice(), edges=Lines(up=1e6))
    with refused("--trainer.clock.edges with --trainer.topology Gossip", "Hierarchy"):
        fit("FedAvg", tmp_path, Gossip(Ring()), clock=clock)
    with refused("--trainer.clock.edges with --trainer.topology Star", "Hierarchy"):
        fit("FedAvg", tmp_path, clock=clock)


@pytest.mark.parametrize(("over", "models"), [(Moshpit(2, 2), 2), (Gossip(Complete()), 1)])
def test_peers_with_equal_models_are_evaluated_once(over, models, tmp_path, monkeypatch):
    """Whether they have made them each by itself, or have them from a checkpoint."""
    seen = []

    def of_network(*given):
        seen.append(given)
        return evaluation.of_network(*given)

    monkeypatch.setattr(
        meter, "evaluation", SimpleNamespace(share=enumerate, of_network=of_network)
    )
    data = {"num_clients": 4, "partition": IID()}
    settings = {"topology": over, "workers": 1, "engine": "sequential", "allow_changed": True}
    for rounds, path in ((1, None), (2, "last")):
        method = make("FedAvg", weigh_by="clients")
        run(method, images(**data), tmp_path, max_rounds=rounds, ckpt_path=path, **settings)
        assert len(seen) == models * rounds


def test_the_mean_model_and_every_peers_are_evaluated(tmp_path):
    trainer = fit("FedMPQ", tmp_path, Gossip(Ring()), eval_every=2)
    first, last = metrics(trainer)[0], metrics(trainer)[-1]
    assert not first["peers/accuracy"]
    assert first["consensus/distance"]
    method, nodes = trainer.method, Nodes.__new__(Nodes)
    nodes.method, nodes.kind = method, "peer"
    nodes.names = [name for name in method.server if "/" not in name]
    found = []
    for id in range(6):
        with nodes.at(nodes.of(id)):
            found.append(evaluation.of_network(trainer.fabric, method.deploy(), trainer.data))
    for name, worst in (("accuracy", min), ("loss", max)):
        values = [one[name] for one in found]
        assert float(last[f"peers/{name}"]) == pytest.approx(sum(values) / 6)
        assert float(last[f"peers/{name}_worst"]) == worst(values)
    assert len({one["loss"] for one in found}) == 6
    weights = (
        torch.stack([method.server[f"peer/{id}/weights"] for id in range(6)])
        .double()
        .mean(0)
        .float()
    )
    assert torch.equal(method.server["weights"], weights)
    distance = sum(
        (method.server[f"peer/{id}/weights"] - weights)[: method.trained_values]
        .double()
        .square()
        .sum()
        for id in range(6)
    )
    assert float(last["consensus/distance"]) == pytest.approx(float(distance) / 6)


AVERAGE = {"average": TrimmedMean(0.2)}
REFUSED = {
    "masks": ({"secure_sum": SecureSum(0.67)}, {}, "trainer.secure_sum"),
    "noise": (
        {"privacy": ClientPrivacy(noise_multiplier=1.0, clip_norm=1.0)},
        {},
        "trainer.privacy",
    ),
    "late": (
        {"rounds": OverSelection(1.5), "clock": Clock(devices=SameDevice())},
        {},
        "--trainer.rounds OverSelection",
    ),
    "losses": ({"sampler": PowerOfChoice(3)}, {}, "--trainer.topology"),
    "knowing": ({"callbacks": [ByzantineClients(0.2, "alie")]}, {}, "ByzantineClients"),
    "compared": ({}, AVERAGE, "--model.average TrimmedMean"),
    "kept": ({}, {"personal": "head"}, "--model FedAvg"),
    "weighed": ({}, {"weigh_by": "examples"}, "--model.weigh_by examples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_peers(case, tmp_path):
    trainer, method, given = REFUSED[case]
    method = FedAvg(**{"network": SMALL, "optimizer": sgd(0.1), "weigh_by": "clients", **method})
    for over in (Gossip(Ring()), Moshpit(2, 3), Hierarchy(2)):
        if case == "weighed" and not over.has_peers:
            continue
        with pytest.raises(InputError) as caught:
            run(method, images(), tmp_path, topology=over, **trainer)
        assert f"--trainer.topology {type(over).__name__}" in caught.value.given
        assert given in caught.value.given
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "name", ["SCAFFOLD", "FedAdam", "FedKD", "FedDyn", "FedBN", "LocalOnly", "FedNova"]
)
def test_methods_that_need_one_server(name, tmp_path):
    with refused(f"--trainer.topology Hierarchy with --model {name}", "FedMPQKD"):
        fit(
            name,
            tmp_path,
            Hierarchy(2),
            weigh_by="clients" if name in ("SCAFFOLD", "FedDyn") else "examples",
        )


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("over", [Moshpit(2, 3), Gossip(Exponential()), Gossip(RandomGraph(2))])
def test_updates_are_not_coded_for_peers_that_change(name, over, tmp_path):
    with refused(f"--model {name}", "Ring"):
        fit(name, tmp_path, over)
