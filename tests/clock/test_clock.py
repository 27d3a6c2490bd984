"""Virtual time: known answers, neutral forms, and that nothing of a run depends on who executes
it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
import pytest
import torch
from clocked import Fixed, Loses, column, rows
from outcomes import rows_of
from ranked import result
from refusals import refused
from ten import SMALL
from toy import run, sgd

from callbacks import StragglerDropout
from callbacks.stressors.secure_dropout import leaving
from fl_lightning.clock import (
    Clock,
    Deadline,
    DeviceTable,
    DrawnDevices,
    Lines,
    LogNormalDevices,
    OverSelection,
    SameDevice,
    Synchronous,
)
from fl_lightning.conformance.toy import images
from fl_lightning.errors import MisuseError, RunStopped
from fl_lightning.hooks import Stressor
from fl_lightning.methods import SCAFFOLD, FedAvg
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure.settings import SecureSum

LINES = Lines(down=2e6, up=1e6, latency=0.25)


def trained(folder: Path, method=FedAvg, **settings):
    settings = {"participation": 0.5, "local_epochs": 2, "max_rounds": 4, **settings}
    return run(method(network=SMALL, optimizer=sgd(0.1)), images(), folder, **settings)


def same_training(one, other) -> bool:
    """Weights, metrics but those of clocks, and the bytes of every client."""
    (a, metrics, ledger, clients), (b, more, timed, same) = (
        result(t.run_dir) for t in (one, other)
    )
    virtual = ("clock/", "clients/late")
    more = [{k: v for k, v in row.items() if not k.startswith(virtual)} for row in more]
    timed = [line.rsplit(",", 2)[0] for line in timed.splitlines()]
    return (a, metrics, ledger.splitlines(), clients) == (b, more, timed, same)


def test_equal_devices_by_hand(tmp_path):
    """A round lasts as long as the client with most examples: latency, bytes by rate, seconds of
    examples."""
    trainer = trained(
        tmp_path, clock=Clock(devices=SameDevice(0.01), network=LINES), participation=1.0
    )
    data, ledger, now = trainer.data, rows(trainer, "ledger.csv"), 0.0
    for number, seconds in enumerate(column(trainer, "clock/seconds"), 1):
        took = {}
        for row in (row for row in ledger if row["round"] == str(number)):
            # one by itself goes twice
            examples = 2 * max(len(data.client(int(row["client"])).train), 2)
            took[row["client"]] = (
                0.25 + int(row["download"]) / 2e6 + 0.01 * examples + int(row["upload"]) / 1e6
            )
            assert float(row["started"]) == pytest.approx(now, rel=1e-12)
            assert float(row["ended"]) == pytest.approx(now + took[row["client"]], rel=1e-12)
        length = max(took.values())
        now += length
        assert seconds == pytest.approx(now, rel=1e-9)
        idle = fmean((length - one) / length for one in took.values())
        assert column(trainer, "clock/idle")[number - 1] == pytest.approx(idle)
        assert column(trainer, "clock/round_seconds")[number - 1] == pytest.approx(length)


def test_no_device_and_no_line_take_no_time(tmp_path):
    trainer = trained(tmp_path, clock=Clock(devices=SameDevice(0.0)), max_rounds=2)
    assert column(trainer, "clock/seconds") == column(trainer, "clock/idle") == [0.0, 0.0]


@pytest.mark.parametrize(
    "rounds",
    [None, Synchronous(), OverSelection(1.0), Deadline(math.inf)],
    ids=lambda r: type(r).__name__,
)
@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD])
def test_a_clock_and_neutral_rounds_change_nothing(tmp_path, rounds, method):
    plain = trained(tmp_path / "plain", method)
    clock = Clock(devices=LogNormalDevices(), network=LINES)
    assert same_training(plain, trained(tmp_path / "timed", method, clock=clock, rounds=rounds))


def test_virtual_time_follows_from_the_seed_alone(tmp_path):
    """Not workers, nor an engine, nor an end in between."""
    settings = {
        "clock": Clock(devices=LogNormalDevices(), network=LINES),
        "rounds": OverSelection(1.5),
    }
    one = result(trained(tmp_path / "one", SCAFFOLD, **settings).run_dir)
    assert result(trained(tmp_path / "two", SCAFFOLD, workers=2, **settings).run_dir) == one
    half = trained(tmp_path / "half", SCAFFOLD, max_rounds=2, **settings)
    again = trained(
        tmp_path / "half", SCAFFOLD, ckpt_path=str(half.run_dir), allow_changed=True, **settings
    )
    assert result(again.run_dir) == one


class Breaks(Stressor):
    """The upload of the slowest client is not finite."""

    def change_upload(self, upload, *, client, round, context):
        weights = upload.tensor("weights")
        return type(upload)({**upload, "weights": weights * float("nan" if client.id == 5 else 1)})


@pytest.mark.parametrize(
    "rounds",
    [OverSelection(1.0), Deadline(math.inf), Deadline(60.0)],
    ids=["first", "endless", "long"],
)
def test_a_rejected_upload_has_arrived(tmp_path, rounds):
    class Slow(SameDevice):
        def seconds(self, seed, round, client, examples):
            return 5.0 if client == 5 else 1.0

    settings = {
        "clock": Clock(devices=Slow()),
        "callbacks": [Breaks()],
        "participation": 1.0,
        "max_rounds": 2,
    }
    both = [
        trained(tmp_path / str(n), rounds=form, **settings) for n, form in enumerate((None, rounds))
    ]
    assert [column(one, "clock/seconds") for one in both] == [[5.0, 10.0]] * 2
    assert [column(one, "clients/rejected") for one in both] == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("rounds", [Synchronous(), OverSelection(1.0)])
def test_a_round_whose_uploads_are_all_lost_lasts_as_long_as_its_clients(tmp_path, rounds):
    settings = {"max_rounds": 1, "participation": 1.0, "clock": Clock(devices=SameDevice(0.01))}
    lost = StragglerDropout(probability=1.0, mode="after")
    with pytest.raises(RunStopped, match="no upload of 1 round"):
        trained(tmp_path / "lost", callbacks=[lost], rounds=rounds, **settings)
    (row,) = rows_of(
        min((tmp_path / "lost").rglob("metrics.csv"), key=lambda path: len(path.parts))
    )
    whole = column(trained(tmp_path / "whole", rounds=rounds, **settings), "clock/seconds")
    assert [float(row["clock/seconds"])] == whole != [0.0]


class Leaves(Stressor):
    """Client 5 drops out before a phase of a secure sum; without a phase its upload is lost."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def change_cohort(self, cohort, *, round, context):
        *others, last = sorted(cohort, key=lambda one: one.client.id)
        gone = leaving(last, self.phase) if self.phase else replace(last, returns=False)
        return [*others, gone]


