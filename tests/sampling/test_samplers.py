"""Samplers: what they choose, by hand and by formula, what it costs, and that asking changes
nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from clocked import trace
from outcomes import rows_of
from ranked import result
from refusals import refused
from ten import SMALL, TEN, fit, make, same
from torch.nn import functional as F
from toy import run, sgd

from callbacks import LabelNoise, StragglerDropout
from fl_lightning import rng
from fl_lightning.clock import (
    Clock,
    Deadline,
    DrawnDevices,
    FedBuff,
    Lines,
    LogNormalDevices,
    OverSelection,
    SameDevice,
)
from fl_lightning.clock.devices import Devices
from fl_lightning.conformance.toy import images
from fl_lightning.errors import MisuseError
from fl_lightning.hooks import Stressor
from fl_lightning.methods import FedAvg
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.sampling import Oort, PowerOfChoice, Sampler, ServerView, Uniform
from fl_lightning.wire import LedgerEntry


class Fixed(Devices):
    """Each client takes its own time, whatever it has to do."""

    def __init__(self, *times: float) -> None:
        self.times = times

    def seconds(self, seed: int, round: int, client: int, examples: int) -> float:
        return self.times[client % len(self.times)]


def trained(folder: Path, method=FedAvg, **settings):
    settings = {"participation": 0.5, "local_epochs": 1, "max_rounds": 3, **settings}
    made = method(**{"network": SMALL, **getattr(method, "keywords", {})}, optimizer=sgd(0.1))
    return run(made, images(), folder, **settings)


@dataclass
class Server:
    """A view of sizes and losses that are made up; it keeps whom it asked."""

    sizes: np.ndarray
    losses: dict[int, float] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)

    def view(self, round: int = 1, number: int = 0) -> ServerView:
        return ServerView(5, round, number, self.sizes, rng.stream, self.ask)

    def ask(self, ids):
        self.asked = list(ids)
        return {id: self.losses[id] for id in ids if id in self.losses}


class Asks(Sampler):
    """Draws as the uniform one does, and asks everybody before, and those that train for their
    losses."""

    reads_losses = True

    def draw(self, view, among, count):
        assert len(view.ask(among.tolist())) == len(among)
        return Uniform().draw(view, among, count)


@pytest.mark.parametrize("name", TEN)
def test_asking_changes_nothing_that_is_learned(tmp_path, name):
    settings = {"participation": 0.5, "local_epochs": 1}
    plain, _ = fit(make(name), tmp_path / "plain", **settings)
    asked, _ = fit(make(name), tmp_path / "asked", sampler=Asks(), **settings)
    assert same(plain, asked)


def test_candidates_are_drawn_by_their_examples():
    """With d = m = 1 client k is drawn with probability n_k / n."""
    server, count = Server(np.array([5, 1, 0, 10, 4]), {0: 1.0, 1: 9.0, 3: 0.5, 4: 2.0}), 8000
    among = np.array([0, 1, 3, 4])
    drawn = np.bincount(
        [PowerOfChoice(1).draw(server.view(r), among, 1)[0] for r in range(1, count + 1)],
        minlength=5,
    )
    expected = count * server.sizes / server.sizes.sum()
    assert ((drawn - expected)[among] ** 2 / expected[among]).sum() < 16.3, (
        "chi-square, 3 degrees, 0.1 %"
    )


def test_the_largest_losses_of_the_candidates_are_taken():
    """By the candidates' own ids: FLGo ranks them, and takes the clients of these ranks."""
    losses = {k: float(k % 7) for k in range(40)}
    server = Server(np.ones(40, int), losses)
    for round in range(1, 30):
        chosen = PowerOfChoice(12).draw(server.view(round), np.arange(3, 40), 4)
        assert len(server.asked) == len({*server.asked}) == 12
        ranked = sorted(server.asked, key=lambda k: (-losses[k], k))
        assert chosen == ranked[:4], "ties are in the order of ids"
    assert sorted(PowerOfChoice(50).draw(server.view(), np.arange(5), 2)) == [3, 4]
    broken = Server(np.ones(40, int), losses | {7: math.nan, 8: math.inf})
    assert PowerOfChoice(40).draw(broken.view(), np.arange(40), 3) == [6, 13, 20], (
        "what is not finite comes last, or who says so would always be taken"
    )
    silent = Server(np.ones(40, int), {4: 1.0})
    assert PowerOfChoice(40).draw(silent.view(), np.arange(40), 4) == [4], (
        "the others did not answer"
    )


