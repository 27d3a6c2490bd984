"""Rounds without a common start: known answers, an independent reference, and nothing but the seed
decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from all_methods import METHODS
from clocked import Fixed, rows
from ranked import result
from refusals import refused
from ten import SMALL, make
from toy import CENTRES, Points, on_points, run, sgd

from callbacks import ByzantineClients, LabelNoise, TrainingCost
from fl_lightning import methods
from fl_lightning.aggregation.averages import TrimmedMean
from fl_lightning.aggregation.base import Receipt
from fl_lightning.aggregation.robust import MultiKrum
from fl_lightning.client import Client
from fl_lightning.clock import (
    Clock,
    Constant,
    FedAsync,
    FedBuff,
    Hinge,
    LogNormalDevices,
    Polynomial,
    SameDevice,
)
from fl_lightning.clock.asynchronous import IN_FLIGHT, Flights
from fl_lightning.clock.trained import Trained
from fl_lightning.conformance.toy import LR, images, trainer_in
from fl_lightning.data import IID
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import MOON, SCAFFOLD, FedAdam, FedAvg, FedDyn, FedMPQ, FedPer, FedSpeed
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.rng import stream
from fl_lightning.wire import LedgerEntry, Payload

OF_IMAGES = [
    name
    for name in METHODS
    if name != "FedAdaLoRA" and "classification" not in getattr(methods, name).refuses
]
"""The methods that train a small CNN, and no adapters."""


def trained(folder: Path, method=FedAvg, data=None, **settings):
    settings = {"participation": 0.5, "local_epochs": 1, "max_rounds": 6, **settings}
    return run(method(network=SMALL, optimizer=sgd(0.1)), data or images(), folder, **settings)


@pytest.mark.parametrize("method", [FedAvg, FedAdam])
def test_a_buffer_as_large_as_the_concurrency_with_equal_devices_is_fedavg(tmp_path, method):
    """Weights, metrics and bytes, bit for bit; every version takes as long as a client."""
    plain = result(trained(tmp_path / "plain", method).run_dir)
    buffered = trained(
        tmp_path / "buffered", method, clock=Clock(devices=Fixed(2.0)), rounds=FedBuff(3, 3)
    )
    weights, metrics, ledger, clients = result(buffered.run_dir)
    own = ("clock/", "clients/late", "clients/staleness")
    metrics = [{k: v for k, v in row.items() if not k.startswith(own)} for row in metrics]
    ledger = "\n".join(line.rsplit(",", 2)[0] for line in ledger.splitlines()) + "\n"
    assert (weights, metrics, ledger, clients) == plain
    assert [row["clock/seconds"] for row in rows(buffered, "metrics.csv")] == [
        str(2.0 * r) for r in range(1, 7)
    ]


class Simulated:
    """Clients that take exponential times and send nothing: the events alone, of thousands of
    versions."""

    def __init__(self, clients: int, rounds: FedBuff) -> None:
        method = SimpleNamespace(starts=lambda: {"weights": torch.zeros(1)}, trained_values=1)
        data = SimpleNamespace(active=np.arange(clients), client=self.client)
        self.context = SimpleNamespace(method=method, data=data, states={})
        self.flights, self.version = Flights(rounds), 0

    def client(self, id: int) -> Client:
        return Client(id, np.arange(1), np.arange(0))

    def train(self, ids: Sequence[int]) -> Trained:
        upload = Payload({"weights": torch.zeros(1), "examples": torch.tensor(1)})
        receipts = [
            Receipt(self.client(id), LedgerEntry(self.version, id, "trained")) for id in sorted(ids)
        ]
        return Trained([], receipts, dict.fromkeys(ids, upload), dict.fromkeys(ids, 1), receipts)

    def draw(self, free: Sequence[int], count: int, number: int) -> list[int]:
        return stream(1, "draw", self.version, number).choice(free, count, replace=False).tolist()

    def seconds(self, examples, entry: LedgerEntry) -> float:
        return float(stream(1, "time", entry.round, entry.client).standard_exponential())

    def next(self) -> Trained:
        self.version += 1
        return self.flights.collect(self.context, self.version, self.train, self.draw, self.seconds)


@pytest.mark.parametrize(("M", "K"), [(10, 5), (30, 10), (7, 1)])
def test_the_mean_staleness_is_m_minus_1_by_k(M, K):
    """Of any law of durations without ties: when a version is made M - 1 others are at work, and
    each of them is a version staler by it. So what has arrived and what is at work are stale by (M
    - 1) V together after V versions, exactly, and what is at work is not staler after many versions
    than after few."""
    simulated, found, versions = Simulated(200, FedBuff(M, K, Constant())), [], 600 // K
    at_work = []
    for version in range(1, versions + 1):
        found += simulated.next().staleness
        assert len(found) == K * version
        flying = simulated.flights.flying
        assert len(flying) == M - 1, "the last that arrived is replaced in the next version"
        at_work.append(sum(version - flight.version for flight in flying))
        assert sum(found) + at_work[-1] == (M - 1) * version
    half = versions // 2
    assert max(at_work[half:]) < 2 * max(at_work[:half])
    assert abs(np.mean(found) - (M - 1) / K) * K * versions == pytest.approx(at_work[-1])


class Named(Stressor):
    """Loses the uploads of a client, and another never begins."""

    def __init__(self, lost: int, absent: int) -> None:
        self.lost, self.absent = lost, absent

    def change_cohort(self, cohort, *, round, context):
        return [replace(one, trains=one.client.id != self.absent) for one in cohort]

    def change_upload(self, upload, *, client, round, context):
        return None if client.id == self.lost else upload


def reference(ledger: list[dict[str, str]], rounds, start: torch.Tensor) -> torch.Tensor:
    """The last model, float64 ``[6]``, written from the definition: a client that starts at time t
    goes on from the version that is there, and what arrives is taken in the order of the ledger."""
    versions, x = [], start.double()
    ends = [
        max(float(r["ended"]) for r in ledger if r["round"] == str(n))
        for n in range(1, 1 + int(ledger[-1]["round"]))
    ]
    versions.append(x)
    for number in range(1, len(ends) + 1):
        updates = []
        for row in (r for r in ledger if r["round"] == str(number) and r["status"] == "trained"):
            # of versions made at the very instant of its start it has the last
            had = max(v for v in range(number) if v == 0 or ends[v - 1] <= float(row["started"]))
            begin, stale = versions[had], number - 1 - had
            y = begin + LR * (CENTRES[int(row["client"])] - begin)  # one step on its quadratic
            if isinstance(rounds, FedAsync):
                share = rounds.alpha * (1 + stale) ** -0.5
                updates.append((1 - share) * x + share * y - x)
            else:
                updates.append((1 + stale) ** -0.5 * (y - begin))
        if updates:
            x = x + torch.stack(updates).mean(dim=0)
        versions.append(x)
    return x


@pytest.mark.parametrize(
    "rounds", [FedBuff(4, 2), FedBuff(3, 1), FedAsync(3)], ids=["4 of 2", "3 of 1", "async"]
)
@pytest.mark.parametrize("stress", [False, True])
def test_it_ends_where_a_reference_ends(tmp_path, rounds, stress):
    """Six clients with one step each on a quadratic, of times without ties."""
    data, clock = Points((1,) * 6), Clock(devices=Fixed(1.0, 1.37, 2.11, 3.05, 0.83, 1.73))
    method = on_points(FedAvg())
    callbacks = [Named(lost=2, absent=5)] if stress else []
    trainer = run(
        method,
        data,
        tmp_path,
        clock=clock,
        rounds=rounds,
        callbacks=callbacks,
        max_rounds=12,
        local_epochs=1,
    )
    ledger = [row for row in rows(trainer, "ledger.csv") if row["ended"]]
    initial = initial_weights(tmp_path / "initial")
    torch.testing.assert_close(
        method.server["weights"].double(), reference(ledger, rounds, initial), rtol=0, atol=2e-6
    )
    assert max(float(row["clients/staleness"]) for row in rows(trainer, "metrics.csv")) > 0
    statuses = {row["status"] for row in rows(trainer, "ledger.csv")}
    assert statuses == ({"trained", "lost", "dropped"} if stress else {"trained"})


def initial_weights(folder: Path) -> torch.Tensor:
    """The server's weights before the first round, from what it sends."""
    seen = []

    class Sees(Stressor):
        def change_labels(self, labels, *, client, round, context):
            seen.append(context.method.server["weights"].clone())
            return labels

    run(
        on_points(FedAvg()),
        Points((1,) * 6),
        folder,
        callbacks=[Sees()],
        max_rounds=1,
        local_epochs=1,
    )
    return seen[0]


