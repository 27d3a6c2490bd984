"""On their streams no seat is at what another one uses, and no teacher at what its student does; streams that
do not wait are noticed."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from seated import RECORDERS, Federation, OneModule, network
from streams import Card
from test_graphs import TEN, assert_same, make

from fl_lightning.engines import SequentialEngine
from fl_lightning.engines.cuda import graphs, recorders, seats
from fl_lightning.engines.cuda.recorders import CudaGraphs
from fl_lightning.engines.cuda.seats import SeatsEngine
from fl_lightning.engines.cuda.side_stream import SideStream
from fl_lightning.methods import FedAvg

pytestmark = [pytest.mark.slow, pytest.mark.essential]


class Carries(FedAvg):
    """Keeps a tensor where it was made, without a look at it, and takes up the one before, which then nobody
    holds."""

    stackable = True

    def build(self, data):
        super().build(data)
        self.register_buffer("moved", torch.zeros(()))

    def receive(self, message, client):
        super().receive(message, client)
        self.moved = client.state.pop("moved", torch.zeros(())) + 1

    def upload(self, client):
        client.state["moved"] = self.moved * self.network(torch.ones(2, 3, 16, 16)).sum()
        return super().upload(client)


def built(name, **settings):
    return (Carries if name == "Carries" else partial(make, name))(**network(name), **settings)


def on_streams(name, monkeypatch, recorder=None, engine=SeatsEngine, epochs=2, stream=None, **settings):
    card = Card(monkeypatch)
    monkeypatch.setattr(graphs, "wait_for", lambda device: card.synchronize())
    with card:
        method = built(name, **settings)
        if stream is not None:
            method.teacher_stream = stream()
        seated = Federation(method, engine, recorder, epochs=epochs, make_stream=seats.CudaStream)
        found = seated.rounds()
    return card, found


@pytest.mark.parametrize("name", [*TEN, "Carries"])
def test_no_seat_is_at_what_another_uses(name, monkeypatch):
    expected = Federation(built(name), SequentialEngine).rounds()
    for recorder in ("eager", "rerun"):
        card, found = on_streams(name, monkeypatch, RECORDERS[recorder])
        assert card.races == []
        trained = [
            stream for stream, names in card.operations.items() if any("backward" in name for name in names)
        ]
        assert len({*trained} - {card.default}) == 3
        assert card.default not in trained or name == "FedKD"  # whose server trains
        assert_same(expected, found)


def test_the_card_sees_memory_that_is_given_away_while_it_is_read(monkeypatch):
    for waits in (False, True):
        with Card(monkeypatch) as card:
            maker, reader = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(maker):
                tensor = torch.ones(3)
            reader.wait_stream(maker)
            with torch.cuda.stream(reader):
                tensor.sum()
            del tensor
            if waits:
                maker.wait_stream(reader)
            with torch.cuda.stream(maker):
                torch.ones(3)
        assert bool(card.races) == (not waits)


class NeverWaits(seats.CudaStream):
    @contextmanager
    def current(self):
        with torch.cuda.stream(self.stream):
            yield


class NeverEnds(seats.CudaStream):
    def synchronize(self):
        pass


class LetsGo(seats.Seat):
    """Of what the client kept, when the client does."""

    def begin(self, order):
        super().begin(order)
        self.held = [order]


@pytest.mark.parametrize(
    ("name", "broken"), [("CudaStream", NeverWaits), ("CudaStream", NeverEnds), ("Seat", LetsGo)]
)
def test_a_seat_that_does_not_wait_or_hold_is_noticed(name, broken, monkeypatch):
    monkeypatch.setattr(seats, name, broken)
    assert on_streams("Carries", monkeypatch)[0].races


def test_seats_that_share_a_module_are_noticed(monkeypatch):
    assert on_streams("FedAvg", monkeypatch, engine=OneModule)[0].races


TEACHERS = {
    "before": {},
    "refreshed": {"teacher": 2},
    "one epoch": {"epochs": 1},
    "joint": {"teacher": "joint"},
}


@pytest.mark.parametrize("recorder", ["eager", "rerun"])
@pytest.mark.parametrize("teacher", TEACHERS)
def test_the_teacher_on_a_stream_of_its_own(teacher, recorder, monkeypatch):
    """Three seats have six streams then; but for the joint teacher, which is trained."""
    epochs = TEACHERS[teacher].get("epochs", 2)
    settings = {name: value for name, value in TEACHERS[teacher].items() if name != "epochs"}
    expected = Federation(make("FedMPQKD", **settings), SequentialEngine, epochs=epochs).rounds()
    card, found = on_streams(
        "FedMPQKD", monkeypatch, RECORDERS[recorder], epochs=epochs, stream=SideStream, **settings
    )
    assert card.races == []
    assert_same(expected, found)
    del card.operations[card.default]
    convolved = [names for names in card.operations.values() if any("convolution" in name for name in names)]
    beside = [names for names in convolved if not any("backward" in name for name in names)]
    assert len(convolved) == (3 if teacher == "joint" else 6)
    assert len(beside) == (0 if teacher == "joint" else 3)


class NoFork(SideStream):
    @contextmanager
    def fork(self, device):
        self.stream = self.stream or torch.cuda.Stream(device)
        done = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            yield lambda: torch.cuda.current_stream(device).wait_event(done)
            done.record()


class NoJoin(SideStream):
    @contextmanager
    def fork(self, device):
        with super().fork(device):
            yield lambda: None


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("stream", [NoFork, NoJoin])
def test_a_teacher_that_does_not_wait_or_is_not_waited_for_is_noticed(stream, epochs, monkeypatch):
    assert on_streams("FedMPQKD", monkeypatch, epochs=epochs, stream=stream)[0].races


def test_recordings_of_two_seats_share_no_stream_and_those_of_one_die_together(monkeypatch):
    """The calls that a capture is made of; the capture itself needs a card."""
    card, captured, died = Card(monkeypatch), [], []

    class Graph:
        replay, pool = staticmethod(lambda: None), staticmethod(lambda: "pool")

        def __init__(self):
            self.reset = lambda: died.append(self)

    @contextmanager
    def capture(graph, pool, stream):
        captured.append((graph, pool, stream))
        with torch.cuda.stream(stream):
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: card.synchronize())
    monkeypatch.setattr(recorders, "no_synchronisation", nullcontext)
    weight, one, other = (
        torch.ones(3),
        CudaGraphs(torch.device("cuda", 0)),
        CudaGraphs(torch.device("cuda", 0)),
    )
    with card:
        for recorder, pool in ((one, None), (other, None), (one, "pool")):
            recorder.record(lambda: weight.mul_(2), pool)
    assert card.races == []
    assert [pool for _, pool, _ in captured] == [None, None, "pool"]
    streams = [stream for _, _, stream in captured]
    assert streams[0] is streams[2] is not streams[1]
    one.forget()
    assert died == [captured[0][0], captured[2][0]]
