"""Steps that are recorded and played again are the eager steps, bit for bit; what cannot be recorded is
trained eagerly and said."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from lightning.fabric import Fabric
from scaffold import Scaffold
from tape import Tapes
from ten import SETTINGS, TEN
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from toy import sgd

from fl_lightning import methods, rng
from fl_lightning.conformance.toy import images
from fl_lightning.engines import ClientTask, SequentialEngine
from fl_lightning.engines.cuda import graphs, kinds
from fl_lightning.engines.cuda.graphs import RecordedSteps
from fl_lightning.engines.cuda.recorders import Rerun
from fl_lightning.engines.steps import Steps
from fl_lightning.loop import Payload
from fl_lightning.methods import FedAvg, Method
from fl_lightning.models import SmallCNN

pytestmark = [pytest.mark.slow, pytest.mark.essential]  # of code that is opt-in until a card has run it

NORMED = partial(SmallCNN, width=4, norm="batch")
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "Nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "fused AdamW": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
}


def make(name: str, **settings) -> Method:
    return getattr(methods, name)(
        **{"network": NORMED, "optimizer": MOMENTUM, **SETTINGS.get(name, {}), **settings}
    )


def rounds(method: Method, recorder=None, *, count: int = 2, after: int = 1, epochs: int = 2):
    """Results of two rounds of six unequal clients, one with a single example, what clients keep, and the
    server's end."""
    fabric = Fabric(accelerator="cpu", devices=1)
    data = images()
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    with rng.torch_stream(0, "weights"):
        method.build(data)
    steps = RecordedSteps(fabric, method, recorder, after) if recorder else Steps(fabric, method)
    engine, states, results = SequentialEngine(fabric, method, data, steps), {}, []
    for round in range(1, count + 1):
        method.round = round
        clients = [data.client(id, dict(states.get(id, {}))) for id in range(6)]
        orders = [
            ClientTask(
                c, round, method.broadcast(c).to_bytes(), data.labels(c), epochs, data.num_steps(c, epochs)
            )
            for c in clients
        ]
        done = list(engine.train(orders))
        states = {result.client.id: result.state for result in done}
        results += done
        method.aggregate({result.client.id: Payload.from_bytes(result.upload) for result in done})
    return results, method.server, steps


def assert_same(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        assert a.upload == b.upload
        assert (a.losses, list(a.losses), a.steps) == (b.losses, list(b.losses), b.steps)
        assert a.state.keys() == b.state.keys()
        assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("name", TEN)
def test_played_steps_are_the_eager_ones(name):
    recorder = Tapes()
    settings = {} if name == "FedMosaic" else {"network": NORMED}
    expected, found = rounds(make(name, **settings)), rounds(make(name, **settings), recorder)
    assert_same(expected, found)
    assert recorder.recorded >= 3
    assert recorder.played > 12 + recorder.recorded  # 16s of five clients, in two epochs and rounds


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["FedAvg", "FedMPQKD"])
def test_zeros_are_a_fresh_state_of_every_optimiser(name, optimizer):
    """Those that count their steps on the host can be done again, but neither a tape nor a card can record
    them."""
    settings = {"optimizer": OPTIMIZERS[optimizer]}
    expected = rounds(make(name, **settings))
    for recorder in (Rerun(), Tapes()):
        found = rounds(make(name, **settings), recorder)
        assert_same(expected, found)
        on_host = isinstance(recorder, Tapes) and optimizer in ("AdamW", "amsgrad")
        assert bool(found[2].said) == on_host
    assert on_host or recorder.played > recorder.recorded > 0


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_played_steps_are_clipped_at_the_learning_rate_of_their_round(algorithm):
    """A recording holds both for ever, so another learning rate is another kind of client."""

    def scaffold():
        method = Scaffold(network=NORMED, optimizer=sgd(0.05), scheduler=partial(ExponentialLR, gamma=0.5))
        method.gradient_clip_val, method.gradient_clip_algorithm = 0.1, algorithm
        return method

    recorder = Tapes()
    expected, found = rounds(scaffold()), rounds(scaffold(), recorder)
    assert_same(expected, found)
    assert not found[2].said
    assert recorder.played > recorder.recorded > 0
    assert len(found[2].kinds) == 2


class Remembers(FedAvg):
    """Replaces a buffer in every step, and keeps on the client the very tensor that it received."""

    stackable = True

    def build(self, data):
        super().build(data)
        self.register_buffer("mean_loss", torch.zeros(()))
        self.register_buffer("start", torch.zeros(1))

    def receive(self, message, client):
        super().receive(message, client)
        self.mean_loss = torch.zeros(())
        self.start = message.tensor("weights")[:3] * (client.id + 1)
        client.state["start"] = self.start

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        self.mean_loss = 0.9 * self.mean_loss + 0.1 * outputs["loss"].detach()
        return {**outputs, "loss": outputs["loss"] + self.mean_loss * self.start.sum()}

    def upload(self, client):
        client.state["mean_loss"] = self.mean_loss
        return super().upload(client)


def test_tensors_that_are_replaced_and_kept():
    recorder = Tapes()
    expected, found = rounds(Remembers(network=NORMED)), rounds(Remembers(network=NORMED), recorder)
    assert_same(expected, found)
    assert recorder.played > recorder.recorded > 0
    assert len({float(result.state["mean_loss"]) for result in found[0]}) == 12