@pytest.mark.parametrize("devices", [LogNormalDevices(), Fixed(1.0)], ids=["unequal", "ties"])
def test_nothing_but_the_seed_decides(tmp_path, devices):
    """Not workers, nor an end in between, with uploads on their way; of equal devices nobody starts
    in every second version."""
    settings = {"clock": Clock(devices=devices), "rounds": FedBuff(4, 2, Hinge(2.0, 1))}
    one = result(trained(tmp_path / "one", **settings).run_dir)
    assert result(trained(tmp_path / "two", workers=2, **settings).run_dir) == one
    half = trained(tmp_path / "half", max_rounds=3, **settings)
    assert half.parts.timing.flights.flying
    again = trained(tmp_path / "half", ckpt_path=str(half.run_dir), allow_changed=True, **settings)
    assert result(again.run_dir) == one


def test_a_trainer_that_fits_twice_has_nobody_at_work_at_first(tmp_path):
    settings = {
        "clock": Clock(devices=LogNormalDevices()),
        "rounds": FedBuff(4, 2),
        "max_rounds": 3,
    }
    trainer = trained(tmp_path, **settings)
    first = result(trainer.run_dir)
    trainer.fit(FedAvg(network=SMALL, optimizer=sgd(0.1)), images(), seed=0)
    assert result(trainer.run_dir) == first


