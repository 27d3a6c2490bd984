"""The slowest tenth of the clients is who it is said to be, in every form of rounds, and is only
watched."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from outcomes import rows_of
from ranked import result
from refusals import refused
from ten import SMALL
from toy import run, sgd

from callbacks import SlowClients
from callbacks.meters.slow_clients import slowest
from fl_lightning.clock import (
    Clock,
    Deadline,
    DrawnDevices,
    FedAsync,
    FedBuff,
    Lines,
    LogNormalDevices,
    OverSelection,
    SameDevice,
    Synchronous,
)
from fl_lightning.conformance.toy import images
from fl_lightning.data import IID
from fl_lightning.methods import FedAvg, FedMosaic, FedMPQ, FedPer, Method
from fl_lightning.models.residual_mlp import ResidualMLP
from fl_lightning.study.metric_names import CLASSIFICATION, column, direction, headline, measure_of

NAME = "val/accuracy_slowest_decile"
LINES = Lines(down=2e6, up=1e6, latency=0.25)
SLOW = (3, 7)


class Phones(SameDevice):
    """Of twelve clients 7 is the slowest, and then 3."""

    def seconds(self, seed, round, client, examples):
        return examples * {7: 0.9, 3: 0.5}.get(client, 0.01)


def trained(folder: Path, *callbacks, method=FedAvg, **settings):
    settings = {"clock": Clock(devices=Phones(), network=LINES), "max_rounds": 3, **settings}
    data = images(num_clients=12, partition=IID(), synthetic_examples=360, val_fraction=0.3)
    settings = {"participation": 0.5, "callbacks": list(callbacks), **settings}
    return run(method(network=SMALL, optimizer=sgd(0.1)), data, folder, **settings)


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    return rows_of(folder / name)


@pytest.mark.parametrize(
    "rounds",
    [Synchronous(), OverSelection(1.5), Deadline(2.0), FedBuff(4, 2), FedAsync(4)],
    ids=lambda rounds: type(rounds).__name__,
)
def test_it_is_the_mean_over_the_slowest_tenth_and_changes_nothing(tmp_path, rounds):
    plain = result(trained(tmp_path / "plain", rounds=rounds).run_dir)
    watched = trained(tmp_path / "watched", SlowClients(), rounds=rounds).run_dir
    weights, metrics, *others = result(watched)
    found = [float(row.pop(NAME)) for row in metrics]
    assert (weights, metrics, *others) == plain
    own = {int(row["client"]): float(row["accuracy"]) for row in rows(watched, "clients.csv")[-12:]}
    assert found[-1] == pytest.approx(sum(own[id] for id in SLOW) / 2, abs=1e-9)
    assert found[-1] != pytest.approx(sum(own.values()) / 12, abs=1e-3)


def test_it_is_the_same_for_two_workers_and_for_a_run_that_is_continued(tmp_path):
    one = result(trained(tmp_path / "one", SlowClients()).run_dir)
    assert result(trained(tmp_path / "two", SlowClients(), workers=2).run_dir) == one
    half = trained(tmp_path / "half", SlowClients(), max_rounds=1)
    path = str(half.run_dir)
    again = trained(tmp_path / "half", SlowClients(), ckpt_path=path, allow_changed=True)
    assert result(again.run_dir) == one


@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_equal_clients_are_all_slow(tmp_path, method):
    clock = Clock(devices=SameDevice(0.01), network=LINES)
    trainer = trained(tmp_path, SlowClients(), method=method, clock=clock, max_rounds=1)
    (row,) = rows(trainer.run_dir, "metrics.csv")
    assert float(row[NAME]) == pytest.approx(float(row["val/accuracy"]))


FAMILIES = partial(FedMosaic, networks=[partial(ResidualMLP, width=w) for w in (16, 32)], rank=2)


def values_of(method: Method, id: int) -> int:
    """Return how many values a client trains."""
    if not isinstance(method, FedMosaic):
        return sum(one.numel() for one in method.network.parameters())
    family = method.families[id % 2].parameters()
    return sum(one.numel() for one in family if one.requires_grad)


@pytest.mark.parametrize("kind", [FedAvg, FedMPQ, FAMILIES], ids=["FedAvg", "FedMPQ", "families"])
def test_a_round_has_lines_and_the_local_steps_too(kind, tmp_path):
    """By hand: of 40 clients the slowest four, and a fifth that is as slow as the fourth."""
    seconds = {id: float(id) for id in range(40)} | {0: 36.0}
    assert slowest(seconds) == [0, 36, 37, 38, 39]
    assert slowest({4: 0.0}) == [4]
    assert slowest({}) == []
    meter = SlowClients()
    settings = {"local_epochs": 2, "max_local_steps": 3, "max_rounds": 1}
    trainer = trained(tmp_path, meter, method=kind, **settings)
    assert meter._seconds
    for id, took in meter._seconds.items():
        size = 4 * values_of(trainer.method, id)
        examples = len(trainer.data.client(id).train)
        work = sum(([16] * (examples // 16) + [examples % 16] * (examples % 16 > 0)) * 2)
        first = sum((([16] * (examples // 16) + [examples % 16] * (examples % 16 > 0)) * 2)[:3])
        assert first < work
        assert took == pytest.approx(
            0.25 + size / 2e6 + size / 1e6 + Phones().seconds(0, 1, id, first)
        )


@pytest.mark.parametrize(
    ("clock", "given"),
    [
        (None, "callbacks.SlowClients"),
        (Clock(devices=DrawnDevices()), "SlowClients with --trainer.clock.devices DrawnDevices"),
    ],
)
def test_nobody_is_slow_in_some_runs(tmp_path, clock, given):
    with refused(given, "--trainer.clock.devices LogNormalDevices"):
        trained(tmp_path, SlowClients(), clock=clock)


def test_clients_without_validation_examples_are_refused(tmp_path):
    with refused("callbacks.SlowClients", "--data.val_fraction 0.1"):
        run(
            FedAvg(network=SMALL, optimizer=sgd(0.1)),
            images(val_fraction=0.0),
            tmp_path,
            clock=Clock(devices=LogNormalDevices()),
            callbacks=[SlowClients()],
        )


def test_a_report_has_it_beside_the_mean_of_all():
    assert (measure_of(NAME), direction(NAME)) == ("accuracy", 1)
    assert column(NAME).title == "slowest decile of clients (%)"
    names = ["final/accuracy", "val/accuracy", "val/accuracy_worst_decile"]
    assert "val/accuracy" not in [one.metric for one in headline("final/accuracy", [], names)]
    shown = [one.metric for one in headline("final/accuracy", [], [*names, NAME], CLASSIFICATION)]
    assert shown.index(NAME) == shown.index("val/accuracy") + 1
