"""Client-level privacy in runs: epsilon against published values, the budget, resume, workers and
ranks, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import shutil
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked import result, started
from ranks_program import data_of
from refusals import refused
from scipy import stats
from ten import make
from toy import Points, on_points, run, run_for_nothing

from callbacks import ByzantineClients, StragglerDropout
from fl_lightning import methods
from fl_lightning.aggregation.private import PrivateAggregation
from fl_lightning.client import Assignment
from fl_lightning.conformance.toy import CENTRES, images, small_network
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import CoordinateMedian
from fl_lightning.privacy import ClientPrivacy, RoundAccountant, rounding_length
from fl_lightning.run import metadata
from fl_lightning.run.progress import Progress
from fl_lightning.sampling import Uniform

dp_accounting = pytest.importorskip("dp_accounting")
mpmath = pytest.importorskip("mpmath")

C = 0.5


def private(**settings) -> ClientPrivacy:
    return ClientPrivacy(**{"noise_multiplier": 1.0, "clip_norm": C, **settings})


def fit(folder: Path, method=None, **settings):
    """Rounds of 3 of 6 clients on digits."""
    arguments = {
        "max_rounds": 3,
        "participation": 0.5,
        "local_epochs": 1,
        "privacy": private(),
        **settings,
    }
    return run(method or make("FedAvg", weigh_by="clients"), data_of("FedAvg"), folder, **arguments)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


# Accounting


@pytest.mark.parametrize(
    ("sampled", "z", "steps", "delta", "published"),
    [
        (0.01, 4.0, 10_000, 1e-5, 1.26),  # Abadi et al., CCS 2016, section 5.1
        # tutorials of TensorFlow Privacy, MNIST
        (256 / 60_000, 1.1, 60 * 60_000 / 256, 1e-5, 3.01),
        (256 / 60_000, 1.3, 15 * 60_000 / 256, 1e-5, 1.19),  # the same
        (1e2 / 1e5, 1.0, 1e5, 1e5**-1.1, 2.21),  # McMahan et al., ICLR 2018, table 1
        (1e3 / 1e6, 1.0, 1e6, 1e6**-1.1, 8.13),  # the same
    ],
)
def test_the_library_of_the_accountant_gives_published_values(sampled, z, steps, delta, published):
    """They are of Poisson sampling, of adding or removing one, and of the bound of their day:
    epsilon = min over orders a of rdp(a) + log(1 / delta) / (a - 1). Today's is below it."""
    accountant = dp_accounting.rdp.RdpAccountant(orders=range(2, 65))
    event = dp_accounting.PoissonSampledDpEvent(sampled, dp_accounting.GaussianDpEvent(z))
    accountant.compose(event, int(steps))
    orders = np.arange(2, 65)
    assert min(accountant.rdp + math.log(1 / delta) / (orders - 1)) == pytest.approx(
        published, abs=0.006
    )
    assert accountant.get_epsilon(delta) < published


FIXED = [(1000, 100, 4.0, 50, 1e-4), (1000, 50, 2.0, 100, 1e-5), (100_000, 1000, 1.6, 2000, 1e-6)]
"""Clients, cohort, z, rounds, delta."""


@pytest.mark.parametrize(("clients", "cohort", "z", "rounds", "delta"), FIXED)
def test_epsilon_is_that_of_the_accountant(clients, cohort, z, rounds, delta):
    accountant = dp_accounting.rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    gaussian = dp_accounting.GaussianDpEvent(z / 2)  # in units of 2 C
    event = dp_accounting.SampledWithoutReplacementDpEvent(clients, cohort, gaussian)
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    found = RoundAccountant(z, clients, cohort, delta).epsilon(rounds)
    assert found == pytest.approx(accountant.get_epsilon(delta), rel=1e-9)