class Spies(Stressor):
    """What the server has in each round, and who is in the cohort."""

    def __init__(self) -> None:
        self.seen = []

    def change_cohort(self, cohort, *, round, context):
        weights = context.method.server["weights"].clone()
        self.seen.append((weights, [one.client.id for one in cohort]))
        return cohort


class Forgets(torch.nn.Sequential):
    """A linear layer after dropout, which a loss that is asked for must not have."""

    def __init__(self, classes: int) -> None:
        super().__init__(
            torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(3 * 16 * 16, classes)
        )


def losses_of(trainer, weights: torch.Tensor, client: int) -> torch.Tensor:
    """Each training example's cross-entropy under these weights, from a network of its own."""
    network, data = Forgets(4).eval(), trainer.data
    torch.nn.utils.vector_to_parameters(weights, network.parameters())
    index = torch.from_numpy(data.client(client).train)
    with torch.no_grad():
        return F.cross_entropy(
            network(data.inputs("train", index)), data.train_target[index], reduction="none"
        )


def test_they_are_asked_for_their_loss_at_x_by_an_independent_look(tmp_path):
    """All six are asked: the three that train have the largest cross-entropy of the server's
    model."""
    spies = Spies()
    method = partial(FedAvg, network=Forgets)
    trainer = trained(tmp_path, method, sampler=PowerOfChoice(6), callbacks=[spies])
    for weights, cohort in spies.seen:
        losses = [losses_of(trainer, weights, k).mean().item() for k in range(6)]
        assert sorted(np.argsort(losses)[3:]) == cohort


def test_who_is_asked_before_noise_has_chosen_its_clients_tells_of_clean_labels(tmp_path):
    noise, spies = LabelNoise(round=2, clients=0.5, labels=1.0, among="cohort"), Spies()
    trained(
        tmp_path,
        partial(FedAvg, network=Forgets),
        sampler=PowerOfChoice(6),
        callbacks=[noise, spies],
        max_rounds=3,
    )
    (_, cohort) = spies.seen[1]
    assert len(cohort) == 3
    assert {*noise.state_dict()["noisy"]} < {*cohort}


def test_asking_needs_devices_that_know_what_a_pass_takes(tmp_path):
    clock = Clock(devices=DrawnDevices())
    with refused("devices.per client", "--trainer.clock.devices.per example"):
        trained(tmp_path, sampler=PowerOfChoice(4), clock=clock)
    trained(tmp_path, sampler=PowerOfChoice(4), clock=Clock(devices=DrawnDevices(per="example")))


def test_what_asking_costs_by_hand(tmp_path):
    """Three of four candidates train. Client k computes k + 1 seconds for its loss and again for
    its round; the round begins when the last has answered, and nobody is sent the model twice."""
    clock = Clock(devices=Fixed(1, 2, 3, 4, 5, 6), network=Lines(down=1e5, up=1e5, latency=0.5))
    trainer = trained(tmp_path / "run", sampler=PowerOfChoice(4), clock=clock, max_rounds=1)
    plain = rows_of(trained(tmp_path / "plain", max_rounds=1).run_dir / "ledger.csv")[0]
    down, up = int(plain["download"]), int(plain["upload"])
    found, (metrics,) = (
        rows_of(trainer.run_dir / "ledger.csv"),
        rows_of(trainer.run_dir / "metrics.csv"),
    )
    answer = int(found[-1]["upload"])
    assert [row["status"] for row in found] == ["trained"] * 3 + ["asked"]
    assert {row["download"] for row in found} == {str(down)}
    assert [int(row["upload"]) for row in found] == [up + answer] * 3 + [answer]
    assert 0 < answer < 100
    lead = 0.5 + down / 1e5 + max(int(row["client"]) + 1 for row in found) + answer / 1e5
    for row in found[:3]:
        assert float(row["started"]) == 0
        assert float(row["ended"]) == pytest.approx(
            lead + 0.5 + int(row["client"]) + 1 + up / 1e5, rel=1e-12
        )
    assert float(found[-1]["ended"]) == pytest.approx(
        0.5 + down / 1e5 + int(found[-1]["client"]) + 1 + answer / 1e5, rel=1e-12
    )
    assert float(metrics["clock/seconds"]) == max(float(row["ended"]) for row in found)
    counts = ("clients/asked", "clients/sampled", "clients/trained", "clients/dropped")
    assert [float(metrics[name]) for name in counts] == [4, 3, 3, 0]
    assert float(metrics["comm/upload_bytes"]) == sum(int(row["upload"]) for row in found)


