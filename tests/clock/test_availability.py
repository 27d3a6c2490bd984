"""Clients that come and go: known answers, by hand and by an equation, and whoever executes the
run."""

from __future__ import annotations

import csv
import json
import math
import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from clocked import Fixed, Loses, column, rows, trace
from places import ROOT
from ranked import result
from refusals import refused
from ten import SMALL
from toy import run, sgd

from fl_lightning import rng
from fl_lightning.clock import (
    Always,
    AvailabilityTrace,
    Clock,
    Deadline,
    DeviceTable,
    Diurnal,
    FedBuff,
    Lines,
    LogNormalDevices,
    OverSelection,
    SameDevice,
    Synchronous,
)
from fl_lightning.clock.reach import Pool, Reach
from fl_lightning.conformance.toy import images
from fl_lightning.errors import RunStopped
from fl_lightning.hooks import Meter
from fl_lightning.methods import SCAFFOLD, FedAvg
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.sampling import ServerView, Uniform
from fl_lightning.wire import LedgerEntry


def trained(folder: Path, method=FedAvg, **settings):
    settings = {"participation": 1.0, "local_epochs": 1, "max_rounds": 4, **settings}
    return run(method(network=SMALL, optimizer=sgd(0.1)), images(), folder, **settings)


class Sees(Meter):
    """What the server and the clients have after each round."""

    def __init__(self) -> None:
        self.states, self.servers = [], []

    def on_round_end(self, record, context):
        self.states.append({id: dict(state) for id, state in context.states.items()})
        self.servers.append(dict(context.method.server))


def test_a_trace_with_one_interval_by_hand(tmp_path):
    """All are online from 10 to 40, of every 100 seconds, and take 12: the third round ends with
    nobody, and the fourth waits for the next lap."""
    clock, sees = Clock(devices=Fixed(12.0), availability=trace(tmp_path, [[10, 40]])), Sees()
    trainer = trained(tmp_path, SCAFFOLD, clock=clock, callbacks=[sees])
    assert column(trainer, "clock/seconds") == [22.0, 34.0, 40.0, 122.0]
    assert column(trainer, "clock/round_seconds") == [22.0, 12.0, 6.0, 82.0]
    assert column(trainer, "clock/idle") == [0.0] * 4
    assert column(trainer, "clients/offline") == [0, 0, 6, 0]
    assert {
        (r["round"], r["started"], r["ended"], r["status"]) for r in rows(trainer, "ledger.csv")
    } == {
        ("1", "10.0", "22.0", "trained"),
        ("2", "22.0", "34.0", "trained"),
        ("3", "34.0", "40.0", "lost"),
        ("4", "110.0", "122.0", "trained"),
    }
    kept = [
        {name: one[name].tolist() for name in one} for one in (sees.servers[1], sees.servers[2])
    ]
    assert kept[0] == kept[1]
    assert all(
        torch.equal(sees.states[1][id][name], sees.states[2][id][name])
        for id in sees.states[1]
        for name in sees.states[1][id]
    )


def test_a_client_that_goes_offline_in_mid_upload(tmp_path):
    """It computes until 4 and sends 1000 bytes a second; at 6.5 it is gone: 2500 bytes are wasted,
    and what it was sent. Its state stays, as that of a client whose upload a stressor loses."""
    always = [[0, 100]]
    online = trace(tmp_path, always, [[0, 6.5]], *[always] * 4)
    clock = Clock(devices=Fixed(4.0), network=Lines(up=1000.0), availability=online)
    cut, loses = Sees(), Sees()
    trainer = trained(tmp_path / "cut", SCAFFOLD, clock=clock, callbacks=[cut], max_rounds=1)
    (row,) = [row for row in rows(trainer, "ledger.csv") if row["client"] == "1"]
    assert (row["status"], row["upload"], row["wasted"]) == ("lost", "2500", "2500")
    assert (row["started"], row["ended"]) == ("0.0", "6.5")
    assert column(trainer, "comm/wasted_download_bytes") == [int(row["download"])]
    trained(tmp_path / "loses", SCAFFOLD, callbacks=[Loses({1: {1}}), loses], max_rounds=1)
    assert cut.states[0].keys() == loses.states[0].keys() == {0, 2, 3, 4, 5}
    for name, tensor in loses.servers[0].items():
        assert torch.equal(cut.servers[0][name], tensor)


