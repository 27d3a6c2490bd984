"""Attacks on a federation of adapters: what the server makes of them, by hand, and what is
refused."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from refusals import refused
from tiny_language import fit, method_of, records

from callbacks import ByzantineClients, FactorError
from fl_lightning.errors import InputError
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import (
    Centralised,
    CoordinateMedian,
    FedAvg,
    LocalOnly,
    Oracle,
    WeightedMean,
)


class Keeps(Stressor):
    """Remembers what each client sent, and from what its update is counted."""

    def __init__(self) -> None:
        self.sent: dict[int, torch.Tensor] = {}
        self.start: dict[int, torch.Tensor] = {}
        self.server: dict[str, torch.Tensor] = {}

    def change_upload(self, upload, *, client, round, context):
        self.sent[client.id] = upload.tensor("weights").double()
        self.server = dict(context.method.server)
        self.start[client.id] = context.method.broadcast(client).tensor("weights").double()
        return upload


def attacked(folder, attack: str, cls=FedAvg, average=None, **settings):
    """A round of five clients of which one attacks; the trainer, who attacks, and what was sent
    before and after."""
    honest, hostile, stressor = (
        Keeps(),
        Keeps(),
        ByzantineClients(clients=0.2, attack=attack, strength=10.0),
    )
    method = method_of(cls, average=average or WeightedMean())
    callbacks = [honest, stressor, hostile]
    data = records(num_clients=5, generate=False)
    trainer = fit(method, folder, data, callbacks=callbacks, **{"max_rounds": 1, **settings})
    (attacker,) = stressor._attackers
    return trainer, attacker, honest, hostile


@pytest.mark.parametrize("cls", [FedAvg, Oracle])
@pytest.mark.parametrize("attack", ["sign_flip", "scale", "noise"])
def test_an_attack_replaces_the_update_of_the_adapters(attack, cls, tmp_path):
    """u = x_k - x becomes -10 u, 10 u, or u + 10 rms(u) z; nobody else's changes."""
    _, attacker, honest, hostile = attacked(tmp_path, attack, cls)
    for id in range(5):
        before, after = (keeps.sent[id] - keeps.start[id] for keeps in (honest, hostile))
        assert before.norm() > 0
        if id != attacker:
            assert torch.equal(before, after)
        elif attack == "noise":
            noise = (after - before) / (10 * before.square().mean().sqrt())
            assert abs(noise.mean()) < 0.2
            assert noise.std() == pytest.approx(1, abs=0.2)
        else:
            factor = {"sign_flip": -10, "scale": 10}[attack]
            torch.testing.assert_close(after, factor * before, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("attack", ["sign_flip", "scale"])
@pytest.mark.parametrize(("rule", "rank"), [("alternate", 2), ("product", [1, 2])])
def test_of_parts_that_travel_the_update_is_attacked(rule, rank, attack, tmp_path):
    """The half of a round, or the ranks of a client: u becomes -10 u or 10 u, and no weight."""
    honest, hostile = Keeps(), Keeps()
    stressor = ByzantineClients(clients=0.2, attack=attack, strength=10.0)
    method = method_of(rank=rank, adapter_average=rule)
    trainer = fit(
        method,
        tmp_path,
        records(num_clients=5, generate=False),
        callbacks=[honest, stressor, hostile],
        max_rounds=3,
    )
    (attacker,) = stressor._attackers
    assert len(trainer.progress.history) == 3
    before, after = honest.sent[attacker], hostile.sent[attacker]
    factor = {"sign_flip": -10, "scale": 10}[attack]
    start = (after - factor * before) / (1 - factor)
    weights = honest.server["weights"].double()
    moving = method.adapters.moving(method)
    part = method.adapters.part(trainer.data.client(attacker))
    kept = next((each for each in (moving, part) if each is not None), slice(None))
    torch.testing.assert_close(start, weights[kept], rtol=1e-4, atol=1e-5)


def test_the_mean_of_adapters_is_moved_and_the_median_is_not(tmp_path):
    losses = {}
    for average in (WeightedMean(), CoordinateMedian()):
        trainer, _, _, hostile = attacked(
            tmp_path / type(average).__name__, "sign_flip", average=average
        )
        sent = torch.stack([hostile.sent[id] for id in range(5)])
        sizes = torch.tensor([len(trainer.data.client(id).train) for id in range(5)]).double()
        by_hand = sent.median(dim=0).values
        if isinstance(average, WeightedMean):
            by_hand = (sizes / sizes.sum()) @ sent
        torch.testing.assert_close(
            trainer.method.server["weights"], by_hand.float(), rtol=1e-6, atol=1e-7
        )
        more = attacked(tmp_path / "more", "sign_flip", average=deepcopy(average), max_rounds=6)[0]
        history = more.progress.history
        losses[type(average)] = [row["test/loss"] for row in (history[0], history[-1])]
    assert losses[CoordinateMedian][1] < losses[CoordinateMedian][0]
    assert losses[CoordinateMedian][1] < losses[WeightedMean][1]


def test_the_error_of_factors_is_of_the_uploads_that_are_averaged(tmp_path):
    class Last(Meter):
        def on_round_end(self, record, context):
            self.found = record.metrics["average/factor_error"]

    stressor, data = ByzantineClients(clients=0.25), partial(records, generate=False)
    for callbacks, said in (
        ([FactorError(), stressor], "list FactorError last"),
        ([ByzantineClients(attack="alie"), FactorError()], "leave out attacks that know all"),
    ):
        with refused("callbacks.FactorError with ByzantineClients", said):
            fit(method_of(), tmp_path, data(), callbacks=callbacks, max_rounds=1)
    assert not list(tmp_path.iterdir())
    found = []
    for callbacks in ([FactorError()], [stressor, FactorError()]):
        last = Last()
        fit(method_of(), tmp_path, data(), callbacks=[*callbacks, last], max_rounds=1)
        found.append(last.found)
    assert found[0] != found[1]


@pytest.mark.parametrize("cls", [LocalOnly, Centralised])
def test_where_clients_send_nothing_that_they_learned_an_attack_is_refused(cls, tmp_path):
    method = method_of(cls)
    with pytest.raises(
        InputError, match=rf"ByzantineClients with --model {cls.__name__}; its clients send"
    ):
        fit(method, tmp_path, callbacks=[ByzantineClients()])
    assert not list(tmp_path.iterdir())