class AsksInParts(Asks):
    def draw(self, view, among, count):
        half = len(among) // 2
        losses = view.ask(among[:half].tolist()) | view.ask(among[half:].tolist())
        assert losses.keys() == {*among.tolist()}
        return Uniform().draw(view, among, count)


class AsksAgain(Asks):
    def draw(self, view, among, count):
        view.ask(among.tolist())
        view.ask(among[:1].tolist())


def test_asking_in_parts_costs_what_asking_once_does(tmp_path):
    for clock in (None, Clock(devices=Fixed(6, 2, 3, 4, 5, 1))):
        once, parts = (
            trained(tmp_path / f"{clock is None} {type(one).__name__}", sampler=one, clock=clock)
            for one in (Asks(), AsksInParts())
        )
        assert result(parts.run_dir) == result(once.run_dir)
    with pytest.raises(MisuseError, match=r"AsksAgain\.draw, which asks a client twice"):
        trained(tmp_path / "again", sampler=AsksAgain())


class SlowAtFirst(Devices):
    """Client 5 takes 20 seconds in round 1; everybody else takes 2."""

    def seconds(self, seed: int, round: int, client: int, examples: int) -> float:
        return 20 if (round, client) == (1, 5) else 2


def test_waiting_for_answers_ends_with_the_round_by_hand(tmp_path):
    """In round 1 client 5 answers after 20 seconds, and the deadline of 10 ends the round: it has
    worked until then, and the five others for 2 seconds."""
    settings = {"clock": Clock(devices=SlowAtFirst()), "rounds": Deadline(10), "participation": 1.0}
    trainer = trained(tmp_path, sampler=Asks(), max_rounds=2, **settings)
    found = rows_of(trainer.run_dir / "metrics.csv")
    assert [float(row["clock/round_seconds"]) for row in found] == [10, 4]
    assert [float(row["clock/idle"]) for row in found] == pytest.approx([1 - 20 / 60, 0])


def test_who_goes_while_it_waits_for_answers_has_waited_until_then_by_hand(tmp_path):
    """Clients answer after 1 second or after 100; client 0 goes offline at 2, when it has waited
    for one, and the two others that are taken have worked for 2 of the 101 seconds, or for 101."""

    class Takes(Asks):
        def draw(self, view, among, count):
            super().draw(view, among, count)
            return [0, 2, 5]

    always = [[0, 1000]]
    online = trace(tmp_path, [[0, 2]], *[always] * 5, length=1000)
    clock = Clock(devices=Fixed(1, 1, 1, 1, 1, 100), availability=online)
    trainer = trained(tmp_path / "run", sampler=Takes(), clock=clock, max_rounds=1)
    (found,) = rows_of(trainer.run_dir / "metrics.csv")
    assert float(found["clock/round_seconds"]) == 200
    assert float(found["clock/idle"]) == pytest.approx(1 - (1 + 2 + 200) / 600)


def test_who_is_asked_and_drops_out_has_times_in_the_ledger(tmp_path):
    """It was at work until it had answered."""
    clock, drops = Clock(devices=Fixed(1, 2, 3, 4, 5, 6)), StragglerDropout(0.5)
    trainer = trained(tmp_path, sampler=PowerOfChoice(4), clock=clock, callbacks=[drops])
    found = rows_of(trainer.run_dir / "ledger.csv")
    gone = [row for row in found if row["status"] == "dropped"]
    assert gone
    for row in gone:
        assert int(row["download"]) > 0
        assert float(row["ended"]) - float(row["started"]) == int(row["client"]) + 1
    assert all(row["ended"] for row in found)


def known(oort: Oort, *entries: tuple[float, int, float]) -> np.ndarray:
    oort.known = dict(enumerate(entries))
    return np.arange(len(entries))


