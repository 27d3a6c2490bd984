"""What a deployment measures of its clients' lines, by hand."""

from __future__ import annotations

import math

import pytest

from fl_lightning.clock import Clock, DeviceTable, Lines, Synchronous
from fl_lightning.deploy.node.node import Node
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.deploy.server import wall_clock
from fl_lightning.deploy.server.wall_clock import Measured, Probe, WallTiming
from fl_lightning.wire import LedgerEntry

ENTRY = LedgerEntry(1, 4, "trained", 100, 50)


def test_a_round_is_latency_bytes_down_computing_and_bytes_up():
    """6 s: 0.5 of latency, 100 bytes down at the 50 bytes a second of the probe, 2 of computing,
    and 1.5 are left."""
    found = Measured.of(ENTRY, 10, 6.0, 2.0, Probe(0.5, 1.0, 50))
    assert found == Measured(0.2, 50.0, pytest.approx(50 / 1.5), 0.5)


@pytest.mark.parametrize("line", [None, Probe(0.5, 2.0, 50), Probe(0.5, -0.1, 50)])
def test_one_rate_where_a_probe_is_missing_or_does_not_fit(line):
    """Of the second the bytes down alone would take as long as the round; the third was faster than
    an empty one."""
    assert Measured.of(ENTRY, 10, 6.0, 2.0, line) == Measured(0.2, 37.5, 37.5, 0.0)


def test_latency_is_of_empty_orders_and_the_rate_of_one_as_large_as_the_rounds(monkeypatch):
    """The first empty order waits for a look of a node that looks rarely by then; node b answers
    nothing, and is not waited for again."""
    seconds, time, asked = iter([5.0, 0.3, 0.1, 2.3]), [10.0], []
    monkeypatch.setattr(wall_clock, "now", lambda: time[0])

    def exchange(orders, limit):
        asked.append(
            {node: len(Message.from_bytes(data).parts[0]) for node, data in orders.items()}
        )
        assert limit == 7.0
        time[0] += next(seconds)
        yield "a", Message({"kind": "echoed"})

    timing = WallTiming(Synchronous())
    timing.devices[9] = Measured(1.0, 1.0, 1.0)
    orders = {"a": (4, bytes(2**20)), "b": (5, bytes(1000)), "known": (9, bytes(10))}
    timing.measure_lines(orders, exchange, 7.0)
    assert asked == [{"a": 0, "b": 0}, {"a": 0}, {"a": 0}, {"a": 2**18}]
    assert timing.lines == {4: Probe(pytest.approx(0.3), pytest.approx(2.0), 2**18)}
    timing.devices[4] = timing.devices[5] = timing.devices[9]
    timing.measure_lines(orders, exchange, 7.0)
    assert len(asked) == 4


def test_an_echo_has_nothing_in_it():
    node = Node.__new__(Node)
    node.about = {"name": "n"}
    answer = Message.from_bytes(node.answer(Message({"kind": "echo"}, (bytes(1000),)).to_bytes()))
    assert (answer.kind, answer.parts) == ("echoed", ())


def test_a_table_may_have_latencies_and_else_they_are_the_networks(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("client,seconds_per_example,down,up,latency\n0,0.5,100,50,0.25\n")
    network = Lines(latency=3.0)
    took = {}
    for name in ("own", "network"):
        clock = Clock(devices=DeviceTable(str(path)), network=network)
        took[name] = clock.seconds(0, 1, 0, examples=4, down=100, up=100)
        path.write_text("client,seconds_per_example,down,up\n0,0.5,100,50\n")
    assert took == {"own": 0.25 + 1 + 2 + 2, "network": 3.0 + 1 + 2 + 2}


def test_what_earlier_runs_measured_is_read():
    timing = WallTiming(Synchronous())
    timing.devices[4] = Measured(0.2, 50.0, 25.0, 0.5)
    again = WallTiming(Synchronous())
    again.load_state_dict(timing.state_dict())
    assert again.devices == timing.devices
    again.load_state_dict({"now": 1.0, "devices": {"3": [0.5, 7.0]}})
    assert again.devices == {3: Measured(0.5, 7.0, 7.0)}
    assert math.isclose(again.now, 1.0)
