"""Uploads that are added up as they come: the same bits, and few of them in memory."""

from __future__ import annotations

from weakref import WeakValueDictionary

import pytest
import torch
from ten import make
from toy import run

from fl_lightning import exchange, loop
from fl_lightning.aggregation import intake
from fl_lightning.conformance.toy import Sizes, images
from fl_lightning.data import IID
from fl_lightning.engines import pool, worker
from fl_lightning.hooks import Meter
from fl_lightning.privacy import ClientPrivacy

CLIENTS, WAITING = 12, 3


class CountsUploads(Meter):
    """The most uploads that were alive whenever one more client had trained."""

    def __init__(self, monkeypatch):
        self.alive, self.most, decode = WeakValueDictionary(), 0, exchange.decode_upload

        def decoded(*arguments, **settings):
            upload = decode(*arguments, **settings)
            self.alive[id(upload)] = upload
            return upload

        monkeypatch.setattr(exchange, "decode_upload", decoded)

    def on_client_end(self, client, round, context):
        self.most = max(self.most, len(self.alive))


def federation(clients=CLIENTS):
    return images(num_clients=clients, partition=IID())


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(intake, "WAITING_UPLOADS", WAITING)
    monkeypatch.setattr(intake, "WAITING_BYTES", 0)


WAYS = {
    "plain": {},
    "adaptive server": {"method": "FedAdam"},
    "two sums": {"method": "FedDyn"},
    "private": {"privacy": ClientPrivacy(noise_multiplier=0.1, clip_norm=0.5)},
    "private, by quantile": {
        "privacy": ClientPrivacy(noise_multiplier=0.1, clip_norm=0.5, target_quantile=0.5)
    },
    "two workers": {"workers": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_few_uploads_are_alive_and_the_weights_are_those_of_all_at_once(way, few, tmp_path, monkeypatch):
    settings = {**WAYS[way]}
    name = settings.pop("method", "FedAvg")
    weighs = {"weigh_by": "clients"} if "privacy" in settings else {}
    found, most = [], []
    for kept in (False, True):
        if kept:
            monkeypatch.setattr(loop, "intake", lambda fed, declared: intake.Uploads())
        counts = CountsUploads(monkeypatch)
        trainer = run(
            make(name, **weighs),
            federation(),
            tmp_path / str(kept),
            callbacks=[counts],
            participation=1.0,
            max_rounds=2,
            engine="sequential",
            **settings,
        )
        found.append(trainer.method.server)
        most.append(counts.most)
    assert all(torch.equal(found[0][entry], found[1][entry]) for entry in found[1])
    assert most[0] <= WAITING + 1 < CLIENTS - 1 <= most[1]  # one more is being received


def test_what_depends_on_all_uploads_keeps_them(few, tmp_path, monkeypatch):
    """A bound on shares is one on what all clients say together."""
    counts = CountsUploads(monkeypatch)
    run(
        make("FedAvg", max_share=0.2),
        federation(),
        tmp_path,
        callbacks=[counts],
        participation=1.0,
        max_rounds=1,
    )
    assert counts.most >= CLIENTS - 1


@pytest.mark.slow
@pytest.mark.essential
def test_no_worker_is_far_ahead_of_the_client_whose_turn_it_is(few, tmp_path, monkeypatch):
    """The first client has nearly all examples, so its results are the last to come; and the memory that
    workers share holds the uploads of one client."""
    monkeypatch.setattr(pool, "AHEAD_BYTES", 1)
    monkeypatch.setattr(worker, "MIN_SHARED_BYTES", 1)
    monkeypatch.setattr(pool, "MIN_SHARED_BYTES", 1)
    waiting, most, portions = 0, 0, []
    taken = pool.Worker.take

    def take(self, answer, tasks):
        nonlocal waiting, most
        waiting += len(tasks)
        most = max(most, waiting)
        portions.append(len(tasks))
        return taken(self, answer, tasks)

    class Served(Meter):
        def on_client_end(self, client, round, context):
            nonlocal waiting
            waiting -= 1

    monkeypatch.setattr(pool.Worker, "take", take)
    data = images(num_clients=40, partition=Sizes(240, *[3] * 38), synthetic_examples=375, batch_size=4)
    settings = {
        "participation": 1.0,
        "max_rounds": 1,
        "local_epochs": 20,
        "workers": 2,
        "engine": "sequential",
    }
    run(make("FedAvg"), data, tmp_path, callbacks=[Served()], **settings)
    assert waiting == 0
    assert max(portions) == 1
    assert sum(portions) > 30 > 2 * 2 * 2 >= most