@pytest.mark.parametrize(("phase", "length"), [("", 1), ("masked", 1), ("unmask", 100)])
def test_under_masks_nobody_waits_for_who_sends_nothing(tmp_path, phase, length):
    settings = {
        "clock": Clock(devices=Fixed(1, 1, 1, 1, 1, 100)),
        "callbacks": [Leaves(phase)],
        "participation": 1.0,
        "max_rounds": 2,
    }
    plain = trained(tmp_path / "plain", **settings)
    masked = trained(tmp_path / "masked", secure_sum=SecureSum(), **settings)
    for trainer in (plain, masked):
        assert column(trainer, "clock/round_seconds") == [length, length]
        assert column(trainer, "clients/trained") == [5 + (length == 100)] * 2


def test_examples_are_those_of_the_local_steps(tmp_path):
    """The last batch of an epoch is smaller; counted where they are trained on."""
    seen: dict[int, int] = {}

    class Counts(FedAvg):
        def training_step(self, batch, batch_idx=0):
            seen[self.round] = seen.get(self.round, 0) + len(batch[1])
            return super().training_step(batch, batch_idx)

    for steps in (None, 3):
        seen.clear()
        clock = Clock(devices=SameDevice(1.0))
        settings = {"max_local_steps": steps, "max_rounds": 1, "engine": "sequential", "workers": 1}
        trainer = trained(tmp_path / str(steps), Counts, clock=clock, **settings)
        took = [float(row["ended"]) for row in rows(trainer, "ledger.csv")]
        assert sum(took) == seen[1]