@pytest.mark.parametrize(("clients", "cohort", "z", "rounds", "delta"), FIXED)
def test_epsilon_is_theorem_27(clients, cohort, z, rounds, delta):
    """Wang, Balle and Kasiviswanathan (AISTATS 2019) in exact arithmetic, with integer orders
    alone."""
    mpmath.mp.dps = 120
    q, sigma = mpmath.mpf(cohort) / clients, mpmath.mpf(z) / 2

    def moment(power):  # E_Q (P / Q - 1)^power
        terms = (
            mpmath.binomial(power, i)
            * (-1) ** (power - i)
            * mpmath.exp(i * (i - 1) / (2 * sigma**2))
            for i in range(power + 1)
        )
        return mpmath.fsum(terms)

    def term(j):
        plain = mpmath.exp(j * (j - 1) / (2 * sigma**2))
        if j == 2:
            return min(4 * (mpmath.exp(1 / sigma**2) - 1), 2 * plain)
        return min(4 * mpmath.sqrt(moment(j - j % 2) * moment(j + j % 2)), 2 * plain)

    terms = {j: q**j * term(j) for j in range(2, 41)}
    found = []
    for a in range(2, 41):
        amplified = 1 + mpmath.fsum(mpmath.binomial(a, j) * terms[j] for j in range(2, a + 1))
        rdp = rounds * mpmath.log(amplified) / (a - 1)
        found.append(
            float(rdp + mpmath.log(1 - mpmath.mpf(1) / a) - mpmath.log(delta * a) / (a - 1))
        )
    epsilon = RoundAccountant(z, clients, cohort, delta).epsilon(rounds)
    assert epsilon <= min(found) * (1 + 1e-9)
    assert epsilon == pytest.approx(min(found), rel=0.01)  # orders between integers


@pytest.mark.parametrize(("z", "rounds"), [(8.0, 20), (30.0, 50), (2.0, 1)])
def test_a_whole_federation_is_not_sampled(z, rounds):
    """Against the exact epsilon of Gaussian noise (Balle and Wang, ICML 2018), which a bound by
    Renyi divergences exceeds by a little. With a sensitivity of C in place of 2 C it would be below
    it."""
    accountant, mu = RoundAccountant(z, 100, 100, 1e-5), 2 * math.sqrt(rounds) / z
    epsilon = accountant.epsilon(rounds)

    def delta(epsilon):
        cdf = stats.norm.cdf
        return cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)

    assert delta(epsilon) <= 1e-5 < delta(0.8 * epsilon)
    sampled = RoundAccountant(z, 100, 99, 1e-5).epsilon(rounds)
    assert sampled <= epsilon, "the bound for a sample may be worse than that without sampling"


# Runs


def test_epsilon_is_a_metric_of_every_round(tmp_path):
    """Rounds in which clients drop out are accounted as all others."""
    trainer = fit(tmp_path, callbacks=[StragglerDropout(probability=0.5, mode="after")])
    accountant = RoundAccountant(1.0, 6, 3, 1e-5)
    rows = rows_of(trainer.run_dir)
    assert {row["clients/dropped"] for row in rows} != {"0"}
    assert [float(row["privacy/epsilon"]) for row in rows] == [
        accountant.epsilon(r) for r in (1, 2, 3)
    ]


def test_without_noise_epsilon_is_infinite(tmp_path):
    trainer = fit(tmp_path, privacy=private(noise_multiplier=0.0), max_rounds=1)
    assert rows_of(trainer.run_dir)[0]["privacy/epsilon"] == "inf"


@settings(max_examples=25)
@given(st.floats(0.5, 60), st.floats(0.05, 50), st.integers(1, 60))
def test_the_budget_is_never_exceeded(z, budget, rounds):
    """Of any run: the rounds that are done are within the budget, and the next would not be, or is
    not asked."""
    found = PrivateAggregation(private(noise_multiplier=z, max_epsilon=budget))
    found.accountant = RoundAccountant(z, 50, 50, 1e-5)
    if found.accountant.epsilon(1) > budget:
        return  # refused at the start
    record = type("Record", (), {"metrics": {}})()
    while found.rounds < rounds and not found.stop_reason():
        record.round = found.rounds + 1
        found.on_round_end(record, None)
        assert record.metrics["privacy/epsilon"] <= budget
    assert found.rounds == rounds or found.accountant.epsilon(found.rounds + 1) > budget