@pytest.mark.parametrize("kept", [1, 2])
def test_more_kinds_than_are_kept(kept, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_KINDS", kept)
    name, recorder = "AQFL", Tapes()
    assert_same(rounds(make(name)), rounds(make(name), recorder))
    assert recorder.recorded > 0


def test_a_form_that_is_rare_is_not_recorded():
    recorder = Tapes()
    _, _, steps = rounds(make("FedAvg"), recorder, after=5)
    (kind,) = steps.kinds.values()
    assert {form for form, times in kind.times.items() if times > 5} == set(kind.recordings)
    assert len(kind.times) > len(kind.recordings) == recorder.recorded > 0


class Dropped(nn.Sequential):
    def __init__(self, classes):
        super().__init__(nn.Flatten(), nn.Linear(768, 8), nn.Dropout(0.5), nn.Linear(8, classes))


class Counts(FedAvg):
    stackable = True

    def receive(self, message, client):
        super().receive(message, client)
        self.tau = 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.tau += 1


class Lists(FedAvg):
    stackable = True

    def build(self, data):
        super().build(data)
        self.network.seen = []

    def training_step(self, batch, batch_idx=0):
        self.network.seen.append(batch_idx)
        return super().training_step(batch, batch_idx)


class Hides(FedAvg):
    stackable = True

    def receive(self, message, client):
        super().receive(message, client)
        self.start = message.tensor("weights").clone()


class Decays(FedAvg):
    stackable = True

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * 0.9**batch_idx}


class Warms(FedAvg):
    stackable = True

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * min(1.0, self.round / 5)}


class Waits(FedAvg):
    stackable = True

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * (2.0 if outputs["loss"].item() > 1 else 1.0)}


class Plain(FedAvg):
    pass


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (lambda: Plain(network=NORMED), "Plain does not say that it is stackable"),
        (lambda: FedAvg(network=Dropped), "draws random numbers"),
        (lambda: Counts(network=NORMED), "replaced between two steps"),
        (lambda: Lists(network=NORMED), "a step sets 'seen'"),
        (lambda: Hides(network=NORMED), "receive sets 'start'"),
        (lambda: Decays(network=NORMED), "the number of the step"),
        (lambda: Warms(network=NORMED), "the number of the round"),
        (lambda: Waits(network=NORMED), "waits for the device"),
        (lambda: make("FedMPQKD", teacher=2), "the number of the step"),
        (lambda: FedAvg(network=NORMED, optimizer=partial(torch.optim.RMSprop, lr=1e-3)), "RMSprop"),
        (
            lambda: FedAvg(
                network=NORMED, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
            ),
            "SGD",
        ),
    ],
    ids=[
        "unknown",
        "dropout",
        "counts",
        "lists",
        "hides",
        "step",
        "round",
        "waits",
        "teacher",
        "RMSprop",
        "dampening",
    ],
)
def test_what_cannot_be_recorded_is_trained_eagerly_and_said_once(method, reason, caplog):
    expected = rounds(method())
    with caplog.at_level(logging.INFO, "fl_lightning"):
        found = rounds(method(), Tapes())
    assert_same(expected, found)
    assert caplog.text.count("not recorded") == 1
    assert reason in caplog.text
    seen = getattr(found[2].method.network, "seen", None)
    assert seen is None or len(seen) == sum(result.steps for result in found[0])


class Faulty(Tapes):
    """Plays wrongly: one layer moves too far."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def record(self, work, pool=None):
        play, pool = super().record(work, pool)
        return lambda: (play(), self.weight().data.add_(1e-6)), pool


def test_a_recording_that_does_something_else_is_not_used(caplog):
    method = make("FedAvg")
    recorder = Faulty(lambda: next(method.parameters()))
    with caplog.at_level(logging.INFO, "fl_lightning"):
        found = rounds(method, recorder)
    assert_same(rounds(make("FedAvg")), found)
    assert recorder.played == recorder.recorded == 1
    assert caplog.text.count("does not do what the step does") == 1


class Fails(Tapes):
    def record(self, work, pool=None):
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def test_a_capture_that_fails_leaves_no_trace(caplog):
    with caplog.at_level(logging.INFO, "fl_lightning"):
        assert_same(rounds(make("FedMPQKD")), rounds(make("FedMPQKD"), Fails()))
    assert caplog.text.count("operation not permitted") == 1


def test_where_steps_do_not_repeat_themselves_they_are_compared_within_rounding():
    one = torch.tensor([1.0, -3.0, torch.nan])
    assert graphs.near(one, one + 2e-4)
    assert not graphs.near(one, one + 4e-4)
    assert not graphs.same(one, one + 1e-6)
    assert graphs.same(one, one.clone())


def test_numbers_on_the_host_are_part_of_the_kind(monkeypatch):
    """A card would keep the first client's."""
    method = make("FedAvg")
    rounds(method, count=1)
    method.register_buffer("factor", torch.tensor(1.0))
    optimizer = method.configure_optimizers()
    one = kinds.client_form(method, optimizer)
    method.factor = torch.tensor(2.0)
    assert kinds.client_form(method, optimizer) == one
    monkeypatch.setattr(type(method), "device", torch.device("cuda"))
    two = kinds.client_form(method, optimizer)
    method.factor = torch.tensor(3.0)
    assert kinds.client_form(method, optimizer) != two
