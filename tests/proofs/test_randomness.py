"""Nothing reads global random state, and no client's result depends on who was there before it."""

from __future__ import annotations

import logging
import random
import warnings

import numpy as np
import pytest
import torch
from ranks_program import data_of, fit, method_of
from ten import TEN
from torch import nn
from toy import run, sgd

from fl_lightning import rng
from fl_lightning.aggregation.choice import choose_aggregation
from fl_lightning.engines import SequentialEngine
from fl_lightning.engines.determinism import deterministic
from fl_lightning.exchange import assignments, make_tasks
from fl_lightning.federation import Federation
from fl_lightning.hooks import Meter
from fl_lightning.loop import draw
from fl_lightning.methods import FedAvg
from fl_lightning.trainer import FederatedTrainer

by_method = pytest.mark.parametrize("name", TEN)


class Poison(Meter):
    """Draws from the three global generators, and seeds them anew, wherever it is called."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def poison(self) -> None:
        self.seed += 1
        torch.manual_seed(self.seed)
        np.random.seed(self.seed)  # noqa: NPY002
        random.seed(self.seed)
        torch.rand(self.seed % 7)
        np.random.rand(self.seed % 5)  # noqa: NPY002
        random.random()

    def on_setup(self, context):
        self.poison()

    def on_round_start(self, round, context):
        self.poison()

    def on_cohort(self, cohort, round, context):
        self.poison()

    def on_client_end(self, client, round, context):
        self.poison()

    def on_evaluate(self, probs, target, record, context):
        self.poison()


@pytest.mark.quick("FedAvg", "FedMPQKD", "FedMosaic")
@by_method
def test_global_seeds_change_nothing(name, tmp_path):
    """The networks have dropout; one of the two runs starts from other global seeds and has them
    changed all along."""
    plain = fit(name, tmp_path)
    Poison(99).poison()
    poisoned = fit(name, tmp_path, callbacks=[Poison(7)])
    assert plain.journal.metadata["weights_sha256"] == poisoned.journal.metadata["weights_sha256"]
    assert (plain.run_dir / "ledger.csv").read_text() == (
        poisoned.run_dir / "ledger.csv"
    ).read_text()


def federation(name: str) -> Federation:
    """After no round, with a cohort of three."""
    method, data = method_of(name), data_of(name)
    trainer = FederatedTrainer(accelerator="cpu", logger=False)
    data.setup()
    data.distribute(0, torch.device("cpu"))
    with rng.torch_stream(0, "weights"):
        method.build(data)
    return Federation(
        trainer.fabric,
        method,
        data,
        choose_aggregation(method),
        [],
        seed=0,
        max_rounds=1,
        participation=0.5,
        local_epochs=1,
        eval_every=1,
    )


def train(fed: Federation, round: int, pick=lambda orders: orders):
    fed.method.round = round
    ids = draw(fed, round, fed.data.active, fed.cohort_size)
    orders = pick(make_tasks(fed, round, assignments(fed, ids)))
    engine = SequentialEngine(fed.fabric, fed.method, fed.data)
    return {result.client.id: result for result in engine.train(orders)}


def same(first, second) -> bool:
    state = first.state.keys() == second.state.keys() and all(
        torch.equal(first.state[k], second.state[k]) for k in first.state
    )
    return state and (first.upload, first.losses, first.steps) == (
        second.upload,
        second.losses,
        second.steps,
    )


@pytest.mark.quick("FedAvg", "FedMPQKD", "FedMosaic")
@by_method
def test_the_order_of_clients_and_who_ran_before_change_nothing(name):
    together = train(federation(name), 1)
    backwards = train(federation(name), 1, lambda orders: orders[::-1])
    assert len(together) == 3
    for id, result in together.items():
        alone = train(
            federation(name),
            1,
            lambda orders, id=id: [order for order in orders if order.client.id == id],
        )
        assert same(result, backwards[id])
        assert same(result, alone[id])


@by_method
def test_training_twice_gives_the_same_result(name):
    """Nothing of a client's round, nor of an evaluation, is left in the module or on the client."""
    fed = federation(name)
    first = train(fed, 1)
    fed.method.deploy(fed.data.client(0) if fed.method.personalised else None)
    assert all(
        same(result, again)
        for result, again in zip(first.values(), train(fed, 1).values(), strict=True)
    )


class Unpooled(nn.Module):
    """``MaxUnpool2d`` has no deterministic form."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(8, return_indices=True), nn.MaxUnpool2d(8)
        self.head = nn.Linear(3 * 32 * 32, classes)

    def forward(self, images):
        return self.head(self.unpool(*self.pool(images)).flatten(1))


@pytest.mark.parametrize("deterministic", [True, False])
def test_operations_without_a_deterministic_form_are_named_once(deterministic, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "fl_lightning")
    run(
        FedAvg(network=Unpooled, optimizer=sgd(0.01)),
        data_of("FedAvg"),
        tmp_path,
        max_rounds=2,
        deterministic=deterministic,
    )
    named = [
        record.message for record in caplog.records if "no deterministic form" in record.message
    ]
    assert len(named) == deterministic
    assert all("max_unpool" in message for message in named)
    assert not torch.are_deterministic_algorithms_enabled()


def test_attention_that_is_not_deterministic_is_named_once(caplog):
    """On CUDA torch says so of attention in half precision, with other words."""
    caplog.set_level(logging.WARNING, "fl_lightning")
    with deterministic(True):
        for _ in range(2):
            warnings.warn(
                "cuDNN Attention defaults to a non-deterministic algorithm. To enable", stacklevel=1
            )
    assert [record.message.split(" has ")[0] for record in caplog.records] == ["cuDNN Attention"]
