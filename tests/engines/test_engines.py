"""Who executes a cohort, and how many at once, changes nothing but the time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks_program import Dropped
from ten import SMALL, TEN, assert_same_within_rounding, fit, make, same
from torch import nn
from toy import run

from fl_lightning.conformance.toy import images
from fl_lightning.engines import (
    BatchedEngine,
    ClientTask,
    PoolEngine,
    SequentialEngine,
    choice,
    pool,
)
from fl_lightning.errors import RankLost
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import FedAvg
from fl_lightning.models import SmallCNN
from fl_lightning.wire import Payload


@pytest.mark.quick("FedAvg", "FedMPQKD", "FedMosaic")
@pytest.mark.parametrize("name", TEN)
def test_batched_is_sequential_within_rounding(name, tmp_path, caplog):
    expected, _ = fit(make(name), tmp_path, engine="sequential")
    with caplog.at_level(logging.WARNING, "fl_lightning"):
        found, folder = fit(make(name), tmp_path, engine="batched")
    assert "one by one" not in caplog.text
    assert json.loads((folder / "metadata.json").read_text())["engine"] == "batched"
    assert_same_within_rounding(name, expected, found)


@pytest.mark.quick("FedAvg", "FedMPQKD", "FedMosaic")
@pytest.mark.parametrize("name", TEN)
def test_workers_change_no_bit(name, tmp_path):
    network = {} if name == "FedMosaic" else {"network": Dropped}
    expected, alone = fit(make(name, **network), tmp_path, engine="sequential", workers=1)
    found, pooled = fit(make(name, **network), tmp_path, engine="sequential", workers=3)
    assert same(expected, found)
    assert (alone / "ledger.csv").read_text() == (pooled / "ledger.csv").read_text()


@pytest.mark.slow
@pytest.mark.essential
def test_a_worker_that_is_ahead_overwrites_nothing(tmp_path, monkeypatch):
    """It has long trained its next clients when its results are read."""
    here, read = os.getpid(), pool.read

    def slowly(*arguments):
        time.sleep(0.1 if os.getpid() == here else 0)
        return read(*arguments)

    monkeypatch.setattr(pool, "read", slowly)
    expected, _ = fit(make("FedAvg"), tmp_path, engine="sequential", workers=1)
    assert same(expected, fit(make("FedAvg"), tmp_path, engine="sequential", workers=2)[0])


def test_a_pool_without_workers_says_so():
    with pytest.raises(RuntimeError, match="call start"):
        list(PoolEngine(SequentialEngine(None, None, None), None, None, 2).train([], []))


class SendsMore(FedAvg):
    """Says nothing of the shapes that it sends, so that its uploads are not added up by workers."""

    def upload(self, client):
        return Payload({**super().upload(client), "more": torch.ones(1)})


class NobodyInRoundTwo(Stressor):
    def change_cohort(self, cohort, *, round, context):
        return [replace(one, trains=round != 2) for one in cohort]


def test_workers_sit_out_a_round_in_which_nobody_trains(tmp_path):
    settings = {"callbacks": [NobodyInRoundTwo()], "max_rounds": 3, "engine": "sequential"}
    alone, _ = fit(SendsMore(network=SMALL), tmp_path / "alone", workers=1, **settings)
    assert same(alone, fit(SendsMore(network=SMALL), tmp_path / "pooled", workers=2, **settings)[0])


def test_workers_change_no_bit_of_stacks(tmp_path, monkeypatch, caplog):
    """Stacks are cut before they are dealt."""
    monkeypatch.setattr("fl_lightning.engines.stacked.batched.MAX_STACK", 2)
    expected, _ = fit(make("FedAvg"), tmp_path, engine="batched", workers=1)
    assert "one by one" not in caplog.text
    assert same(expected, fit(make("FedAvg"), tmp_path, engine="batched", workers=2)[0])


@pytest.mark.parametrize(
    "optimizer",
    [
        # with a smaller one rounding decides the sign of a step of lr
        partial(torch.optim.AdamW, lr=1e-3, eps=1e-4),
        partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01),
        partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
        partial(torch.optim.ASGD, lr=0.05, t0=1),
    ],
    ids=lambda optimizer: optimizer.func.__name__,
)
@pytest.mark.quick("batch-AdamW", "group-SGD")
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_optimizers_and_statistics_in_stacks(optimizer, norm, tmp_path, caplog):
    network = partial(SmallCNN, width=4, norm=norm)
    servers = [
        fit(FedAvg(network=network, optimizer=optimizer), tmp_path, engine=e)[0]
        for e in ("sequential", "batched")
    ]
    assert "one by one" not in caplog.text
    torch.testing.assert_close(
        servers[0]["weights"], servers[1]["weights"], rtol=0, atol=2e-4 if norm == "batch" else 2e-5
    )


class Careless(FedAvg):
    """Keeps a tensor of the client where no stack can see it."""

    def receive(self, message, client):
        super().receive(message, client)
        self.start = message.tensor("weights").clone()


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (lambda: Careless(network=SMALL), "receive sets 'start'"),
        (lambda: FedAvg(network=Dropped), "random"),
        (
            lambda: FedAvg(network=SMALL, optimizer=partial(torch.optim.Adafactor, lr=1e-3)),
            "Adafactor",
        ),
    ],
    ids=["hidden state", "dropout", "not elementwise"],
)
def test_what_cannot_be_stacked_is_trained_one_by_one_and_said(method, reason, tmp_path, caplog):
    expected, _ = fit(method(), tmp_path, engine="sequential")
    with caplog.at_level(logging.WARNING, "fl_lightning"):
        found, _ = fit(method(), tmp_path, engine="batched")
    assert same(expected, found)
    assert caplog.text.count("one by one") == 1
    assert reason in caplog.text


class AsksInRoundOne(FedAvg):
    """Reads a value in the steps of its first round, which no stack can."""

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        if self.round == 1:
            outputs["loss"].detach().item()
        return outputs


def test_a_stack_that_failed_before_a_run_was_continued_changes_no_bit(tmp_path):
    """A process that has seen it fail tries again, as the one does that goes on."""
    expected, _ = fit(AsksInRoundOne(network=SMALL), tmp_path / "whole", engine="batched")
    method, begun = AsksInRoundOne(network=SMALL), tmp_path / "begun"
    run(AsksInRoundOne(network=SMALL), images(), begun, max_rounds=1, engine="batched")
    (folder,) = (begun / "fl_lightning").iterdir()
    goes_on = {"ckpt_path": str(folder), "allow_changed": True}
    run(method, images(), begun, max_rounds=2, engine="batched", **goes_on)
    assert same(expected, method.server)
    alone, _ = fit(AsksInRoundOne(network=SMALL), tmp_path / "alone", engine="sequential")
    assert not same(expected, alone)


class Dies(FedAvg):
    def upload(self, client):
        if client.id == 3 and os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().upload(client)


class Raises(FedAvg):
    def upload(self, client):
        if client.id == 3:
            raise ArithmeticError("no upload of client 3")
        return super().upload(client)


PARENT = os.getpid()


def test_a_worker_that_dies_is_named_and_the_run_can_go_on(tmp_path):
    with pytest.raises(RankLost, match="was killed by SIGKILL"):
        fit(Dies(network=SMALL), tmp_path, workers=2, engine="sequential")
    (folder,) = (tmp_path / "fl_lightning").iterdir()
    method = FedAvg(network=SMALL)
    run(
        method,
        images(),
        tmp_path,
        max_rounds=2,
        ckpt_path=str(folder),
        workers=1,
        allow_changed=True,
    )
    assert same(method.server, fit(FedAvg(network=SMALL), tmp_path / "whole", workers=1)[0])


def test_what_a_worker_raises_is_raised_here(tmp_path):
    with pytest.raises(ArithmeticError, match="no upload of client 3") as caught:
        fit(Raises(network=SMALL), tmp_path, workers=2, engine="sequential")
    assert "in a worker process" in str(caught.value.__cause__)


def children():
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


class Workers(Meter):
    """Notes the processes that a run has forked; those of other tests may be there before."""

    def on_check(self, context):
        self.before = children()

    def on_round_end(self, record, context):
        self.pids = children() - self.before


def test_workers_end_with_the_run(tmp_path):
    workers = Workers()
    fit(FedAvg(network=SMALL), tmp_path, workers=2, engine="sequential", callbacks=[workers])
    assert len(workers.pids) >= 2
    deadline = time.monotonic() + 120
    while (
        any(os.path.exists(f"/proc/{pid}") for pid in workers.pids) and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers.pids)


def test_large_messages_go_through_the_pipe(tmp_path, monkeypatch):
    expected, _ = fit(FedAvg(network=SMALL), tmp_path, workers=1)
    monkeypatch.setattr("fl_lightning.engines.pool.shared_bytes", lambda method: 2**12)
    assert same(expected, fit(FedAvg(network=SMALL), tmp_path, workers=2)[0])


def test_sums_are_read_where_workers_made_them(tmp_path, monkeypatch):
    take, found = pool.Worker.take_sums, []

    def taken(worker, cohort):
        shared = torch.frombuffer(worker.ups[0], dtype=torch.uint8)
        for name, total, *more in take(worker, cohort):
            found.append(0 <= total.integers.data_ptr() - shared.data_ptr() < len(shared))
            yield name, total, *more

    monkeypatch.setattr(pool.Worker, "take_sums", taken)
    fit(make("FedDyn"), tmp_path, workers=2, engine="sequential")
    assert len(found) >= 4  # FedDyn has two sums
    assert all(found)


class Alternating(FedAvg):
    """What it set in one round it takes back in the next: the length of its steps, and a name."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.scale = self.extra = 0.0

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        return outputs | {"loss": outputs["loss"] * (1 + self.scale + hasattr(self, "extra"))}

    def aggregate(self, uploads):
        super().aggregate(uploads)
        self.scale = 0.0 if self.scale else 1.0
        vars(self).pop("extra", None)