def test_a_trainer_that_fits_twice_starts_the_clock_anew(tmp_path):
    clock = Clock(devices=LogNormalDevices())
    one = trained(tmp_path, clock=clock, max_rounds=2)
    first = column(one, "clock/seconds")
    one.fit(FedAvg(network=SMALL, optimizer=sgd(0.1)), images(), seed=0)
    assert column(one, "clock/seconds") == first


def test_a_device_without_a_time_is_a_bug(tmp_path):
    class Wrong(SameDevice):
        def seconds(self, seed, round, client, examples):
            return math.nan

    with refused("Wrong.seconds gave nan", kind=MisuseError):
        trained(tmp_path, clock=Clock(devices=Wrong()))


class Mixes(Stressor):
    """Every client sends the sum of all uploads, by how many these are squared."""

    def change_uploads(self, uploads, *, round, context):
        total = sum(one.tensor("weights") for one in uploads.values()) / len(uploads) ** 2
        return {id: type(one)({**one, "weights": total}) for id, one in uploads.items()}


@pytest.mark.parametrize(
    "rounds", [OverSelection(1.5), Deadline(0.9)], ids=["over-selection", "deadline"]
)
@pytest.mark.parametrize(("method", "knowing"), [(FedAvg, []), (SCAFFOLD, []), (FedAvg, [Mixes()])])
def test_late_uploads_are_lost_ones(tmp_path, method, knowing, rounds):
    """Weights, what clients keep and bytes are those of a run whose stressor loses just these
    uploads; a stressor that knows all uploads knows those that count."""
    clock = Clock(devices=DrawnDevices("exponential", mean=0.5), network=LINES)
    timed = trained(
        tmp_path / "timed",
        method,
        clock=clock,
        rounds=rounds,
        participation=4 / 6,
        callbacks=knowing,
    )
    late: dict[int, set[int]] = {}
    for row in rows_lost(timed):
        late.setdefault(int(row["round"]), set()).add(int(row["client"]))
    assert sum(map(len, late.values())) == sum(column(timed, "clients/late")) > 0
    share = timed.parts.timing.rounds.invited(4) / 6
    lost = trained(
        tmp_path / "lost", method, participation=share, callbacks=[Loses(late), *knowing]
    )
    assert same_training(lost, timed)
    for row in rows_lost(timed):
        assert row["wasted"] == row["upload"] != "0"


def rows_lost(trainer) -> list[dict[str, str]]:
    return [row for row in rows(trainer, "ledger.csv") if row["status"] == "lost"]


def test_over_selection_keeps_the_first_and_orders_ties_by_id():
    rounds = OverSelection(1.3)
    assert [rounds.invited(m) for m in (1, 3, 10)] == [2, 4, 13]

    def end(cohort: int, answered: dict[int, float], rejected: tuple[int, ...] = ()):
        found = rounds.end(answered, answered.keys() - {*rejected}, cohort=cohort, began=4)
        return found.seconds, found.used, found.late

    assert end(3, {7: 2.0, 3: 1.0, 5: 2.0, 1: 3.0}) == (2.0, {3, 5, 7}, 1)
    assert end(2, {7: 2.0, 3: 1.0, 5: 2.0}) == (2.0, {3, 5}, 1)
    assert end(3, {9: 4.0}) == (4.0, {9}, 0)
    drawn = OverSelection(1.3, ties="drawn").end(
        {3: 2.0, 5: 2.0, 1: 2.0}, {1, 3, 5}, cohort=1, began=3, lot=lambda c: -c
    )
    assert drawn.used == {5}
    assert end(2, {9: 4.0, 1: 5.0, 2: 6.0}, rejected=(9,)) == (6.0, {1, 2}, 0)
    assert end(3, {9: 7.0, 1: 5.0, 2: 6.0}, rejected=(9,)) == (7.0, {1, 2}, 0), (
        "as long as it waits for all"
    )