def test_other_rounds_leave_nothing_on_its_way(tmp_path):
    """A run that goes on synchronously, and then asynchronously again, by leave."""
    settings = {"clock": Clock(devices=LogNormalDevices()), "allow_changed": True}
    trainer = trained(tmp_path, rounds=FedBuff(4, 2), max_rounds=2, **settings)
    for rounds, max_rounds in ((None, 4), (FedBuff(3, 2), 6)):
        where = str(trainer.run_dir)
        trainer = trained(
            tmp_path, rounds=rounds, max_rounds=max_rounds, ckpt_path=where, **settings
        )
    assert len(rows(trainer, "metrics.csv")) == 6


def test_a_run_does_not_go_on_without_a_client_that_is_at_work(tmp_path):
    settings = {"clock": Clock(devices=LogNormalDevices()), "rounds": FedBuff(3, 1)}
    begun = trained(tmp_path, max_rounds=2, **settings)
    last = max(begun.parts.timing.in_flight)
    settings |= {"ckpt_path": str(begun.run_dir), "max_rounds": 3, "allow_changed": True}
    files = {path: path.read_bytes() for path in begun.run_dir.rglob("*") if path.is_file()}
    with refused(f"--data.num_clients {last}", f"write {last + 1} or more"):
        trained(tmp_path, data=images(num_clients=last, partition=IID()), **settings)
    assert {path: path.read_bytes() for path in files} == files
    more = trained(tmp_path, data=images(num_clients=last + 1, partition=IID()), **settings)
    assert len(rows(more, "metrics.csv")) == 3


def test_a_run_that_goes_on_without_a_clock_has_nothing_on_its_way(tmp_path):
    trainer = trained(
        tmp_path, rounds=FedBuff(4, 2), max_rounds=2, clock=Clock(devices=LogNormalDevices())
    )
    assert trainer.parts.timing.in_flight
    begun = str(trainer.run_dir)
    trainer = trained(tmp_path, max_rounds=3, ckpt_path=begun, allow_changed=True)
    (checkpoint,) = trainer.run_dir.glob("checkpoints/round_*3*")
    files = [file.read_bytes() for file in checkpoint.rglob("*") if file.is_file()]
    assert files
    assert not any(name.encode() in file for name in IN_FLIGHT for file in files)