def test_oorts_score_by_hand():
    oort = Oort(pace=50.0, clip=0.5)
    ids = known(oort, (10.0, 1, 1.0), (30.0, 4, 2.0), (20.0, 9, 8.0))
    assert oort.preferred_seconds() == 2.0
    temporal = [math.sqrt(0.1 * math.log(10) / last) for last in (1, 4, 9)]
    expected = [0 + temporal[0], 0.5 + temporal[1], (0.5 + temporal[2]) * (2 / 8) ** 2]
    assert oort.scores(10, ids) == pytest.approx(expected, rel=1e-12)
    oort.percentile = 100.0
    assert oort.scores(10, ids)[2] == pytest.approx(0.5 + temporal[2])


def test_oort_explores_the_largest_and_exploits_the_best():
    server, oort = (
        Server(np.arange(1, 101)),
        Oort(0.4, decay=1.0, explore_least=0.0, breadth=2, widen=1),
    )
    known(oort, *[(float(k == 7) + float(k == 9), 1, 1.0) for k in range(50)])
    explored, exploited = set(), set()
    for round in range(1, 200):
        chosen = oort.draw(server.view(round), np.arange(100), 5)
        assert len(chosen) == len({*chosen}) == 5
        exploited |= {*chosen[:3]}
        explored |= {*chosen[3:]}
        assert chosen[:3] == oort.exploited
    assert explored == {96, 97, 98, 99}, "two of the four with most examples of those never used"
    assert {7, 9} < exploited <= {*range(50)}
    # once all are known nobody is left to explore: the authors' code then asks those that it
    # explored last again
    assert len({*oort.draw(server.view(), np.arange(20), 5)}) == 5
    assert sorted(oort.draw(server.view(), np.array([60, 61]), 2)) == [60, 61]


def test_oorts_cut_off_and_share_of_the_unknown():
    server, oort = Server(np.ones(200, int)), Oort(widen=1, cut_off=0.95, clip=1.0)
    ids = known(oort, *[(100.0 - k, 1, 1.0) for k in range(100)])
    for round in range(1, 120):
        chosen = oort.draw(server.view(round), np.arange(200), 20)
        used = [id for id in chosen if id < 100]
        assert len(used) == int((1 - max(0.3, 0.9 * 0.98**round)) * 20)
        scores = oort.scores(round, ids)
        assert scores[used].min() >= 0.95 * scores[len(used) - 1]


def test_oort_explores_until_all_are_known_however_small_a_cohort_is():
    for count in (1, 2, 3):
        server, oort = Server(np.ones(12, int)), Oort()
        for round in range(1, 100):
            for id in oort.draw(server.view(round), np.arange(12), count):
                oort.known[id] = (1.0, round, 1.0)
        assert len(oort.known) == 12


def test_a_loss_that_is_not_finite_ends_no_run():
    """Weights that an attack has blown up give inf and NaN: such a client is not the best one for
    that."""
    server, oort = Server(np.full(6, 5), {0: 1.0, 1: math.nan, 2: math.inf, 3: 2.0}), Oort()
    assert PowerOfChoice(6).draw(server.view(), np.arange(6), 3) == [3, 0, 1]
    oort.sizes = server.sizes
    oort.learn(1, [entry(1, id, 1.0) for id in range(4)], server.losses)
    assert {id: one[0] for id, one in oort.known.items()} == {0: 5.0, 1: 7.5, 2: 7.5, 3: 10.0}
    oort.learn(2, [entry(2, 0, 1.0)], {0: math.nan})
    assert oort.known[0] == (5.0, 2, 1.0)
    assert len({*oort.draw(server.view(3), np.arange(6), 4)}) == 4


def entry(round: int, client: int, seconds: float, status: str = "trained") -> LedgerEntry:
    return LedgerEntry(round, client, status, started=10.0, ended=10.0 + seconds)


