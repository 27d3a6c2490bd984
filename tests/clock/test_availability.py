"""Clients that come and go: known answers, by hand and by an equation, and files of traces as untrusted input."""

from __future__ import annotations

import csv
import json
import math
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
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
from fl_lightning.clock.convert_traces import traces
from fl_lightning.clock.devices import Devices
from fl_lightning.clock.reach import Pool, Reach
from fl_lightning.conformance.toy import images
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import SCAFFOLD, FedAvg
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.sampling import ServerView, Uniform
from fl_lightning.wire import LedgerEntry


class Fixed(Devices):
    """Each client takes its own time, whatever it has to do."""

    def __init__(self, *times: float) -> None:
        self.times = times

    def seconds(self, seed: int, round: int, client: int, examples: int) -> float:
        return self.times[client % len(self.times)]


def trace(folder: Path, *spans: list[list[float]], length: float = 100.0) -> AvailabilityTrace:
    """The times online of client 0, of client 1 and so on, repeated every ``length`` seconds."""
    entries = {
        f"phone{k}": {"trace_start": 0, "trace_end": length, "ready_time": s} for k, s in enumerate(spans)
    }
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(entries))
    return AvailabilityTrace(str(path))


def trained(folder: Path, method=FedAvg, **settings):
    settings = {"participation": 1.0, "local_epochs": 1, "max_rounds": 4, **settings}
    return run(method(network=SMALL, optimizer=sgd(0.1)), images(), folder, **settings)


def rows(trainer, name: str) -> list[dict[str, str]]:
    with (trainer.run_dir / name).open() as file:
        return list(csv.DictReader(file))


def column(trainer, name: str) -> list[float]:
    return [float(row[name]) for row in rows(trainer, "metrics.csv")]


class Sees(Meter):
    """What the server and the clients have after each round."""

    def __init__(self) -> None:
        self.states, self.servers = [], []

    def on_round_end(self, record, context):
        self.states.append({id: dict(state) for id, state in context.states.items()})
        self.servers.append(dict(context.method.server))


def test_a_trace_with_one_interval_by_hand(tmp_path):
    """All are online from 10 to 40, of every 100 seconds, and take 12: the third round ends with nobody, and the
    fourth waits for the next lap."""
    clock, sees = Clock(devices=Fixed(12.0), availability=trace(tmp_path, [[10, 40]])), Sees()
    trainer = trained(tmp_path, SCAFFOLD, clock=clock, callbacks=[sees])
    assert column(trainer, "clock/seconds") == [22.0, 34.0, 40.0, 122.0]
    assert column(trainer, "clock/round_seconds") == [22.0, 12.0, 6.0, 82.0]
    assert column(trainer, "clock/idle") == [0.0] * 4
    assert column(trainer, "clients/offline") == [0, 0, 6, 0]
    assert {(r["round"], r["started"], r["ended"], r["status"]) for r in rows(trainer, "ledger.csv")} == {
        ("1", "10.0", "22.0", "trained"),
        ("2", "22.0", "34.0", "trained"),
        ("3", "34.0", "40.0", "lost"),
        ("4", "110.0", "122.0", "trained"),
    }
    kept = [{name: one[name].tolist() for name in one} for one in (sees.servers[1], sees.servers[2])]
    assert kept[0] == kept[1]
    assert all(
        torch.equal(sees.states[1][id][name], sees.states[2][id][name])
        for id in sees.states[1]
        for name in sees.states[1][id]
    )


def test_a_client_that_goes_offline_in_mid_upload(tmp_path):
    """It computes until 4 and sends 1000 bytes a second; at 6.5 it is gone: 2500 bytes are wasted, and what it
    was sent. Its state stays, as that of a client whose upload a stressor loses."""
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


class Loses(Stressor):
    """Loses the uploads of these clients by round, after they have trained."""

    def __init__(self, late: dict[int, set[int]]) -> None:
        self.late = late

    def change_upload(self, upload, *, client, round, context):
        return None if client.id in self.late.get(round, ()) else upload


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
    """Two of three are at work; client 1 is online until 1.5 and from 4 on, client 2 from 3 to 3.5."""
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