def test_an_upload_that_arrives_at_the_very_end_has_arrived(tmp_path):
    reach = Reach(Clock(devices=SameDevice(), availability=trace(tmp_path, [[5, 20], [20, 30]])), 0)
    entry = LedgerEntry(1, 0, "trained", 7, 9, started=6.0, ended=30.0)
    assert reach.lost(entry) is None
    assert reach.lost(replace(entry, ended=30.25)) == replace(
        entry, status="lost", upload=0, wasted=0, ended=30.0
    )
    assert reach.first_online(np.array([0]), 29.75)[1] == 29.75
    assert reach.first_online(np.array([0]), 30.0)[1] == 105.0


def end_of_round(tmp_path: Path, rounds, **settings) -> tuple[float, dict[str, str]]:
    """Client k takes k + 1 seconds; client 1 is online until 1.5, and client 5 comes at 3."""
    always = [[0, 100]]
    online = trace(tmp_path, always, [[0, 1.5]], always, always, always, [[3, 100]])
    clock = Clock(devices=Fixed(1, 2, 3, 4, 5, 6), availability=online)
    trainer = trained(tmp_path / "run", clock=clock, rounds=rounds, max_rounds=1, **settings)
    return column(trainer, "clock/seconds")[0], {
        row["client"]: row["status"] for row in rows(trainer, "ledger.csv")
    }


def test_every_form_of_a_round_loses_who_goes_and_asks_nobody_who_is_not_there(tmp_path):
    seconds, statuses = end_of_round(tmp_path, Synchronous())
    rest = {"0": "trained", "1": "lost", "2": "trained", "3": "trained", "4": "trained"}
    assert (seconds, statuses) == (5.0, rest)
    # three are wanted and all that are online are asked: the third that returns is client 3
    seconds, statuses = end_of_round(tmp_path, OverSelection(2.0), participation=0.5)
    assert (seconds, statuses) == (4.0, {**rest, "4": "lost"})
    # nobody tells the server that client 1 has gone
    seconds, statuses = end_of_round(tmp_path, Deadline(4.5))
    assert (seconds, statuses) == (4.5, {**rest, "4": "lost"})
    seconds, statuses = end_of_round(tmp_path, Deadline(math.inf))
    assert (seconds, statuses) == (5.0, rest)


def test_asynchronous_rounds_by_hand(tmp_path):
    """Two of three are at work; client 1 is online until 1.5 and from 4 on, client 2 from 3 to
    3.5."""
    online = trace(tmp_path, [[0, 100]], [[0, 1.5], [4, 100]], [[3, 3.5]])
    clock = Clock(devices=Fixed(2.0, 2.0, 1.0), availability=online)
    data = partial(images, num_clients=3, partition=images().partition.__class__(60, 60))
    trainer = run(
        FedAvg(network=SMALL, optimizer=sgd(0.1)),
        data(),
        tmp_path,
        local_epochs=1,
        max_rounds=4,
        clock=clock,
        rounds=FedBuff(2, 1),
    )
    found = [
        (row["round"], row["client"], row["started"], row["ended"], row["status"])
        for row in rows(trainer, "ledger.csv")
    ]
    assert found == [
        ("1", "1", "0.0", "1.5", "lost"),
        ("1", "0", "0.0", "2.0", "trained"),
        ("2", "2", "3.0", "3.5", "lost"),
        ("2", "0", "2.0", "4.0", "trained"),
        ("3", "0", "4.0", "6.0", "trained"),
        ("4", "1", "4.0", "6.0", "trained"),
    ]
    assert column(trainer, "clients/offline") == [1, 1, 0, 0]
    assert column(trainer, "clients/staleness") == [0, 0, 0, 1]


@pytest.mark.parametrize("rounds", [Synchronous(), FedBuff(4, 2)], ids=["together", "versions"])
def test_a_run_stops_once_nobody_comes_back(tmp_path, rounds):
    """All are gone at 5, when each has made two exchanges of two seconds at most."""
    clock = Clock(devices=Fixed(2.0), availability=GoesForGood())
    with refused("nobody is online", "another availability", RunStopped):
        trained(tmp_path, clock=clock, rounds=rounds, max_rounds=20)
    with next(tmp_path.rglob("ledger.csv")).open() as file:
        found = {row["ended"] for row in csv.DictReader(file)}
    assert found == {"2.0", "4.0", "5.0"}


class GoesForGood(Always):
    """Everybody goes offline for good after 5 seconds."""

    def spans(self, seed, clients, at):
        start, end = super().spans(seed, clients, at)
        end[:] = 5.0
        start[end <= at] = end[end <= at] = np.inf
        return start, end


class Leaves(Always):
    """Client 1 goes offline for good after 1.5 seconds."""

    def spans(self, seed, clients, at):
        start, end = super().spans(seed, clients, at)
        end[clients == 1] = 1.5
        start[end <= at] = end[end <= at] = np.inf
        return start, end


