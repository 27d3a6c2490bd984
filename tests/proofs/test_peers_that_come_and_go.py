"""Peers that come and go in virtual time: a trace by hand, the total mean, and whoever executes the
run."""

from __future__ import annotations

import pytest
import torch
from clocked import Fixed, Loses, column, rows, trace
from ranked import result
from ten import make
from toy import run

from fl_lightning.clock import Clock, Diurnal, Lines, LogNormalDevices
from fl_lightning.conformance.toy import images
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.topology import Exponential, Gossip, Moshpit, Ring

ALWAYS = [[0, 100]]


def fit(folder, over, name="FedAvg", **settings):
    settings = {
        "max_rounds": 4,
        "workers": 1,
        "engine": "sequential",
        "participation": 1.0,
        **settings,
    }
    return run(make(name, weigh_by="clients"), images(), folder, topology=over, **settings)


def message(folder) -> int:
    """Bytes of an upload of FedAvg, by a run of one round."""
    (entry, *_) = rows(fit(folder, Gossip(Ring()), max_rounds=1), "ledger.csv")
    return int(entry["upload"]) // 2


def peers_of(trainer):
    return {
        name: tensor for name, tensor in trainer.method.server.items() if name.startswith("peer/")
    }


def test_a_ring_by_hand(tmp_path):
    """A message takes 1 second, steps 4. Peer 1 would be done at 8 and is online until 7: one of
    its two messages has left, both neighbours have sent it theirs, and hear one message each. It is
    back at 20, after two rounds more."""
    one = message(tmp_path / "size")
    online = trace(tmp_path, ALWAYS, [[0, 7], [20, 100]], *[ALWAYS] * 4)
    clock = Clock(devices=Fixed(4.0), network=Lines(down=one, up=one), availability=online)
    trainer = fit(tmp_path / "run", Gossip(Ring()), clock=clock)
    assert column(trainer, "clock/seconds") == [8.0, 16.0, 24.0, 32.0]
    assert column(trainer, "clients/offline") == [1, 0, 0, 0]
    assert column(trainer, "comm/wasted_download_bytes") == [2 * one, 0, 0, 0]
    found = [
        (
            r["status"],
            int(r["download"]) / one,
            int(r["upload"]) / one,
            int(r["wasted"]) / one,
            float(r["ended"]),
        )
        for r in rows(trainer, "ledger.csv")[:11]
    ]
    inner = ("trained", 2, 2, 0)
    assert found == [
        ("trained", 1, 2, 0, 7.0),
        ("lost", 2, 1, 1, 7.0),
        ("trained", 1, 2, 0, 7.0),
        *[(*inner, 8.0)] * 3,
        ("trained", 1, 1, 0, 14.0),
        ("trained", 1, 1, 0, 14.0),
        *[(*inner, 16.0)] * 3,
    ]
    assert [r["client"] for r in rows(trainer, "ledger.csv") if r["round"] in "23"] == [
        *"02345"
    ] * 2


@pytest.mark.parametrize("over", [Gossip(Ring()), Gossip(Exponential()), Moshpit(2, 3)])
def test_who_goes_in_mid_exchange_is_in_no_average_and_keeps_its_state(over, tmp_path):
    """The models are those of a run in which a stressor loses the same upload."""
    online = trace(tmp_path, ALWAYS, [[0, 4.5]], *[ALWAYS] * 4)
    clock = Clock(devices=Fixed(4.0), network=Lines(up=1000.0), availability=online)
    gone = fit(tmp_path / "gone", over, clock=clock, max_rounds=1)
    lost = fit(tmp_path / "lost", over, callbacks=[Loses({1: {1}})], max_rounds=1)
    assert column(gone, "clients/offline") == [1]
    (row,) = [row for row in rows(gone, "ledger.csv") if row["client"] == "1"]
    assert (row["status"], row["upload"], row["wasted"], row["ended"]) == (
        "lost",
        "500",
        "500",
        "4.5",
    )
    ours, theirs = peers_of(gone), peers_of(lost)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class Mean(Stressor, Meter):
    """The sum of m_i y_i before each exchange, of x_i for who is in none, and of m_i x_i after
    it."""

    def __init__(self) -> None:
        self.sent, self.before, self.sums, self.masses = {}, {}, [], []

    def change_upload(self, upload, *, client, round, context):
        self.sent[client.id] = upload.tensor("weights").double()
        return upload

    def on_round_end(self, record, context):
        nodes = context.aggregation.nodes
        after = {i: nodes.get(i, "weights").double() for i in nodes.ids}
        masses = {i: float(nodes.get(i, "mass")) for i in nodes.ids}
        used = {
            e.client
            for e in context.ledger.entries
            if (e.round, e.status) == (record.round, "trained")
        }
        if self.before:
            weights, old = self.before
            begin = sum(old[i] * (self.sent[i] if i in used else weights[i]) for i in nodes.ids)
            self.sums.append((begin, sum(masses[i] * after[i] for i in nodes.ids), len(used)))
        self.before, self.sent = (after, masses), {}
        self.masses.append(masses)


def test_weights_of_push_sum_keep_the_total_mean(tmp_path):
    clock = Clock(
        devices=LogNormalDevices(),
        network=Lines(down=1e5, up=1e5),
        availability=Diurnal(online=1.5, offline=1.0, day=4.0),
    )
    seen = Mean()
    trainer = fit(tmp_path, Gossip(Exponential()), clock=clock, callbacks=[seen], max_rounds=10)
    for begin, end, _ in seen.sums:
        torch.testing.assert_close(end, begin, rtol=0, atol=1e-5)
    assert len({used for *_, used in seen.sums}) > 2
    assert sum(column(trainer, "clients/offline")) > 0
    assert all(sum(one.values()) == pytest.approx(6) for one in seen.masses)
    assert min(seen.masses[-1].values()) < 0.9


FORMS = {
    "FedMPQKD over Moshpit": ("FedMPQKD", Moshpit(2, 3, averagings=2)),
    "QFedAvg over a ring": ("QFedAvg", Gossip(Ring())),
}


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("form", FORMS)
def test_workers_and_stops_change_nothing(form, tmp_path):
    name, over = FORMS[form]
    online = Diurnal(online=2.0, offline=1.0, day=4.0)
    settings = {
        "clock": Clock(
            devices=LogNormalDevices(), network=Lines(down=1e5, up=1e5), availability=online
        )
    }
    whole = fit(tmp_path / "one", over, name, **settings)
    assert sum(column(whole, "clients/offline")) > 0
    assert result(fit(tmp_path / "two", over, name, workers=2, **settings).run_dir) == result(
        whole.run_dir
    )
    first = fit(tmp_path / "half", over, name, **{**settings, "max_rounds": 1})
    for rounds in (3, 4):
        settings |= {"max_rounds": rounds, "ckpt_path": str(first.run_dir), "allow_changed": True}
        again = fit(tmp_path / "half", over, name, **settings)
    assert result(again.run_dir) == result(whole.run_dir)