def test_always_is_neutral(tmp_path):
    clock = partial(Clock, devices=LogNormalDevices(), network=Lines(up=1e5))
    for n, rounds in enumerate((OverSelection(1.5), FedBuff(4, 2))):
        plain = trained(tmp_path / f"plain{n}", clock=clock(), rounds=rounds, participation=0.5)
        always = trained(
            tmp_path / f"always{n}", clock=clock(availability=Always()), rounds=rounds, participation=0.5
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
    """p' = rate (1 - p) - p / online, integrated by Heun's rule, against 20 000 clients, in 4 standard errors."""
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


def test_spans_of_a_trace_are_those_of_its_list(tmp_path):
    """Against a look at every interval of many laps, one by one."""
    random = np.random.default_rng(0)
    entries = {}
    for k in range(40):
        cuts = np.sort(random.integers(0, 50, 2 * (k % 5)))
        begin = int(random.integers(0, 300))
        entries[str(k)] = {
            "isSuccess": True,
            "trace_start": begin,
            "trace_end": begin + 50,
            "ready_time": (begin + cuts.reshape(-1, 2)).tolist(),
        }
    entries["whole"] = {"trace_start": 3, "trace_end": 53, "ready_time": [[3, 20], [20, 53]]}
    entries["broken"] = {"isSuccess": False, "trace_start": None, "trace_end": None, "ready_time": []}
    path = tmp_path / "many.json"
    path.write_text(json.dumps(entries))
    found = AvailabilityTrace(str(path))
    clients = np.arange(41)
    for at in (0.0, 17.5, 49.0, 50.0, 133.25, 400.0):
        start, end = found.spans(0, clients, at)
        for k, entry in enumerate(list(entries.values())[:41]):
            seconds = [
                t for lap in range(-8, 12) for s, e in entry["ready_time"] for t in np.arange(s, e) + 50 * lap
            ]
            on = {int(t) for t in seconds}
            assert (start[k] <= at) == (math.floor(at) in on)
            if not on:
                assert math.isinf(start[k])
                continue
            first = next(t for t in range(math.floor(at), math.floor(at) + 200) if t in on)
            assert max(start[k], at) == max(first, at)
            last = next((t for t in range(first, first + 200) if t not in on), math.inf)
            assert end[k] == last, (k, at)


def test_an_instant_is_the_same_number_whenever_it_is_asked_for(tmp_path):
    """Times that no float holds exactly: who comes online at an instant is there then, and at the end of its time
    online it is gone. Before, every second of these clients was still online for 1e-11 seconds, and was asked."""
    random = np.random.default_rng(0)
    for k in range(60):
        begin, length = random.random(2) * 1e5
        cuts = begin + length * np.sort(random.random(6)).reshape(3, 2)
        cuts[2, 1] = cuts[2, 1] if k % 2 else begin + length
        entry = {"trace_start": begin, "trace_end": begin + length, "ready_time": cuts.tolist()}
        (tmp_path / "one.json").write_text(json.dumps({"one": entry}))
        online = AvailabilityTrace(str(tmp_path / "one.json"))
        reach, at = Reach(Clock(devices=SameDevice(), availability=online), 0), 1e6 * random.random()
        for _ in range(6):
            there, when = reach.first_online(np.array([0]), at)
            assert there.tolist() == [0]
            (start,), (at,) = online.spans(0, np.array([0]), when)
            assert start <= when < at
            assert not len(reach.online([0], at)[0])


def test_traces_are_assigned_for_the_run(tmp_path):
    spans = [[[10 * k, 10 * k + 5]] for k in range(10)]
    path = trace(tmp_path, *spans).path
    order, drawn = (AvailabilityTrace(path, assign=one) for one in ("order", "random"))
    assert order.spans(0, np.array([3, 13, 23]), 0.0)[0].tolist() == [30.0] * 3
    few, many = drawn.spans(1, np.arange(5), 0.0)[0], drawn.spans(1, np.arange(3000), 0.0)[0]
    assert few.tolist() == many[:5].tolist()
    assert np.bincount((many // 10).astype(int)).min() > 200
    assert drawn.spans(2, np.arange(5), 0.0)[0].tolist() != few.tolist()


FEDSCALE = {
    3: {"duration": 70, "active": [10, 60], "inactive": [40, 100], "finish_time": 120, "model": "CPH1801"},
    7: {"duration": 30, "active": [90], "inactive": [10, 100], "finish_time": 120, "model": "x"},
    9: {"duration": 30, "active": [5, 110], "inactive": [10], "finish_time": 120, "model": "x"},
    11: {"duration": 0, "active": [], "inactive": [], "finish_time": 120, "model": "x"},
}


def test_fedscale_is_converted_to_either_form(tmp_path):
    (tmp_path / "client_behave_trace").write_bytes(pickle.dumps(FEDSCALE))
    for ending in ("json", "parquet"):
        traces(["convert", str(tmp_path / "client_behave_trace"), str(tmp_path / f"out.{ending}")])
    back = ["convert", str(tmp_path / "out.parquet"), str(tmp_path / "back.json")]
    traces(back)
    assert (tmp_path / "back.json").read_text() == (tmp_path / "out.json").read_text()
    assert [one["ready_time"] for one in json.loads((tmp_path / "out.json").read_text()).values()] == [
        [[10.0, 40.0], [60.0, 100.0]],
        [[0.0, 10.0], [90.0, 100.0]],
        [[5.0, 10.0], [110.0, 120.0]],
        [],
    ]
    for ending in ("json", "parquet"):
        start, end = AvailabilityTrace(str(tmp_path / f"out.{ending}")).spans(0, np.arange(4), 105.0)
        assert start.tolist() == [130.0, 120.0, 110.0, math.inf]
        assert end.tolist() == [160.0, 130.0, 120.0, math.inf]
    with refused("back.json", "--overwrite"):
        traces(back)


class Runs:
    """Unpickled by an unpickler without rules, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_runs_nothing(tmp_path):
    (tmp_path / "evil").write_bytes(pickle.dumps({1: {**FEDSCALE[3], "model": Runs(tmp_path / "made")}}))
    target = str(tmp_path / "out.json")
    with refused("evil"):
        traces(["convert", str(tmp_path / "evil"), target])
    assert not (tmp_path / "made").exists()
    for content in (b"", b"\x80\x04]\x94.", pickle.dumps({}), pickle.dumps({1: 2}), pickle.dumps({1: {}})):
        (tmp_path / "bad").write_bytes(content)
        with refused("bad"):
            traces(["convert", str(tmp_path / "bad"), target])
    for entry in (
        {"active": [1, 2], "inactive": [3]},
        {"active": [1], "inactive": [0.5, 2], "finish_time": "x"},
        {"active": ["1"], "inactive": [0.5, 2], "finish_time": 3},
    ):
        (tmp_path / "bad").write_bytes(pickle.dumps({"k": {"finish_time": 1, **entry}}))
        with refused("bad, k"):
            traces(["convert", str(tmp_path / "bad"), target])
    for words in (["convert"], ["show", "a", "b"], ["convert", "a", "b.txt"], ["convert", "none", target]):
        with refused(""):
            traces(words)
    assert not Path(target).exists()


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("", "bad.json"),
        ("[" * 100_000, "bad.json"),
        ("[]", "bad.json"),
        ("{}", "bad.json"),
        ('{"a": 3}', "bad.json, a"),
        ('{"a": {}}', "bad.json, a, ready_time"),
        ('{"a": {"ready_time": [[1, "2"]]}}', "bad.json, a, ready_time"),
        ('{"a": {"ready_time": [[1, NaN]]}}', "bad.json, a, ready_time"),
        ('{"a": {"ready_time": [[1, 2, 3]]}}', "bad.json, a, ready_time"),
        ('{"a": {"ready_time": [[3, 2]], "trace_end": 9}}', "ready_time [3, 2]"),
        ('{"a": {"ready_time": [[3, 20]], "trace_end": 9}}', "ready_time [3, 20]"),
        ('{"a": {"ready_time": [[3, 4]], "trace_start": 5, "trace_end": 9}}', "ready_time [3, 4]"),
        ('{"a": {"ready_time": [], "trace_start": 9, "trace_end": 9}}', "trace_start 9 and trace_end 9"),
        ('{"a": {"ready_time": [[0, 1e400]]}}', "bad.json, a, ready_time"),
        ('{"a": {"ready_time": []}}', "bad.json"),
        pytest.param(f'{{"a": {{"ready_time": [[0, {10**400}]]}}}}', "a, ready_time", id="huge"),
        ('{"a": {"ready_time": [], "trace_start": "x"}}', "trace_start x"),
        ('{"a": {"ready_time": [[0, 1]], "trace_start": -1e308, "trace_end": 1e308}}', "trace_start -1e+308"),
    ],
)
def test_a_file_that_is_none_of_traces_is_refused(tmp_path, text, given):
    (tmp_path / "bad.json").write_text(text)
    with refused(given):
        AvailabilityTrace(str(tmp_path / "bad.json"))


def test_other_files_are_refused(tmp_path, monkeypatch):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    for name in ("bad.parquet", "none.json"):
        with refused(name):
            AvailabilityTrace(str(tmp_path / name))
    found = trace(tmp_path, [[0, 1]])
    monkeypatch.setattr("fl_lightning.clock.traces.MAX_BYTES", 20)
    with refused(found.path):
        AvailabilityTrace(found.path)


def test_a_changed_file_is_noticed(tmp_path):
    """Of traces and of devices: their path alone does not say what they hold."""
    path = tmp_path / "phones.csv"
    for n, make in enumerate(
        (
            lambda: {"devices": DeviceTable(str(path))},
            lambda: {"devices": SameDevice(), "availability": AvailabilityTrace(str(tmp_path / "0.json"))},
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


def test_the_population_of_phones_is_what_its_script_makes(monkeypatch):
    """And a folder of one's own need not have it: it comes with the project."""
    script = ROOT / "benchmarks" / "phones.py"
    made = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert (ROOT / "configs" / "devices" / "phones.csv").read_text() == made
    monkeypatch.chdir(Path(__file__).parent)
    devices = DeviceTable("configs/devices/phones.csv")
    devices.check(list(range(1000)))
    assert len(devices.content_sha256) == 64


@pytest.mark.slow
@pytest.mark.essential
def test_few_of_many_are_drawn_as_from_those_that_are_online(tmp_path):
    """One by one, without a look at all: every one of the third that is online and free is as likely."""
    online = trace(tmp_path, [[0, 100]], [[5, 6]], [[7, 9]])
    reach, pool = Reach(Clock(devices=SameDevice(), availability=online), 0), Pool(np.arange(1500))
    busy, drawn, number = {0, 3, 100, 1499}, [], 0

    def draw(among, count, number):
        return Uniform().draw(ServerView(0, 1, number, np.ones(1500), rng.stream, dict), among, count)

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
