"""Uploads that are added up as they come: the same bits, and few of them in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from ten import SMALL, make
from toy import run, sgd

from fl_lightning import exchange, loop
from fl_lightning.aggregation import intake, sums
from fl_lightning.aggregation.averages import WEIGHTED_MEAN
from fl_lightning.aggregation.server import receives_anywhere
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.conformance.toy import Sizes, images
from fl_lightning.data import IID
from fl_lightning.engines import pool, worker
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import FedAvg
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.wire import PayloadError

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
def test_few_uploads_are_alive_and_the_weights_are_those_of_all_at_once(
    way, few, tmp_path, monkeypatch
):
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


class Loses(Stressor):
    """Client 1 trains for nothing."""

    def change_cohort(self, cohort, *, round, context):
        return [replace(one, returns=one.client.id != 1) for one in cohort]


class Looks(Stressor):
    def change_upload(self, upload, *, client, round, context):
        return upload


class Diverges(FedAvg):
    """In round 2 client 2 sends what is not finite."""

    def end_client(self, client):
        super().end_client(client)
        if (client.id, self.round) == (2, 2):
            torch.nn.init.constant_(self.network.classifier.bias, torch.nan)


IN_WORKERS = {
    "mean": (lambda: make("FedAvg"), "sequential"),
    "stacks": (lambda: make("FedAvg"), "batched"),
    "two sums": (lambda: make("SCAFFOLD", optimizer=sgd(0.05)), "sequential"),
    "steps that were asked": (lambda: make("FedNova"), "sequential"),
    "codes": (lambda: make("FedMPQ", bits=4), "sequential"),
    "server optimiser": (lambda: make("FedAdam"), "sequential"),
    "rejected": (lambda: Diverges(network=SMALL), "sequential"),
}


def in_workers(method, folder, monkeypatch, caplog, callbacks=(), **settings):
    """Run three rounds; the server's tensors, the ledger, what was logged of rejections, and how
    many uploads the parent's process decoded."""
    decoded, decode = [], exchange.decode_upload
    with monkeypatch.context() as patch:
        patch.setattr(
            exchange, "decode_upload", lambda *a, **s: decoded.append(1) or decode(*a, **s)
        )
        caplog.clear()
        settings = {"participation": 0.75, "max_rounds": 3, "local_epochs": 2, **settings}
        trainer = run(method, federation(8), folder, callbacks=[Loses(), *callbacks], **settings)
    rejected = [line for line in caplog.messages if "rejected" in line]
    return method.server, (trainer.run_dir / "ledger.csv").read_text(), rejected, len(decoded)


@pytest.mark.parametrize("way", IN_WORKERS)
def test_workers_receive_what_they_train_and_the_parent_decodes_nothing(
    way, tmp_path, monkeypatch, caplog
):
    """Weights, bytes, who is lost and who is rejected are those of one process."""
    method, engine = IN_WORKERS[way]
    alone = in_workers(method(), tmp_path / "a", monkeypatch, caplog, engine=engine, workers=1)
    found = in_workers(method(), tmp_path / "b", monkeypatch, caplog, engine=engine, workers=2)
    assert all(torch.equal(alone[0][entry], found[0][entry]) for entry in alone[0])
    assert alone[1:3] == found[1:3]
    assert ("lost" in found[1], "rejected" in found[1]) == (True, way == "rejected")
    assert len(found[2]) == (way == "rejected")
    assert alone[3] > found[3] == 0


def test_where_a_stressor_looks_at_uploads_the_parent_has_them(tmp_path, monkeypatch, caplog):
    *_, decoded = in_workers(
        make("FedAvg"), tmp_path, monkeypatch, caplog, [Looks()], engine="sequential", workers=2
    )
    assert decoded > 0


@pytest.mark.parametrize("parts", [(3, 2), (4, 1), (5, 0)])
def test_sums_added_in_parts_are_merged_over_processes(parts, monkeypatch):
    """Each process has added its clients one by one, or has one, or none."""
    addends = [Addend(torch.randn(4), weight, 9) for weight in range(1, 6)]
    ranks, at = [], 0
    for count in parts:
        ranks.append(Sums(WEIGHTED_MEAN, 5))
        for addend in addends[at : at + count]:
            ranks[-1].add("weights", [addend])
        at += count
    first, second = ranks
    forms = {
        name: [len(total.integers), most, weight] for name, total, weight, most in second.merged()
    }
    other = [total.integers for _, total, *_ in second.merged()] or [
        torch.zeros(4, dtype=torch.int64)
    ]
    monkeypatch.setattr(sums, "world_size", lambda: 2)
    monkeypatch.setattr(sums, "gather_bytes", lambda own: [own, json.dumps(forms).encode()])
    monkeypatch.setattr(sums, "sum_over_ranks", lambda integers: integers + other[0])
    first.merge_ranks()
    whole = Sums(WEIGHTED_MEAN, 5)
    whole.add("weights", addends)
    assert torch.equal(first.mean("weights"), whole.mean("weights"))
    assert torch.equal(first.total("weights"), whole.total("weights"))