def test_workers_hear_of_what_is_set_back_and_removed(tmp_path):
    expected, _ = fit(Alternating(network=SMALL), tmp_path, workers=1, max_rounds=4)
    assert same(expected, fit(Alternating(network=SMALL), tmp_path, workers=2, max_rounds=4)[0])


class Leaves(FedAvg):
    def training_step(self, batch, batch_idx):
        raise SystemExit(3)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_that_calls_exit_ends_the_run_in_a_line(tmp_path, workers):
    with pytest.raises(RuntimeError, match=r"code of this run called sys.exit\(3\)"):
        fit(Leaves(network=SMALL), tmp_path, workers=workers, engine="sequential")


class Wide(nn.Sequential):
    def __init__(self, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(768, 16), nn.ReLU(), nn.Linear(16, classes))


def test_auto_measures_large_cohorts_only_and_a_continued_run_keeps_its_choice(
    tmp_path, monkeypatch, caplog
):
    measured = []
    monkeypatch.setattr(choice, "_measured", lambda *_: measured.append(1) or "batched")
    fit(FedAvg(network=Wide), tmp_path)
    assert measured == []
    monkeypatch.setattr(choice, "MIN_BATCHED_COHORT", 6)
    _, folder = fit(FedAvg(network=Wide), tmp_path)
    assert len(measured) == 1
    monkeypatch.setattr(choice, "_measured", lambda *_: "sequential")
    with caplog.at_level(logging.INFO, "fl_lightning"):
        run(
            FedAvg(network=Wide),
            images(),
            tmp_path,
            max_rounds=3,
            ckpt_path=str(folder),
            allow_changed=True,
        )
    assert "engine: batched" in caplog.text