def test_a_budget_ends_the_run_before_it_is_exceeded(tmp_path, caplog):
    accountant = RoundAccountant(4.0, 6, 3, 1e-5)
    budget = (accountant.epsilon(2) + accountant.epsilon(3)) / 2
    settings = {"privacy": private(noise_multiplier=4.0, max_epsilon=budget), "max_rounds": 9}
    settings["eval_every"] = 9  # the last round is evaluated all the same
    trainer = fit(tmp_path, **settings)
    assert [bool(row["test/accuracy"]) for row in rows_of(trainer.run_dir)] == [False, True]
    assert [float(row["privacy/epsilon"]) for row in rows_of(trainer.run_dir)] == [
        accountant.epsilon(1),
        accountant.epsilon(2),
    ]
    metadata = json.loads((trainer.run_dir / "metadata.json").read_text())
    assert metadata["status"] == "finished"
    assert "would exceed max_epsilon" in metadata["stopped_early"]
    fit(tmp_path, **settings, ckpt_path=str(trainer.run_dir))
    assert len(rows_of(trainer.run_dir)) == 2
    with refused(f"--trainer.privacy.max_epsilon {accountant.epsilon(1) * 0.9:g}"):
        fit(
            tmp_path / "new",
            privacy=private(noise_multiplier=4.0, max_epsilon=accountant.epsilon(1) * 0.9),
        )
    assert not (tmp_path / "new").exists()


def test_the_log_counts_the_rounds_that_are_done(caplog):
    """Also where a smaller budget than they have spent is given since."""
    accountant = RoundAccountant(4.0, 6, 3, 1e-5)
    less = accountant.epsilon(1) * 1.001
    found = PrivateAggregation(private(noise_multiplier=4.0, max_epsilon=less))
    found.accountant, found.rounds, found.begun = accountant, 3, 5
    caplog.set_level("INFO")
    found.on_setup(SimpleNamespace(max_rounds=9))
    assert f"epsilon {accountant.epsilon(5):.4g} at delta 1e-05 after 3 rounds" in caplog.text
    assert "and more than it allows" in caplog.text


def test_c_goes_on_as_configured(tmp_path):
    """It is that of the configuration where it is fixed, whatever it was when it followed."""
    adaptive = private(target_quantile=0.9, clip_learning_rate=10.0)
    begun = fit(tmp_path, privacy=adaptive, max_rounds=2).run_dir
    assert float(rows_of(begun)[1]["privacy/clip_norm"]) != C
    fixed = fit(tmp_path, privacy=private(), ckpt_path=str(begun), allow_changed=True)
    assert float(rows_of(fixed.run_dir)[2]["privacy/clip_norm"]) == C


def test_c_stays_where_messages_are_more_than_rounding(tmp_path):
    """Of loud counts a round can ask for any C."""
    loud = private(target_quantile=0.5, clip_learning_rate=10.0, count_noise=100.0)
    trainer = fit(tmp_path, privacy=loud, max_rounds=6)
    found = [float(row["privacy/clip_norm"]) for row in rows_of(trainer.run_dir)]
    least = 2 * rounding_length(trainer.method.layout.size, bits=40)
    assert min(found) == pytest.approx(least)
    with refused("--trainer.privacy.count_noise 100000.0", "write a smaller one, or null"):
        fit(tmp_path / "louder", privacy=private(target_quantile=0.5, count_noise=1e5))


def test_trying_out_keeps_the_budget(tmp_path):
    accountant, seen = RoundAccountant(4.0, 6, 3, 1e-5), []

    class Count(Meter):
        def on_round_end(self, record, context):
            seen.append(record.metrics["privacy/epsilon"])

    budget = private(noise_multiplier=4.0, max_epsilon=accountant.epsilon(2) * 1.001)
    fit(tmp_path, privacy=budget, fast_dev_run=5, callbacks=[Count()])
    assert seen == [accountant.epsilon(1), accountant.epsilon(2)]


def test_uploads_of_a_round_that_lacks_noise_are_wasted(tmp_path, caplog):
    class LosesInRound2(Stressor):
        def change_bytes(self, upload, *, client, round, context):
            return None if round == 2 and client.id == lost.setdefault(round, client.id) else upload

    lost: dict[int, int] = {}
    settings = {"privacy": private(where="distributed", min_returned=1.0)}
    one = fit(tmp_path / "one", max_rounds=1, **settings)
    two = fit(tmp_path / "two", max_rounds=2, callbacks=[LosesInRound2()], **settings)
    assert result(two.run_dir)[0] == result(one.run_dir)[0]
    row = rows_of(two.run_dir)[1]
    assert (row["clients/trained"], row["clients/dropped"]) == ("0", "3")
    assert row["comm/wasted_bytes"] == row["comm/upload_bytes"] > "0"
    assert "round 2 is void, and the model stays: 2 of 3 clients returned" in caplog.text