def test_what_oort_learns_and_the_pacer():
    oort = Oort(pace=30.0, step=5.0, window=2)
    oort.sizes = np.array([4, 6, 10])
    oort.learn(1, [entry(1, 0, 2.0), entry(1, 1, 3.0)], {0: 0.5, 1: 2.0})
    assert oort.known == {0: (2.0, 1, 2.0), 1: (12.0, 1, 3.0)}
    others = [entry(2, 2, 9.0, "lost"), LedgerEntry(2, 1, "dropped"), entry(2, 0, 1.0, "asked")]
    oort.learn(2, others, {})
    assert oort.known == {0: (2.0, 1, 2.0), 1: (12.0, 1, 3.0), 2: (7.0, 2, 9.0)}
    first = Oort()
    first.sizes = np.array([4, 6, 10])
    first.learn(1, [entry(1, 2, 9.0, "late"), entry(1, 0, 2.0), entry(1, 1, 3.0)], {0: 0.5, 1: 2.0})
    assert first.known[2] == (7.0, 1, 9.0)  # the mean of what this round told
    oort.learn(2, [entry(2, 1, 3.0)], {1: math.nan})
    assert oort.known[1] == (12.0, 2, 3.0)
    oort.known[1] = (12.0, 1, 3.0)
    again = Oort(window=2)
    again.load_state_dict(oort.state_dict())
    assert again.known == oort.known
    for gained, expected in (
        ([10, 10, 10, 10.5], 35.0),
        ([10, 10, 20, 20], 30.0),
        ([1, 1, 10, 10], 25.0),
        ([0, 0, 0, 0], 35.0),
    ):
        oort.percentile, oort.gained = 30.0, []
        for round, value in enumerate(gained, 1):
            oort.exploited, oort.known[0] = [0], (0.0, 1, 1.0)
            oort.learn(round, [entry(round, 0, 1.0)], {0: value / 4})
        assert oort.percentile == expected, gained


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    "make_sampler", [lambda: PowerOfChoice(5), lambda: Oort(explore=0.5)], ids=["choice", "oort"]
)
def test_nothing_but_the_seed_decides(tmp_path, make_sampler):
    """Not workers, nor an end in between, nor a fit before this one."""

    def settings():
        clock = Clock(devices=LogNormalDevices(), network=Lines(up=1e5))
        return {
            "sampler": make_sampler(),
            "clock": clock,
            "rounds": OverSelection(1.3),
            "max_rounds": 6,
        }

    trainer = trained(tmp_path / "one", **settings())
    one = result(trainer.run_dir)
    assert result(trained(tmp_path / "two", workers=2, **settings()).run_dir) == one
    half = trained(tmp_path / "half", **{**settings(), "max_rounds": 3})
    trained(tmp_path / "half", ckpt_path=str(half.run_dir), allow_changed=True, **settings())
    assert result(half.run_dir) == one
    trainer.fit(FedAvg(network=SMALL, optimizer=sgd(0.1)), images(), seed=0)
    assert result(trainer.run_dir) == one
    uniform = trained(tmp_path / "uniform", **{**settings(), "sampler": Uniform()})
    none = trained(tmp_path / "none", **{**settings(), "sampler": None})
    assert result(uniform.run_dir) == result(none.run_dir) != one


def test_oort_learns_from_a_run(tmp_path):
    """Utilities are n_k times the root mean square of the losses of the model that was sent, in
    float32."""
    spies = Spies()
    clock = Clock(devices=Fixed(1, 2, 3, 4, 5, 6))
    method = partial(FedAvg, network=Forgets)
    trainer = trained(
        tmp_path, method, sampler=Oort(), clock=clock, max_rounds=1, callbacks=[spies]
    )
    ((weights, cohort),) = spies.seen
    assert trainer.parts.sampler.known.keys() == {*cohort}
    for k in cohort:
        losses = losses_of(trainer, weights, k)
        utility = len(losses) * losses.square().mean().sqrt().item()
        assert trainer.parts.sampler.known[k] == (pytest.approx(utility, rel=1e-5), 1, k + 1)


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"sampler": Oort(), "clock": None}, "--trainer.sampler Oort"),
        ({"sampler": Oort(), "rounds": FedBuff(2, 2)}, "with --trainer.rounds FedBuff"),
        ({"sampler": PowerOfChoice(6), "secure_sum": SecureSum()}, "secure_sum"),
        (
            {
                "sampler": PowerOfChoice(6),
                "privacy": ClientPrivacy(noise_multiplier=1.0, clip_norm=1.0),
            },
            "trainer.privacy",
        ),
        ({"sampler": PowerOfChoice(2)}, "--trainer.sampler.candidates 2"),
        ({"sampler": PowerOfChoice(7)}, "--trainer.sampler.candidates 7"),
    ],
    ids=["no clock", "asynchronous", "masks", "privacy", "few", "many"],
)
def test_what_does_not_go_together(tmp_path, settings, given):
    settings = {"clock": Clock(devices=SameDevice()), **settings}
    with refused(given):
        trained(tmp_path, partial(FedAvg, weigh_by="clients"), **settings)
    assert not any(tmp_path.iterdir())