def test_auto_takes_what_is_clearly_faster(tmp_path, monkeypatch, caplog):
    """The clock is ours: a second a client in turn, and so many for all at once."""
    for at_once, expected in ((0.5, "batched"), (0.8, "sequential")):
        times = {SequentialEngine: 1.0, BatchedEngine: at_once}
        monkeypatch.setattr(choice, "MIN_BATCHED_COHORT", 2)
        monkeypatch.setattr(choice, "MAX_STEP_SECONDS", 10.0)
        monkeypatch.setattr(
            choice,
            "_seconds",
            lambda engine, orders, times=times: times[type(engine)] * len(orders),
        )
        with caplog.at_level(logging.INFO, "fl_lightning"):
            _, folder = fit(FedAvg(network=Wide), tmp_path)
        assert json.loads((folder / "metadata.json").read_text())["engine"] == expected


def test_units_hold_every_order_once():
    data = images()
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    method = make("FedAvg")
    method.build(data)
    orders = [
        ClientTask(data.client(id), 1, b"", data.labels(data.client(id)), 1, 1) for id in range(6)
    ] * 30
    for engine in (BatchedEngine(None, method, data), SequentialEngine(None, method, data)):
        assert sorted(at for unit in engine.units(orders) for at in unit) == list(range(180))
    pool = PoolEngine(SequentialEngine(None, method, data), method, data, 2)
    portions = pool._portions(orders, pool.units(orders), pool._ahead(orders))
    assert sorted(at for units in portions for unit in units for at in unit) == list(range(180))
    assert 2 <= len(portions) <= 3 * 2 * 4