@pytest.mark.parametrize(("buffer", "few"), [(4, True), (3, False)])
def test_clients_that_are_too_few_to_be_always_at_work_are_said_once(tmp_path, buffer, few, caplog):
    """Of six, four are at work while ``buffer`` - 1 wait for the version to end."""
    settings = {"clock": Clock(devices=Fixed(1.0)), "rounds": FedBuff(4, buffer)}
    trained(tmp_path, data=images(num_clients=6), max_rounds=2, **settings)
    assert caplog.text.count("of 6 clients fewer than 4 are at work at times") == few


class Shortens(Stressor):
    def change_cohort(self, cohort, *, round, context):
        return [one for one in cohort if one.client.id != 3]


def test_a_client_that_is_taken_out_of_a_cohort_is_not_asked_again(tmp_path):
    settings = {
        "clock": Clock(devices=Fixed(1.0)),
        "rounds": FedBuff(6, 3),
        "callbacks": [Shortens()],
    }
    found = rows(trained(tmp_path, max_rounds=3, **settings), "ledger.csv")
    assert {row["client"] for row in found} == {"0", "1", "2", "4", "5"}


class Huge(Stressor):
    """Sends what is barely accepted by itself."""

    def change_upload(self, upload, *, client, round, context):
        sign = 1.0 if round == 1 else -1.0
        return type(upload)(
            {**upload, "weights": torch.full_like(upload.tensor("weights"), sign * 1e6)}
        )


def test_a_stale_upload_that_grows_too_large_is_rejected_and_the_run_goes_on(tmp_path):
    clock = Clock(devices=Fixed(1.0, 1.37, 2.11, 3.05, 0.83, 1.73))
    trainer = trained(tmp_path, clock=clock, rounds=FedBuff(4, 2), callbacks=[Huge()], max_rounds=8)
    statuses = [row["status"] for row in rows(trainer, "ledger.csv")]
    assert "rejected" in statuses
    assert torch.isfinite(trainer.method.server["weights"]).all()


def test_what_is_too_stale_is_lost(tmp_path):
    """The sixth client takes the time in which the others make ten versions."""
    slow = Clock(devices=Fixed(1.0, 1.1, 1.2, 1.3, 1.4, 6.55))
    trainer = trained(tmp_path, clock=slow, rounds=FedBuff(6, 3, max_staleness=3), max_rounds=13)
    late = [row for row in rows(trainer, "ledger.csv") if row["status"] == "lost"]
    assert {row["client"] for row in late} == {"5"}
    assert len(late) == sum(float(row["clients/late"]) for row in rows(trainer, "metrics.csv"))
    assert all(row["wasted"] == row["upload"] != "0" for row in late)


def test_statistics_of_batchnorm_are_not_moved():
    upload, start, now = (
        torch.tensor([2.0, 0.5]),
        torch.tensor([1.0, 4.0]),
        torch.tensor([10.0, 1.0]),
    )
    assert FedBuff(1, 1, Polynomial(1.0)).present(upload, start, now, 1, trained=1).tolist() == [
        10.5,
        0.5,
    ]
    mixed = FedAsync(1, 0.5, Constant()).present(upload, start, now, 9, trained=1)
    assert mixed.tolist() == [6.0, 0.75]