def test_a_subclass_of_always_says_who_goes(tmp_path):
    clock = Clock(devices=Fixed(1, 2, 3, 4, 5, 6), availability=Leaves())
    trainer = trained(tmp_path, clock=clock, max_rounds=1)
    lost = [row["client"] for row in rows(trainer, "ledger.csv") if row["status"] == "lost"]
    assert lost == ["1"]
    assert type("Renamed", (Always,), {}).is_always


def test_always_is_neutral(tmp_path):
    clock = partial(Clock, devices=LogNormalDevices(), network=Lines(up=1e5))
    for n, rounds in enumerate((OverSelection(1.5), FedBuff(4, 2))):
        plain = trained(tmp_path / f"plain{n}", clock=clock(), rounds=rounds, participation=0.5)
        always = trained(
            tmp_path / f"always{n}",
            clock=clock(availability=Always()),
            rounds=rounds,
            participation=0.5,
        )
        assert result(plain.run_dir) == result(always.run_dir)


@pytest.mark.parametrize("rounds", [Deadline(0.4), FedBuff(4, 2)], ids=["deadline", "asynchronous"])
def test_nothing_but_the_seed_decides(tmp_path, rounds):
    """Not workers, nor an end in between; days are a few seconds long."""

    def settings() -> dict[str, object]:
        online = Diurnal(online=1.0, offline=1.0, amplitude=0.9, zones=2, day=4.0)
        clock = Clock(devices=LogNormalDevices(), network=Lines(up=1e5), availability=online)
        return {"clock": clock, "rounds": rounds, "max_rounds": 6}

    one = trained(tmp_path / "one", **settings())
    assert sum(column(one, "clients/offline")) > 0
    assert len({row["client"] for row in rows(one, "ledger.csv")}) > 3
    assert result(trained(tmp_path / "two", workers=2, **settings()).run_dir) == result(one.run_dir)
    half = trained(tmp_path / "half", **{**settings(), "max_rounds": 3})
    trained(tmp_path / "half", ckpt_path=str(half.run_dir), allow_changed=True, **settings())
    assert result(half.run_dir) == result(one.run_dir)


@pytest.mark.parametrize(("amplitude", "zones"), [(0.0, 24), (1.0, 1), (0.8, 2)])
def test_the_share_that_is_online_follows_its_equation(amplitude, zones):
    """p' = rate (1 - p) - p / online, integrated by Heun's rule, against 20 000 clients, in 4
    standard errors."""
    law = Diurnal(online=100.0, offline=250.0, amplitude=amplitude, zones=zones, day=1000.0)
    count, step = 20_000, 0.5
    zone, p = np.arange(zones) / zones, np.full(zones, 100 / 350)

    def slope(t: float, p: np.ndarray) -> np.ndarray:
        rate = (1 + amplitude * np.sin(2 * np.pi * (t / 1000 + zone))) / 250
        return rate * (1 - p) - p / 100

    for n in range(round(2000 / step)):
        if n * step in (0, 130, 480, 750, 1250, 1990):
            start, _ = law.spans(3, np.arange(count), n * step)
            share = (start <= n * step).mean()
            expected = p.mean()
            assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / count)
        here = slope(n * step, p)
        p = p + step / 2 * (here + slope((n + 1) * step, p + step * here))


def test_a_diurnal_client_is_the_same_among_any_others_and_asked_in_any_order():
    law, times = Diurnal(online=50, offline=70, day=200), [0.0, 90.0, 91.0, 700.0, 5000.0]
    alone = [[x.item() for x in law.spans(1, np.array([7]), at)] for at in times]
    for at, one in reversed(list(zip(times, alone, strict=True))):
        start, end = Diurnal(online=50, offline=70, day=200).spans(1, np.arange(500), at)
        again = law.spans(1, np.arange(50), at)
        assert [start[7], end[7]] == one == [again[0][7], again[1][7]]
        assert end[7] > at


def test_few_diurnal_clients_are_the_same_as_all(monkeypatch):
    """One by one, at times at which all the others have come and gone since anybody looked at
    them."""
    law, random, at, looks = (
        Diurnal(online=50, offline=70, day=200),
        np.random.default_rng(0),
        0.0,
        [],
    )
    counted = Diurnal.returns
    monkeypatch.setattr(Diurnal, "returns", lambda *given: looks.append(1) or counted(*given))
    asked = []
    for _ in range(300):
        at += random.exponential(1.0)
        who = random.integers(0, 400, random.integers(1, 4))
        asked.append((at, who, law.spans(1, who, at)))
    few = len(looks)
    for at, who, (start, end) in asked[::10]:
        every = Diurnal(online=50, offline=70, day=200).spans(1, np.arange(400), at)
        assert (start.tolist(), end.tolist()) == (every[0][who].tolist(), every[1][who].tolist())
    assert few < 150, "all are looked at from time to time alone"