class Counts(FedAvg):
    """Weighs by local steps that it counts itself, as FedNova does."""

    def receive(self, message, client):
        super().receive(message, client)
        self.tau = 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.tau += 1

    def upload(self, client):
        assert self.tau > 0
        return super().upload(client)


class Freezes(FedAvg):
    """Every other client trains the classifier only."""

    def receive(self, message, client):
        super().receive(message, client)
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(client.id % 2 == 0 or name.startswith("classifier"))

    def configure_optimizers(self):
        return torch.optim.SGD(self.trainable(), lr=0.05)


class Shuffles(FedAvg):
    """Batches with torch's own noise in them."""

    def local_batches(self, data, client, **work):
        for inputs, target in super().local_batches(data, client, **work):
            yield inputs + 0.1 * torch.randn_like(inputs), target


class Perturbs(FedAvg):
    """Each client starts from somewhere else, so that what one makes of the broadcast is not what
    all make of it."""

    def receive(self, message, client):
        super().receive(message, client)
        with torch.no_grad():
            self.network.classifier.bias += torch.from_numpy(
                self.stream("start", client).normal(size=4).astype("float32")
            )


class Personal(FedAvg):
    """A bias that stays with the client, looked for in a way that hides every error."""

    def receive(self, message, client):
        super().receive(message, client)
        with contextlib.suppress(Exception), torch.no_grad():
            self.network.classifier.bias.copy_(client.state["bias"])

    def upload(self, client):
        client.state["bias"] = self.network.classifier.bias.detach() + 1
        return super().upload(client)


class Prints(FedAvg):
    """Starts from a number that it reads off the client's description."""

    def receive(self, message, client):
        super().receive(message, client)
        with torch.no_grad():
            self.network.classifier.bias += len(str(client)) % 7


class Rescales(FedAvg):
    """Its steps read a plain value of a submodule, which differs from client to client."""

    def receive(self, message, client):
        super().receive(message, client)
        self.network.classifier.scale = 1.0 + client.id % 3

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * self.network.classifier.scale}


STACKED = [Freezes, Shuffles, Perturbs, Personal, Prints, Rescales]


@pytest.mark.parametrize("method", [Counts, *STACKED])
def test_a_method_that_does_more_is_the_same_in_stacks(method, tmp_path, caplog):
    servers = [
        fit(method(network=SMALL), tmp_path, engine=engine)[0]
        for engine in ("sequential", "batched")
    ]
    assert ("one by one" not in caplog.text) == (method in STACKED)
    torch.testing.assert_close(servers[0]["weights"], servers[1]["weights"], rtol=0, atol=2e-5)


def test_auto_stacks_only_what_says_so_itself():
    assert choice.is_stackable(FedAvg(network=SMALL))
    assert not choice.is_stackable(Counts(network=SMALL))


class Nobody(Stressor):
    def change_cohort(self, cohort, *, round, context):
        return [replace(a, trains=False, returns=False) for a in cohort] if round == 1 else cohort


@pytest.mark.parametrize("workers", [1, 2])
def test_an_empty_round_in_stacks(workers, tmp_path):
    _, folder = fit(
        FedAvg(network=SMALL), tmp_path, engine="batched", workers=workers, callbacks=[Nobody()]
    )
    assert (folder / "ledger.csv").read_text().count("dropped") == 6


class Scratch(FedAvg):
    """Broadcasts from one buffer that it writes to every round."""

    def broadcast(self, client):
        if not hasattr(self, "out"):
            self.out = torch.empty_like(self.server["weights"])
        self.out.copy_(self.server["weights"])
        return Payload({"weights": self.out})


def test_a_buffer_that_is_written_again_is_sent_again(tmp_path):
    wide = partial(SmallCNN, width=8)
    assert same(fit(FedAvg(network=wide), tmp_path)[0], fit(Scratch(network=wide), tmp_path)[0])


class Keeps(FedAvg):
    """Keeps what numpy cannot hold."""

    def upload(self, client):
        client.state["half"] = self.layout.read(self.network).to(torch.bfloat16)
        return super().upload(client)


def test_workers_return_kept_state_of_every_type(tmp_path):
    assert same(
        fit(Keeps(network=SMALL), tmp_path, workers=1)[0],
        fit(Keeps(network=SMALL), tmp_path, workers=2)[0],
    )
