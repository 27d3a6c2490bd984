"""Files of traces: what they say of a client's times online, and that they are untrusted input."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from clocked import trace
from refusals import refused

from fl_lightning.clock import AvailabilityTrace, Clock, SameDevice
from fl_lightning.clock import traces as traces_module
from fl_lightning.clock.convert_traces import traces
from fl_lightning.clock.reach import Reach


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
    entries["broken"] = {
        "isSuccess": False,
        "trace_start": None,
        "trace_end": None,
        "ready_time": [],
    }
    path = tmp_path / "many.json"
    path.write_text(json.dumps(entries))
    found = AvailabilityTrace(str(path))
    clients = np.arange(41)
    for at in (0.0, 17.5, 49.0, 50.0, 133.25, 400.0):
        start, end = found.spans(0, clients, at)
        for k, entry in enumerate(list(entries.values())[:41]):
            seconds = [
                t
                for lap in range(-8, 12)
                for s, e in entry["ready_time"]
                for t in np.arange(s, e) + 50 * lap
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
    """Times that no float holds exactly: who comes online at an instant is there then, and at the
    end of its time online it is gone. Before, every second of these clients was still online for
    1e-11 seconds, and was asked."""
    random = np.random.default_rng(0)
    for k in range(60):
        begin, length = random.random(2) * 1e5
        cuts = begin + length * np.sort(random.random(6)).reshape(3, 2)
        cuts[2, 1] = cuts[2, 1] if k % 2 else begin + length
        entry = {"trace_start": begin, "trace_end": begin + length, "ready_time": cuts.tolist()}
        (tmp_path / "one.json").write_text(json.dumps({"one": entry}))
        online = AvailabilityTrace(str(tmp_path / "one.json"))
        reach, at = (
            Reach(Clock(devices=SameDevice(), availability=online), 0),
            1e6 * random.random(),
        )
        for _ in range(6):
            there, when = reach.first_online(np.array([0]), at)
            assert there.tolist() == [0]
            (start,), (at,) = online.spans(0, np.array([0]), when)
            assert start <= when < at
            assert not len(reach.online([0], at)[0])


def test_traces_are_assigned_for_the_run(tmp_path, monkeypatch):
    spans = [[[10 * k, 10 * k + 5]] for k in range(10)]
    path = trace(tmp_path, *spans).path
    order, drawn = (AvailabilityTrace(path, assign=one) for one in ("order", "random"))
    assert order.spans(0, np.array([3, 13, 23]), 0.0)[0].tolist() == [30.0] * 3
    few, many = drawn.spans(1, np.arange(5), 0.0)[0], drawn.spans(1, np.arange(3000), 0.0)[0]
    assert few.tolist() == many[:5].tolist()
    assert np.bincount((many // 10).astype(int)).min() > 200
    assert drawn.spans(2, np.arange(5), 0.0)[0].tolist() != few.tolist()
    counted = Mock(wraps=traces_module.stream)
    monkeypatch.setattr(traces_module, "stream", counted)
    for who in ([2999], [0, 7], *([k] for k in range(5))):
        assert drawn.spans(1, np.array(who), 0.0)[0].tolist() == many[who].tolist()
    assert counted.call_count == 1


FEDSCALE = {
    3: {
        "duration": 70,
        "active": [10, 60],
        "inactive": [40, 100],
        "finish_time": 120,
        "model": "CPH1801",
    },
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
    assert [
        one["ready_time"] for one in json.loads((tmp_path / "out.json").read_text()).values()
    ] == [
        [[10.0, 40.0], [60.0, 100.0]],
        [[0.0, 10.0], [90.0, 100.0]],
        [[5.0, 10.0], [110.0, 120.0]],
        [],
    ]
    for ending in ("json", "parquet"):
        start, end = AvailabilityTrace(str(tmp_path / f"out.{ending}")).spans(
            0, np.arange(4), 105.0
        )
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
    (tmp_path / "evil").write_bytes(
        pickle.dumps({1: {**FEDSCALE[3], "model": Runs(tmp_path / "made")}})
    )
    target = str(tmp_path / "out.json")
    with refused("evil"):
        traces(["convert", str(tmp_path / "evil"), target])
    assert not (tmp_path / "made").exists()
    for content in (
        b"",
        b"\x80\x04]\x94.",
        pickle.dumps({}),
        pickle.dumps({1: 2}),
        pickle.dumps({1: {}}),
    ):
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
    for words in (
        ["convert"],
        ["show", "a", "b"],
        ["convert", "none", target],
    ):
        with refused(""):
            traces(words)
    with refused("b.txt", "traces.json"):
        traces(["convert", str(tmp_path / "bad"), "b.txt"])
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
        (
            '{"a": {"ready_time": [], "trace_start": 9, "trace_end": 9}}',
            "trace_start 9 and trace_end 9",
        ),
        ('{"a": {"ready_time": [[0, 1e400]]}}', "bad.json, a, ready_time"),
        ('{"a": {"ready_time": []}}', "bad.json"),
        pytest.param(f'{{"a": {{"ready_time": [[0, {10**400}]]}}}}', "a, ready_time", id="huge"),
        ('{"a": {"ready_time": [], "trace_start": "x"}}', "trace_start x"),
        (
            '{"a": {"ready_time": [[0, 1]], "trace_start": -1e308, "trace_end": 1e308}}',
            "trace_start -1e+308",
        ),
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