def test_a_deadline_by_hand():
    def end(least: int, began: int, rejected: tuple[int, ...] = (), **answered: float):
        there = {int(k[1:]): v for k, v in answered.items()}
        found = Deadline(2.0, least).end(there, there.keys() - {*rejected}, cohort=3, began=began)
        return found.seconds, found.used, found.late

    assert end(1, 3, c1=1.0, c2=1.5, c3=2.0) == (2.0, {1, 2, 3}, 0)
    assert end(1, 2, c1=1.0, c2=1.5) == (1.5, {1, 2}, 0)
    assert end(1, 3, c1=1.0, c2=1.5) == (2.0, {1, 2}, 0), (
        "one is lost, which nobody tells the server"
    )
    assert end(1, 2, c1=1.0, c2=2.5) == (2.0, {1}, 1)
    assert end(1, 2, (2,), c1=1.0, c2=1.5) == (1.5, {1}, 0), "a rejected upload has arrived"
    assert end(2, 2, c1=1.0, c2=2.5) == (2.0, set(), 1), (
        "too few: the round is void, and one was late"
    )
    assert end(3, 2, c1=1.0, c2=1.5) == (2.0, set(), 0)
    assert Deadline(math.inf, least=2).end({1: 4.0}, {1}, cohort=2, began=2).used == frozenset()


def test_a_void_round_changes_nothing_and_lasts_until_the_deadline(tmp_path):
    """Of two rounds the clients of the second are ten times slower than the deadline."""
    clock = Clock(devices=SameDevice(1.0))
    trainer = trained(tmp_path / "two", SCAFFOLD, clock=clock, rounds=Deadline(1e6), max_rounds=2)
    assert column(trainer, "clients/late") == [0, 0]

    class Slower(SameDevice):
        def seconds(self, seed, round, client, examples):
            return 1e7 if round == 2 else super().seconds(seed, round, client, examples)

    void = trained(
        tmp_path / "void",
        SCAFFOLD,
        clock=Clock(devices=Slower(1.0)),
        rounds=Deadline(1e6),
        max_rounds=2,
    )
    one = trained(tmp_path / "one", SCAFFOLD, clock=clock, rounds=Deadline(1e6), max_rounds=1)
    assert all(
        torch.equal(void.method.server[name], one.method.server[name]) for name in one.method.server
    )
    assert column(void, "clock/round_seconds")[1] == 1e6
    assert column(void, "clients/late")[1] == column(void, "clients/sampled")[1] == 3


def test_exponential_times_and_over_selection_last_h_n_minus_h_n_minus_m():
    """The mean of the m-th of n exponential variables of rate 1 (Renyi 1953), over 4000 rounds, in
    4 standard errors of the mean."""
    rounds, cohort, count = OverSelection(1.3), 10, 4000
    n, devices = rounds.invited(10), DrawnDevices("exponential", mean=1.0)
    lengths = [
        rounds.end(
            {k: devices.seconds(5, r, k, 1) for k in range(n)}, range(n), cohort=cohort, began=n
        ).seconds
        for r in range(1, count + 1)
    ]
    expected = sum(1 / k for k in range(n - cohort + 1, n + 1))
    error = math.sqrt(sum(1 / k**2 for k in range(n - cohort + 1, n + 1)) / count)
    assert abs(fmean(lengths) - expected) < 4 * error
    assert abs(fmean(lengths) - sum(1 / k for k in range(1, cohort + 1))) > 20 * error, (
        "that of no over-selection"
    )


@pytest.mark.parametrize(
    ("devices", "mean", "std"),
    [
        (DrawnDevices("exponential", mean=2.0), 2.0, 2.0),
        (DrawnDevices("uniform", mean=2.0), 2.0, 2 / math.sqrt(3)),
        (DrawnDevices("normal", mean=9.0, spread=1.5), 9.0, 1.5),
        (DrawnDevices("half_normal", mean=2.0), 2.0, 2 * math.sqrt(math.pi / 2 - 1)),
        (LogNormalDevices(mean=2.0, sigma=0.6), 2.0, 2 * math.sqrt(math.exp(0.36) - 1)),
    ],
    ids=["exponential", "uniform", "normal", "half_normal", "log-normal"],
)
def test_laws_have_their_mean_and_spread(devices, mean, std):
    count = 20_000
    drawn = np.array([devices.seconds(1, 1, client, 1) for client in range(count)])
    assert abs(drawn.mean() - mean) < 4 * std / math.sqrt(count)
    assert drawn.std() == pytest.approx(std, rel=0.06)


