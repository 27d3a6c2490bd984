"""Seats change no bit of what one client after another gives.

Three seats; cohorts of 2 (fewer than seats), 4 and 5 (no multiple of them) of 6 clients, so that a client
comes to another seat each time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from seated import COHORTS, RECORDERS, Federation, OneModule, network
from test_graphs import NORMED, TEN, Dropped, Remembers, assert_same, make

from fl_lightning.engines import SequentialEngine, check_workers, choice, make_engine
from fl_lightning.engines.cuda.seats import SeatsEngine
from fl_lightning.engines.steps import Steps
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg
from fl_lightning.methods.teaching import InTurn

pytestmark = [pytest.mark.slow, pytest.mark.essential]


@pytest.mark.parametrize("name", TEN)
def test_three_seats_are_one(name):
    expected = Federation(make(name, **network(name)), SequentialEngine).rounds()
    for recorder, record in RECORDERS.items():
        seated = Federation(make(name, **network(name)), SeatsEngine, record)
        assert_same(expected, seated.rounds())
        assert len(seated.engine.seats) == 3
        if recorder == "tapes":
            assert all(tapes.played > tapes.recorded > 0 for tapes in seated.recorders)


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize(
    "method", [partial(FedAvg, network=Dropped), partial(Remembers, network=NORMED), partial(make, "FedMPQKD", teacher=2)],
    ids=["dropout", "kept", "teacher"],
)  # fmt: skip
def test_steps_that_cannot_be_recorded_and_tensors_that_are_kept(method, recorder):
    expected = Federation(method(), SequentialEngine).rounds()
    assert_same(expected, Federation(method(), SeatsEngine, RECORDERS[recorder]).rounds())


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_precision(precision):
    def fabric():
        made = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        if precision == "16-mixed":  # Fabric's own is for a card
            scaler = torch.amp.GradScaler("cpu")
            made._precision = made.strategy._precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
            assert made.strategy.precision.scaler is scaler
        return made

    class Large(FedAvg):
        """In 16 bits its gradients overflow until the scale has come down, for each client anew."""

        def training_step(self, batch, batch_idx=0):
            outputs = super().training_step(batch, batch_idx)
            return {**outputs, "loss": 300 * outputs["loss"]}

    method, made = partial(Large, network=NORMED, optimizer=partial(torch.optim.SGD, lr=1e-4)), fabric()
    expected = Federation(method(), SequentialEngine, fabric=made).rounds()
    assert (
        precision == "bf16-mixed"
        or made.strategy.precision.scaler.get_scale() < torch.amp.GradScaler("cpu").get_scale()
    )
    assert_same(expected, Federation(method(), SeatsEngine, fabric=fabric()).rounds())


class SeatOrder(SeatsEngine):
    """Hands out what is left in the order of the seats."""

    def train(self, orders, units=None):
        results, count = list(super().train(orders, units)), len(orders)
        left = range(max(0, count - self.size), count)
        yield from [*results[: left[0]], *(results[at] for at in sorted(left, key=lambda at: at % self.size))]


class OldRound(SeatsEngine):
    def train(self, orders, units=None):
        for seat in self.seats:
            seat.begin = lambda task, begin=seat.begin: begin(replace(task, round=1))
        return super().train(orders, units)


@pytest.mark.parametrize("engine", [OneModule, SeatOrder, OldRound])
def test_a_broken_seat_is_noticed(engine):
    expected = Federation(make("FedMPQ"), SequentialEngine).rounds()
    with pytest.raises(AssertionError):
        assert_same(expected, Federation(make("FedMPQ"), engine).rounds())


class Breaks(FedAvg):
    """``where``: the step, or the upload, of client 3."""

    where = ""

    def receive(self, message, client):
        super().receive(message, client)
        self.broken = self.where if client.id == 3 else ""

    def training_step(self, batch, batch_idx=0):
        if Breaks.where == self.broken == "step":
            raise ValueError("step")
        return super().training_step(batch, batch_idx)

    def upload(self, client):
        if Breaks.where == self.broken == "upload":
            raise ValueError("upload")
        return super().upload(client)


@pytest.mark.parametrize("where", ["step", "upload"])
@pytest.mark.parametrize("recorder", ["eager", "tapes"])
def test_after_an_error_it_starts_afresh(where, recorder, monkeypatch):
    expected = Federation(Breaks(network=NORMED), SequentialEngine).rounds()
    seated = Federation(Breaks(network=NORMED), SeatsEngine, RECORDERS[recorder])
    results = seated.round(1, COHORTS[0])
    monkeypatch.setattr(Breaks, "where", where)
    with pytest.raises(ValueError, match=where):
        list(seated.engine.train(seated.orders(2, COHORTS[1])))
    assert not seated.engine.seats
    monkeypatch.setattr(Breaks, "where", "")
    for round, ids in enumerate(COHORTS[1:], 2):
        results += seated.round(round, ids)
    assert_same(expected, (results, seated.method.server))


def test_who_asks_for_no_more_results_leaves_nobody_at_work():
    seated = Federation(make("FedAvg"), SeatsEngine)
    before = seated.engine.seats
    results = seated.engine.train(seated.orders(1, [0, 1, 2, 3]))
    for _ in range(4):
        next(results)
    results.close()
    assert seated.engine.seats is before  # all were done: copies and recordings stay
    results = seated.engine.train(seated.orders(2, [0, 1, 2, 3]))
    next(results)
    assert [bool(seat.held) for seat in seated.engine.seats] == [True, True, True]
    results.close()
    assert not seated.engine.seats
    seated.engine.close()


# The choice


def test_what_workers_are_on_a_card_that_opts_in(monkeypatch):
    monkeypatch.setattr(choice, "_can_fork", lambda fabric: False)
    seated = Federation(make("FedAvg"), SeatsEngine)
    settings = {"cohort": 40, "before": None}
    make_one = partial(make_engine, seated.fabric, seated.method, seated.data, cuda_graphs=True)
    for engine in ("auto", "sequential"):
        found = make_one(engine=engine, workers=4, **settings)
        assert isinstance(found.engine, SeatsEngine)
        assert (found.engine.size, found.name) == (4, "sequential")
    assert make_one(engine="sequential", workers=4, cohort=2, before=None).engine.size == 2
    assert type(make_one(engine="sequential", workers="auto", **settings).engine) is SequentialEngine
    assert make_one(engine="auto", workers=4, cohort=40, before="batched").name == "batched"
    card = SimpleNamespace(device=torch.device("cuda"))
    check_workers(card, 8, "auto", cuda_graphs=True)
    for workers, engine in ((9, "auto"), (2, "batched")):
        with pytest.raises(InputError, match=f"--trainer.workers {workers}"):
            check_workers(card, workers, engine, cuda_graphs=True)


def test_without_opting_in_nothing_of_it_is_used(monkeypatch):
    """On a card too: eager steps of one client after another, and several workers are refused."""
    monkeypatch.setattr(choice, "_can_fork", lambda fabric: False)
    seated = Federation(make("FedMPQKD"), SequentialEngine)
    made = make_engine(
        seated.fabric, seated.method, seated.data, engine="sequential", workers="auto", cohort=4, before=None
    )
    assert type(made.engine) is SequentialEngine
    assert type(made.engine.steps) is Steps
    assert type(seated.method.teacher_stream) is InTurn
    card = SimpleNamespace(device=torch.device("cuda"))
    check_workers(card, "auto", "auto")
    with pytest.raises(InputError, match="cuda_graphs true"):
        check_workers(card, 2, "auto")
    with pytest.raises(InputError, match="CUDA graphs are recorded on a CUDA device"):
        check_workers(seated.fabric, 1, "auto", cuda_graphs=True)