class Remembers(FedAvg):
    """Its server's half keeps a number beside ``server``, and perhaps what no process can be
    sent."""

    receives_anywhere = True

    def __init__(self, closes_over: bool = False, **settings):
        super().__init__(**settings)
        self.closes_over, self.rounds_done = closes_over, 0

    def next_state(self, sums):
        super().next_state(sums)
        self.rounds_done += 1
        if self.closes_over:
            self.function = lambda: self.rounds_done

    def addends(self, upload, client_id, weight):
        found = super().addends(upload, client_id, weight)
        found["weights"] = replace(
            found["weights"], values=found["weights"].values * (1 + self.rounds_done)
        )
        return found


@pytest.mark.parametrize("closes_over", [False, True])
def test_workers_know_what_was_set_on_the_method_since(closes_over, tmp_path, monkeypatch, caplog):
    """Where it cannot be sent, the parent receives the uploads."""

    def found(workers):
        method = Remembers(closes_over, network=SMALL)
        return in_workers(
            method, tmp_path, monkeypatch, caplog, engine="sequential", workers=workers
        )

    alone, pooled = found(1), found(2)
    assert all(torch.equal(alone[0][entry], pooled[0][entry]) for entry in alone[0])
    assert (pooled[3] > 0) == closes_over


class Warms(FedAvg):
    """Its clients read one of two things that its server sets; the other one cannot be sent."""

    warmth = 1.0

    def next_state(self, sums):
        super().next_state(sums)
        self.warmth, self.shown = 0.5 * self.round, lambda: 0

    def training_step(self, batch, batch_idx=0):
        terms = super().training_step(batch, batch_idx)
        return {**terms, "loss": self.warmth * terms["loss"]}


def test_what_cannot_be_sent_keeps_nothing_else_from_the_workers(tmp_path, caplog):
    found = []
    for workers in (1, 2):
        method = Warms(network=SMALL, optimizer=sgd())
        run(
            method,
            images(),
            tmp_path / str(workers),
            max_rounds=3,
            workers=workers,
            engine="sequential",
        )
        found.append(method.server["weights"])
    assert found[0].equal(found[1])
    said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [text for text in said if "workers do not see" in text and ": shown (" in text]


class Exchanges(Stressor):
    """A client has the examples of the one after it."""

    def change_cohort(self, cohort, *, round, context):
        after = [one.client.train for one in [*cohort[1:], cohort[0]]]
        return [
            replace(one, client=replace(one.client, train=train))
            for one, train in zip(cohort, after, strict=True)
        ]


def test_examples_that_a_stressor_exchanges_are_those_of_a_worker_too(tmp_path):
    found = []
    for workers, callbacks in ((1, [Exchanges()]), (2, [Exchanges()]), (2, [])):
        method = FedAvg(network=SMALL, optimizer=sgd())
        settings = {"callbacks": callbacks, "workers": workers, "engine": "sequential"}
        run(method, images(), tmp_path / str(len(found)), max_rounds=2, **settings)
        found.append(method.server["weights"])
    assert found[0].equal(found[1])
    assert not found[1].equal(found[2])


class Holds:
    total = 0


class Counts(FedAvg):
    """Its server's half writes while it receives, its clients read what the server's half has set,
    and the next state depends on both.

    Args:
        into: what it writes to.
        hook: in which hook.
    """

    def __init__(self, into: str = "", hook: str = "", **settings):
        super().__init__(**settings)
        self.into, self.hook, self.count, self.found, self.order = into, hook, 0, {}, []
        self.nested, self.held, self.array, self.drawn = {"ids": []}, Holds(), np.zeros(1), 0
        self.generator, self.scale = torch.Generator().manual_seed(0), 1.0
        self.register_buffer("buffer", torch.zeros(1))

    def build(self, data):
        super().build(data)
        self.server["count"] = torch.zeros(1)

    def write(self, hook, id):
        if hook != self.hook:
            return
        if self.into == "server":
            self.server["count"] = self.server["count"] * 2 + id
        elif self.into == "server in place":
            self.server["count"] += id
        elif self.into == "attribute":
            self.count = self.count * 2 + id
        elif self.into == "dictionary":
            self.found[self.round, id] = id
        elif self.into == "list":
            self.order.append(id)
        elif self.into == "nested list":
            self.nested["ids"].append(id)
        elif self.into == "object":
            self.held.total += id
        elif self.into == "array":
            self.array[0] += id
        elif self.into == "buffer":
            self.buffer += id
        elif self.into == "generator":
            self.drawn = float(torch.rand(1, generator=self.generator))

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * self.scale}

    def check(self, upload, client):
        self.write("check", client.id)
        super().check(upload, client)

    def addends(self, upload, client_id, weight):
        self.write("addends", client_id)
        return super().addends(upload, client_id, weight)

    def next_state(self, sums):
        super().next_state(sums)
        self.scale *= 0.5
        counted = (
            self.server["count"]
            + self.count
            + sum(self.found.values())
            + sum(self.order)
            + self.buffer
        )
        counted = (
            counted + sum(self.nested["ids"]) + self.held.total + float(self.array[0]) + self.drawn
        )
        self.server["weights"] = self.server["weights"] + counted / 1024