def test_a_changed_file_is_noticed(tmp_path):
    """Of traces and of devices: their path alone does not say what they hold."""
    path = tmp_path / "phones.csv"
    for n, make in enumerate(
        (
            lambda: {"devices": DeviceTable(str(path))},
            lambda: {
                "devices": SameDevice(),
                "availability": AvailabilityTrace(str(tmp_path / "0.json")),
            },
        )
    ):
        table = "client,seconds_per_example\n" + "".join(f"{k},0.1\n" for k in range(6))
        path.write_text(table)
        (tmp_path / "0.json").write_text('{"a": {"ready_time": [[0, 50]]}}')
        first = trained(tmp_path / str(n), clock=Clock(**make()), max_rounds=2)
        metadata = json.loads((first.run_dir / "metadata.json").read_text())
        assert len(metadata["clock_sha256"]) == 64
        where = {"ckpt_path": str(first.run_dir), "max_rounds": 2}
        trained(tmp_path / str(n), clock=Clock(**make()), **where)
        path.write_text(table.replace("0.1", "0.2"))
        (tmp_path / "0.json").write_text('{"a": {"ready_time": [[0, 51]]}}')
        with refused("--ckpt_path"):
            trained(tmp_path / str(n), clock=Clock(**make()), **where)


@pytest.mark.parametrize(
    "settings",
    [{"secure_sum": SecureSum()}, {"privacy": ClientPrivacy(noise_multiplier=1.0, clip_norm=1.0)}],
    ids=["under masks", "private"],
)
def test_what_does_not_go_together(tmp_path, settings):
    with refused("--trainer.clock.availability Diurnal"):
        trained(
            tmp_path,
            partial(FedAvg, weigh_by="clients"),
            clock=Clock(devices=SameDevice(), availability=Diurnal()),
            **settings,
        )
    with refused("for 1 clients"):
        trace(tmp_path, [], [[0, 1]]).check(0, np.array([0]))


def test_the_population_of_phones_is_what_its_script_makes(monkeypatch, capsys):
    """And a folder of one's own need not have it: it comes with the project."""
    monkeypatch.setattr(sys, "argv", ["phones.py"])
    runpy.run_path(str(ROOT / "benchmarks" / "phones.py"), run_name="__main__")
    assert (ROOT / "configs" / "devices" / "phones.csv").read_text() == capsys.readouterr().out
    monkeypatch.chdir(Path(__file__).parent)
    devices = DeviceTable("configs/devices/phones.csv")
    devices.check(list(range(1000)))
    assert len(devices.content_sha256) == 64


@pytest.mark.slow
@pytest.mark.essential
def test_few_of_many_are_drawn_as_from_those_that_are_online(tmp_path):
    """One by one, without a look at all: every one of the third that is online and free is as
    likely."""
    online = trace(tmp_path, [[0, 100]], [[5, 6]], [[7, 9]])
    reach, pool = Reach(Clock(devices=SameDevice(), availability=online), 0), Pool(np.arange(1500))
    busy, drawn, number = {0, 3, 100, 1499}, [], 0

    def draw(among, count, number):
        return Uniform().draw(
            ServerView(0, 1, number, np.ones(1500), rng.stream, dict), among, count
        )

    while len(drawn) < 20_000:
        found, number, _ = reach.draw_online(pool.without(busy), 2, 1.0, draw, number)
        assert len({*found}) == 2
        drawn += found
    assert number < 4 * len(drawn), "no more than some tries each"
    counts = np.bincount(drawn, minlength=1500)
    free = [k for k in range(0, 1500, 3) if k not in busy]
    assert counts.sum() == counts[free].sum()
    expected = len(drawn) / len(free)
    chi = ((counts[free] - expected) ** 2 / expected).sum()
    assert abs(chi - len(free)) < 4 * math.sqrt(2 * len(free))
    few = Pool(np.array([2, 5, 9, 11])).without({5, 6, 11})
    assert (len(few), few.ids.tolist(), few[np.array([1, 0])].tolist()) == (2, [2, 9], [9, 2])
    found, _, later = reach.draw_online(Pool(np.array([1, 2])), 1, 1.0, draw, 0)
    assert (found, later) == ([], 5.0)