def test_a_trial_run_has_all_its_noise(tmp_path, caplog):
    """It asks two clients, whose shares are then the whole noise."""
    fit(tmp_path, privacy=private(where="distributed"), fast_dev_run=1)
    assert "is void" not in caplog.text


class Pull(Meter):
    """Presses Ctrl-C in the third round."""

    def on_round_end(self, record, context):
        if record.round == 3:
            raise KeyboardInterrupt


class PullAtOnce(Meter):
    """Presses Ctrl-C as the first round begins."""

    def on_round_start(self, round, context):
        raise KeyboardInterrupt


def interrupted(monkeypatch, round: int, *arguments, **settings) -> None:
    """A run of the same configuration that ends with a round."""
    add = Progress.add

    def add_and_end(self, fed, record, run):
        add(self, fed, record, run)
        if record.round == round:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "add", add_and_end)
        with pytest.raises(KeyboardInterrupt):
            fit(*arguments, **settings)


def test_no_two_sums_get_one_noise(tmp_path, monkeypatch):
    """Rounds that are there are not made anew with other settings, whose models are others."""
    whole = fit(tmp_path, run_name="run", checkpoint_every=1, keep_checkpoints=3)
    back = {"ckpt_path": str(whole.run_dir / "checkpoints/round_000001"), "run_name": "run"}
    for change in ({"local_epochs": 2}, {"engine": "batched"}):
        with refused("trainer.privacy, changed after round 1", "from the last checkpoint"):
            fit(tmp_path, allow_changed=True, **change, **back)
    interrupted(monkeypatch, 2, tmp_path, checkpoint_every=1, keep_checkpoints=3, **back)
    assert len(rows_of(whole.run_dir)) == 2  # its tables do not say any more how far it had been
    with refused("trainer.privacy, changed after round 1", "from the last checkpoint"):
        fit(tmp_path, local_epochs=2, allow_changed=True, **back)
    again = fit(tmp_path, checkpoint_every=1, keep_checkpoints=3, **back)
    assert result(again.run_dir) == result(whole.run_dir)


def test_what_was_drawn_is_remembered_by_a_start_without_privacy(tmp_path):
    """It takes the tables back, and ends before a round of its own."""
    whole = fit(tmp_path, run_name="run", checkpoint_every=1, keep_checkpoints=3)
    back = {"ckpt_path": str(whole.run_dir / "checkpoints/round_000001"), "run_name": "run"}
    with refused("trainer.privacy, changed after round 1", "from the last checkpoint"):
        fit(tmp_path, local_epochs=2, allow_changed=True, **back)
    assert not (whole.run_dir / "noise_taken_back.csv").exists()  # a refusal writes nothing
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, privacy=None, allow_changed=True, callbacks=[PullAtOnce()], **back)
    assert len(rows_of(whole.run_dir)) == 1
    with refused("trainer.privacy, changed after round 1", "from the last checkpoint"):
        fit(tmp_path, local_epochs=2, allow_changed=True, **back)


EVERY = {"run_name": "run", "checkpoint_every": 1, "keep_checkpoints": 9, "max_rounds": 5}


def test_no_noise_is_drawn_again_where_settings_went_to_and_fro(tmp_path, monkeypatch):
    """The checkpoint that is gone back to has the settings of now, and rounds after it others."""
    interrupted(monkeypatch, 2, tmp_path, **EVERY)
    (folder,) = tmp_path.glob("*/run")
    again = {"ckpt_path": str(folder), "allow_changed": True, **EVERY}
    interrupted(monkeypatch, 3, tmp_path, local_epochs=2, **again)
    back = again | {"ckpt_path": str(folder / "checkpoints/round_000001")}
    with refused("trainer.privacy, changed after round 1", "from the last checkpoint"):
        fit(tmp_path, **back)
    interrupted(monkeypatch, 4, tmp_path, **again)
    with refused("trainer.privacy, changed after round 1", "from the last checkpoint"):
        fit(tmp_path, **back)
    fit(tmp_path, **again)