@pytest.mark.parametrize(
    ("method", "settings", "given"),
    [
        (FedAvg, {"rounds": FedBuff(7, 2)}, "--trainer.rounds.concurrency 7"),
        (FedAvg, {"rounds": FedBuff(2, 7)}, "--trainer.rounds.buffer 7"),
        (SCAFFOLD, {}, "--model SCAFFOLD"),
        (FedMPQ, {}, "--model FedMPQ"),
        (FedPer, {}, "--model FedPer"),
        (MOON, {}, "--model MOON"),
        (FedDyn, {}, "--model FedDyn"),
        (FedSpeed, {}, "--model FedSpeed"),
        (FedAvg, {"callbacks": [LabelNoise(among="cohort")]}, "LabelNoise(among='cohort')"),
        (FedAvg, {"clock": None}, "--trainer.rounds FedBuff"),
        (FedAvg, {"secure_sum": SecureSum()}, "secure_sum"),
        (FedAvg, {"callbacks": [ByzantineClients(attack="alie")]}, "ByzantineClients"),
    ],
    ids=[
        *("concurrency", "buffer", "SCAFFOLD", "FedMPQ", "FedPer", "MOON", "FedDyn", "FedSpeed"),
        *("noise of a cohort", "no clock", "secure sum", "joint attack"),
    ],
)
def test_what_does_not_go_together(tmp_path, method, settings, given):
    settings = {"clock": Clock(devices=SameDevice()), "rounds": FedBuff(2, 2), **settings}
    with refused(given):
        trained(tmp_path, method, **settings)
    assert not any(tmp_path.iterdir())


def test_a_robust_average_of_fewer_than_three_uploads_is_warned_of(tmp_path, caplog):
    for buffer, said in ((2, True), (3, False)):
        caplog.clear()
        settings = {
            "clock": Clock(devices=SameDevice()),
            "rounds": FedBuff(3, buffer),
            "max_rounds": 1,
        }
        trained(tmp_path / f"{buffer}", partial(FedAvg, average=TrimmedMean()), **settings)
        assert ("none can be an outlier" in caplog.text) is said
    with refused(
        "--model.average MultiKrum; a round has 3 uploads", "FedBuff with a larger buffer"
    ):
        trained(tmp_path / "few", partial(FedAvg, average=MultiKrum()), **settings)


class Started(Meter):
    """How many examples the clients train on that start in each version, and how many these clients
    are."""

    def __init__(self) -> None:
        self.examples, self.clients = {}, {}

    def on_client_start(self, client, message, labels, round, context):
        sizes = context.data.epoch_sizes(client)
        self.examples[round] = self.examples.get(round, 0) + sum(sizes)
        self.clients[round] = self.clients.get(round, 0) + 1


def test_a_meter_sees_all_that_start_in_a_version(tmp_path):
    """Several groups, or nobody: what it costs to train them is in proportion to their examples."""
    clock = Clock(devices=Fixed(1.0, 1.37, 2.11, 3.05, 0.83, 1.73))
    started, cost = Started(), TrainingCost()
    trainer = trained(tmp_path, clock=clock, rounds=FedBuff(4, 2), callbacks=[started, cost])
    assert started.clients[1] == 5, "four at first, and one that replaces the first that returns"
    flops = [float(row["cost/train_flops"]) for row in rows(trainer, "metrics.csv")]
    per_example = {flops[round - 1] / examples for round, examples in started.examples.items()}
    assert max(per_example) == pytest.approx(min(per_example), rel=1e-9)
    assert sum(f > 0 for f in flops) == len(started.examples)


def test_a_trial_run_has_two_at_work(tmp_path):
    started, clock = Started(), Clock(devices=LogNormalDevices())
    trainer = trainer_in(
        tmp_path,
        clock=clock,
        rounds=FedBuff(5, 4),
        callbacks=[started],
        fast_dev_run=2,
        max_rounds=9,
    )
    trainer.fit(FedAvg(network=SMALL, optimizer=sgd(0.1)), images())
    assert started.clients[1] <= 3
    assert sum(started.clients.values()) <= 5
    trainer.fast_dev_run = 0
    started.clients.clear()
    trainer.fit(FedAvg(network=SMALL, optimizer=sgd(0.1)), images())
    assert started.clients[1] >= 5


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("name", OF_IMAGES)
def test_a_method_says_whether_its_clients_keep_anything(tmp_path, name):
    """What is found after a round is declared, so that it is refused before the first."""

    class Looks(Meter):
        def on_round_end(self, record, context):
            seen.append((bool(context.states), context.method.keeps_state))

    seen: list[tuple[bool, bool]] = []
    settings = {"callbacks": [Looks()], "max_rounds": 1, "local_epochs": 1}
    run(make(name, optimizer=sgd(0.05)), images(), tmp_path, **settings)
    assert all(keeps <= says for keeps, says in seen)