WRITTEN = (
    *(
        "server",
        "server in place",
        "attribute",
        "dictionary",
        "list",
        "nested list",
        "object",
        "array",
    ),
    *("buffer", "generator"),
)


@pytest.mark.quick("server-check", "nested list-addends", "generator-addends")
@pytest.mark.parametrize("hook", ["check", "addends"])
@pytest.mark.parametrize("to", WRITTEN)
def test_what_the_servers_half_writes_is_written_in_the_parent(
    to, hook, tmp_path, monkeypatch, caplog
):
    """As by one process, which has all its uploads."""

    def found(workers):
        return in_workers(
            Counts(to, hook, network=SMALL),
            tmp_path,
            monkeypatch,
            caplog,
            engine="sequential",
            workers=workers,
        )

    alone, pooled = found(1), found(2)
    assert all(torch.equal(alone[0][entry], pooled[0][entry]) for entry in alone[0])
    assert alone[1:] == pooled[1:]


def test_under_masks_workers_know_what_was_set_too(tmp_path, monkeypatch, caplog):
    def found(workers):
        settings = {"engine": "sequential", "workers": workers, "secure_sum": SecureSum()}
        return in_workers(Counts(network=SMALL), tmp_path, monkeypatch, caplog, **settings)

    pytest.importorskip("cryptography")
    alone, pooled = found(1), found(2)
    assert all(torch.equal(alone[0][entry], pooled[0][entry]) for entry in alone[0])
    assert any("of Counts write to the method is lost" in line for line in caplog.messages)


def test_who_says_that_its_hooks_write_to_nothing():
    class Overrides(FedAvg):
        def addends(self, upload, client_id, weight):
            return super().addends(upload, client_id, weight)

    class Says(Overrides):
        receives_anywhere = True

    class SaysNoMore(Says):
        def check(self, upload, client):
            super().check(upload, client)

    class Trains(Says):
        def training_step(self, batch, batch_idx=0):
            return super().training_step(batch, batch_idx)

    patched = FedAvg()
    patched.decode = lambda upload: upload.tensor("weights")
    methods = [FedAvg(), make("SCAFFOLD"), Overrides(), Says(), SaysNoMore(), Trains(), patched]
    assert [receives_anywhere(method) for method in methods] == [
        True,
        True,
        False,
        True,
        False,
        True,
        False,
    ]


class AddsNonsense(FedAvg):
    def addends(self, upload, client_id, weight):
        raise ZeroDivisionError("a bug of the method")


def test_a_bug_of_the_servers_half_in_a_worker_is_the_one_that_is_raised(tmp_path):
    with pytest.raises(ZeroDivisionError, match="a bug of the method"):
        run(AddsNonsense(), federation(), tmp_path, max_rounds=1, engine="sequential", workers=2)


class ReadsLate(FedAvg):
    """What `check` does not read, `addends` refuses of client 0."""

    receives_anywhere = True

    def addends(self, upload, client_id, weight):
        if client_id == 0:
            raise PayloadError("odd", "even", "")
        return super().addends(upload, client_id, weight)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_addends_refuses_rejects_no_other_client(workers, tmp_path, monkeypatch, caplog):
    """Large uploads are added up with the next client's; small ones at the end of the round. Both
    end the run, as a bug of the method."""
    monkeypatch.setattr(intake, "WAITING_BYTES", 1)
    settings = {"engine": "sequential", "workers": workers}
    with pytest.raises(PayloadError, match="odd"):
        run(ReadsLate(), federation(), tmp_path, max_rounds=1, **settings)
    assert "rejected" not in caplog.text


@pytest.mark.slow
@pytest.mark.essential
def test_no_worker_is_far_ahead_of_the_client_whose_turn_it_is(few, tmp_path, monkeypatch):
    """The first client has nearly all examples, so its results are the last to come; and the memory
    that workers share holds the uploads of one client."""
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
    data = images(
        num_clients=40, partition=Sizes(240, *[3] * 38), synthetic_examples=375, batch_size=4
    )
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