def test_a_device_is_kept_and_a_drawn_time_is_not():
    kept, drawn = LogNormalDevices(), DrawnDevices("uniform", per="example", floor=0.2)
    assert kept.seconds(1, 1, 3, 10) == kept.seconds(1, 9, 3, 10) != kept.seconds(1, 1, 4, 10)
    assert drawn.seconds(1, 1, 3, 10) != drawn.seconds(1, 2, 3, 10)
    assert drawn.seconds(1, 1, 3, 20) == pytest.approx(2 * drawn.seconds(1, 1, 3, 10))
    assert min(drawn.seconds(1, r, 1, 1) for r in range(1, 200)) == 0.2


def test_a_table_of_devices_has_times_and_lines(tmp_path):
    path = tmp_path / "phones.csv"
    path.write_text(
        "client,seconds_per_example,down,up\n"
        + "".join(f"{k},0.0{k + 1},1e6,{k + 1}e5\n" for k in range(6))
    )
    clock = Clock(devices=DeviceTable(str(path)), network=Lines(down=1, up=1, latency=0.5))
    found = clock.seconds(0, 1, 2, examples=10, down=2_000_000, up=600_000)
    assert found == pytest.approx(0.5 + 2 + 0.3 + 2)
    assert max(column(trained(tmp_path / "run", clock=clock), "clock/seconds")) > 0
    path.write_text("client,seconds_per_example\n0,0.1\n")
    with refused("client 1", "add one for every client"):
        trained(tmp_path / "few", clock=Clock(devices=DeviceTable(str(path))), participation=1.0)
    for text, given in {
        "client\n0\n": "phones.csv",
        "client,seconds_per_example,down\n0,1,1\n": "phones.csv",
        "client,seconds_per_example,latency\n0,1,5\n": "phones.csv",
        "client,seconds_per_example,Down,upload\n0,1,5,5\n": "column Down",
        "client,seconds_per_example\n0,fast\n": "row 2",
        "client,seconds_per_example\n0,1\n0,2\n": "client 0",
        "client,seconds_per_example,down,up\n0,1,0,1\n": "down and up",
        "client,seconds_per_example\n0.5,1\n": "client 0.5",
        "client,seconds_per_example\n0,2e9\n": "seconds_per_example",
        # else clients 1 and 2, of 5 and 6 seconds
        "client,seconds_per_example\n0,1,5\n1,2,6\n": "phones.csv",
    }.items():
        path.write_text(text)
        with refused(given):
            DeviceTable(str(path))
    pd.DataFrame({"client": [0], "seconds_per_example": [-1.0]}, index=["a"]).to_parquet(
        tmp_path / "named.parquet"
    )
    with refused("named.parquet, row 2"):
        DeviceTable(str(tmp_path / "named.parquet"))
    with refused("none.csv"):
        DeviceTable(str(tmp_path / "none.csv"))


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"rounds": OverSelection()}, "--trainer.rounds OverSelection"),
        (
            {"rounds": Deadline(3.0, least=7), "clock": Clock(devices=SameDevice())},
            "--trainer.rounds.least 7",
        ),
        (
            {
                "rounds": Deadline(3.0),
                "clock": Clock(devices=SameDevice()),
                "secure_sum": SecureSum(),
            },
            "secure_sum",
        ),
        (
            {
                "rounds": Deadline(3.0),
                "clock": Clock(devices=SameDevice()),
                "privacy": ClientPrivacy(noise_multiplier=1.0, clip_norm=1.0),
            },
            "trainer.privacy",
        ),
    ],
    ids=["without a clock", "void for ever", "under masks", "private"],
)
def test_what_does_not_go_together(tmp_path, settings, given):
    with refused(given):
        trained(tmp_path, partial(FedAvg, weigh_by="clients"), **settings)
    assert not any(tmp_path.iterdir())