def test_no_noise_is_drawn_again_where_the_engine_went_to_and_fro(tmp_path, monkeypatch):
    """Rounds 2 and 3 are those of one engine, and the run goes on with another."""
    begun = {"engine": "sequential", **EVERY}
    interrupted(monkeypatch, 3, tmp_path, **begun)
    (folder,) = tmp_path.glob("*/run")
    again = {"ckpt_path": str(folder), "allow_changed": True}
    interrupted(monkeypatch, 4, tmp_path, **EVERY, engine="batched", **again)
    back = {"ckpt_path": str(folder / "checkpoints/round_000001"), "allow_changed": True}
    for engine in ("auto", "batched", "sequential"):
        with refused("trainer.privacy, changed after round 1", "from the last checkpoint"):
            fit(tmp_path, **EVERY, engine=engine, **back)


@pytest.mark.parametrize("goes_on", [False, True])
def test_no_noise_is_drawn_again_by_other_code(goes_on, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = tmp_path / "drawn_network.py"

    def code_of(*parts: object) -> dict[str, str]:
        return {code.stem: sha256(code.read_bytes()).hexdigest()}

    monkeypatch.setattr(metadata, "code_of", code_of)
    code.write_text("VERSION = 1")
    interrupted(monkeypatch, 2, tmp_path, **EVERY)
    (folder,) = tmp_path.glob("*/run")
    code.write_text("VERSION = 2")
    if goes_on:  # from the last checkpoint, which is allowed
        interrupted(monkeypatch, 3, tmp_path, ckpt_path=str(folder), **EVERY)
    back = EVERY | {"ckpt_path": str(folder / "checkpoints/round_000001")}
    with refused("trainer.privacy, changed after round 1", "from the last checkpoint"):
        fit(tmp_path, **back)
    fit(tmp_path, ckpt_path=str(folder), **EVERY)


def test_no_noise_is_drawn_again_before_the_first_checkpoint(tmp_path, monkeypatch):
    """As of a run that is killed before it has one."""
    interrupted(monkeypatch, 2, tmp_path, run_name="run")
    (folder,) = tmp_path.glob("*/run")
    shutil.rmtree(folder / "checkpoints")
    back = {"ckpt_path": str(folder), "run_name": "run"}
    with refused("trainer.privacy, changed after round 0", "from the last checkpoint"):
        fit(tmp_path, local_epochs=2, allow_changed=True, **back)


def test_a_run_that_is_private_no_more_says_so(tmp_path, caplog):
    first = fit(tmp_path, run_name="run", max_rounds=1)
    again = {"ckpt_path": str(first.run_dir), "allow_changed": True, "run_name": "run"}
    fit(tmp_path, privacy=None, **again)
    assert [
        record.message
        for record in caplog.records
        if "it has no epsilon any more" in record.message
    ]


class Familiar(Stressor):
    """Puts clients 0 to 2 in the place of whoever was drawn, or the first of these three times."""

    def __init__(self, repeated: bool):
        self.repeated = repeated

    def change_cohort(self, cohort, *, round, context):
        if self.repeated:
            return cohort[:1] * 3
        return [Assignment(context.data.client(id)) for id in range(3)]


@pytest.mark.parametrize("repeated", [False, True])
def test_a_stressor_takes_clients_away_and_brings_none(repeated, tmp_path):
    """Epsilon is accounted for the clients that were drawn, each of them once."""
    with pytest.raises(MisuseError, match="who were drawn; give each of them one assignment"):
        fit(tmp_path, callbacks=[Familiar(repeated)])


class MoreClients(Meter):
    def on_round_start(self, round, context):
        context.participation = 1.0


def test_a_callback_that_raises_participation_ends_the_run(tmp_path):
    with pytest.raises(MisuseError, match=r"a cohort of 6 clients .* rounds of 3 are accounted"):
        fit(tmp_path, callbacks=[MoreClients()])


@pytest.mark.parametrize("clients", [3, 5])
def test_the_least_clip_that_a_refusal_names_is_taken(clients, tmp_path):
    def one_round(clip_norm):
        share = {"participation": clients / 6, "max_rounds": 1}
        fit(tmp_path, privacy=private(clip_norm=clip_norm), **share)

    with pytest.raises(InputError) as caught:
        one_round(1e-15)
    named = caught.value.instead.removeprefix("write ").removesuffix(" or more")
    one_round(float(named))
    with pytest.raises(InputError, match="the rounding of"):
        one_round(0.8 * float(named))


class TheSame(Uniform):
    def draw(self, view, among, count):
        return among[:count].tolist()


def test_a_draw_of_ones_own_is_not_uniform(tmp_path):
    assert not TheSame.is_uniform
    with refused("TheSame with"):
        fit(tmp_path, sampler=TheSame())


def test_the_clip_of_a_round_is_the_one_that_it_clipped_by(tmp_path):
    rows = rows_of(fit(tmp_path, privacy=private(target_quantile=0.5)).run_dir)
    assert float(rows[0]["privacy/clip_norm"]) == C != float(rows[1]["privacy/clip_norm"])


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("where", ["central", "distributed"])
def test_interrupted_and_continued_is_exact(where, tmp_path):
    """Noise, C, epsilon and the end by the budget."""
    accountant = RoundAccountant(4.0, 6, 3, 1e-5)
    settings = {
        "max_rounds": 9,
        "privacy": private(
            noise_multiplier=4.0,
            max_epsilon=accountant.epsilon(4) * 1.001,
            where=where,
            target_quantile=0.5,
        ),
        "run_name": "run",
    }
    whole = fit(tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "parts", callbacks=[Pull()], **settings)
    (folder,) = (tmp_path / "parts").glob("*/run")
    fit(tmp_path / "parts", ckpt_path=str(folder), allow_changed=True, **settings)
    assert result(whole.run_dir) == result(folder)
    clips = [row["privacy/clip_norm"] for row in rows_of(folder)]
    assert len(set(clips)) == len(clips) == 4


def test_rounds_of_another_privacy_are_not_continued(tmp_path):
    """``allow_changed`` or not: epsilon would be that of rounds that the run did not have."""
    weak = fit(tmp_path, run_name="run", max_rounds=1)
    again = {"ckpt_path": str(weak.run_dir), "allow_changed": True, "run_name": "run"}
    with refused("--ckpt_path with trainer.privacy"):
        fit(tmp_path, privacy=private(noise_multiplier=9.0), **again)
    with refused("--ckpt_path with trainer.privacy"):
        fit(tmp_path, participation=1.0, **again)
    other = fit(tmp_path, privacy=private(delta=1e-4, clip_norm=0.1), **again)
    assert float(rows_of(other.run_dir)[-1]["privacy/epsilon"]) == RoundAccountant(
        1.0, 6, 3, 1e-4
    ).epsilon(3)
    assert [row["privacy/clip_norm"] for row in rows_of(other.run_dir)] == ["0.5", "0.1", "0.1"]
    plain = fit(tmp_path, run_name="plain", privacy=None, max_rounds=1)
    with refused("after 1 rounds"):
        fit(tmp_path, ckpt_path=str(plain.run_dir), allow_changed=True)


def test_workers_change_nothing(tmp_path):
    one, two = (
        fit(
            tmp_path / str(workers),
            workers=workers,
            engine="sequential",
            privacy=private(where="distributed"),
        )
        for workers in (1, 2)
    )
    assert result(one.run_dir) == result(two.run_dir)


@pytest.mark.slow
@pytest.mark.essential
def test_ranks_change_nothing(tmp_path):
    """Central noise once, distributed noise where the client is; one round has clients on one rank
    alone. Of a class whose hooks write to it each rank makes a state of its own, and the log says
    so."""
    program = started(tmp_path / "two", "private")
    from ranks_program import fit_private

    fit_private(tmp_path / "one")
    _, errors = program.communicate(timeout=240)
    assert program.returncode == 0, errors
    for name in ("central", "distributed", "lonely"):
        assert result(tmp_path / "two" / name / "run") == result(tmp_path / "one" / name / "run"), (
            name
        )
    logs = [(tmp_path / n / "writes" / "run" / "run.log").read_text() for n in ("one", "two")]
    assert [log.count("of Counts write to the method differs there") for log in logs] == [0, 1]


def server_after(folder, **settings) -> torch.Tensor:
    """The server's weights after a round of four clients on the quadratic, from zero."""
    method = on_points(make("FedAvg", weigh_by="clients"))
    run(method, Points((3, 1, 2, 1)), folder, max_rounds=1, **settings)
    return method.server["weights"]


def start_of(folder) -> torch.Tensor:
    class Nobody(Stressor):
        def change_upload(self, upload, *, client, round, context):
            return None

    method = on_points(make("FedAvg", weigh_by="clients"))
    run_for_nothing(method, Points((3, 1, 2, 1)), folder, max_rounds=1, callbacks=[Nobody()])
    return method.server["weights"]


def test_hostile_clients_are_clipped_too(tmp_path):
    """Attacks change what the server receives, and the clip is after them: all four together move
    the model by C at most."""
    start, attack = start_of(tmp_path), ByzantineClients(clients=1.0, attack="scale", strength=1e4)
    free = server_after(tmp_path, callbacks=[attack])
    clipped = server_after(tmp_path, callbacks=[attack], privacy=private(noise_multiplier=0.0))
    assert float((free - start).norm()) > 1000
    assert 0.1 * C < float((clipped - start).norm()) <= C * (1 + 1e-6)


def test_a_round_of_equal_clients_by_hand(tmp_path):
    """Two local steps of 0.1 towards each client's optimum, clipped, and the mean of them; every
    client counts once, whatever the number of its examples."""
    start, clip = start_of(tmp_path), 0.6
    found = server_after(tmp_path, privacy=private(noise_multiplier=0.0, clip_norm=clip))
    updates = (1 - 0.9**2) * (CENTRES[:4] - start)
    norms = updates.norm(dim=1, keepdim=True)
    assert float(norms.min()) < clip < float(norms.max())
    torch.testing.assert_close(
        found, start + (updates * (clip / norms).clamp(max=1)).mean(0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("method", "given"),
    [
        *((name, f"--model {name}") for name in ("FedKD", "FedMosaic", "FedMPQ", "FedMPQKD")),
        *((name, f"--model {name}") for name in ("LocalOnly", "Oracle", "Centralised")),
        (("FedAvg", {"average": CoordinateMedian()}), "--model FedAvg"),
        (("FedAvg", {"max_share": 0.5}), "--model.max_share 0.5"),
        (("FedAvg", {"weigh_by": "examples"}), "--model.weigh_by examples"),
        (("FedAvg", {"network": small_network}), "batch normalisation"),
    ],
)
def test_what_no_noise_protects_is_refused(method, given, tmp_path):
    name, settings = (method, {}) if isinstance(method, str) else method
    if name == "Centralised":
        built = methods.Centralised(network=small_network, weigh_by="clients")
    else:
        built = make(name, **{"weigh_by": "clients", **settings})
    with refused(given):
        run(built, images(), tmp_path / "run", privacy=private(), max_rounds=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "FedNTD", "QFedAvg", "AQFL", "FedPQ"])
def test_every_method_whose_message_is_an_update(name, tmp_path):
    """Each runs, and without noise no round moves its model by more than C."""
    before = {}

    class Moved(Meter):
        def on_round_start(self, round, context):
            before["weights"] = context.method.server["weights"]

        def on_round_end(self, record, context):
            moved = (context.method.server["weights"] - before["weights"]).norm()
            assert 0 < float(moved) <= C * (1 + 1e-5)

    fit(
        tmp_path,
        make(name, weigh_by="clients"),
        privacy=private(noise_multiplier=0.0),
        callbacks=[Moved()],
    )


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"clip_norm": 1e5}, "clip_norm 100000"),
        ({"clip_norm": 1e-12}, "clip_norm 1e-12"),
    ],
)
def test_a_clip_that_integers_cannot_hold(settings, given, tmp_path):
    with refused(f"--trainer.privacy.{given}"):
        fit(tmp_path / "run", privacy=private(**settings))
    assert not (tmp_path / "run").exists()


def test_it_is_no_callback(tmp_path):
    with refused("PrivateAggregation among trainer.callbacks"):
        fit(tmp_path / "run", privacy=None, callbacks=[PrivateAggregation(private())])
