"""The mechanism of client-level privacy on messages that are made by hand: clip, noise, shares,
quantile."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from scipy import stats
from ten import make
from toy import run

from fl_lightning.aggregation.averages import WEIGHTED_MEAN
from fl_lightning.aggregation.clipped_sums import clip_addends
from fl_lightning.aggregation.exact_sum import ExactSum, fraction_bits
from fl_lightning.aggregation.private import PrivateAggregation
from fl_lightning.aggregation.sums import Addend, sums_of
from fl_lightning.conformance.toy import images
from fl_lightning.errors import MisuseError
from fl_lightning.methods import FedAdaLoRA, FedVEMoE, HESTLadder, NormClipping
from fl_lightning.privacy import ClientPrivacy, clip_together, discrete_gaussian

C, COHORT = 0.5, 20


class Server:
    """The server's half of a method whose upload is a dictionary of vectors; ``weights`` has a
    start."""

    average = WEIGHTED_MEAN
    seed, cohort = 3, COHORT

    def __init__(self, start=(0.0, 0.0, 0.0)) -> None:
        self.start = torch.tensor(start)

    def addends(self, upload, client_id, weight):
        return {
            name: Addend(vector, weight, 1, self.start if name == "weights" else None)
            for name, vector in upload.items()
        }


def mechanism(cohort: int = COHORT, **settings) -> PrivateAggregation:
    found = PrivateAggregation(
        ClientPrivacy(**{"noise_multiplier": 1.0, "clip_norm": C, **settings})
    )
    found.cohort = cohort
    return found


def message(*weights: float, other: float = 0.0) -> dict[str, torch.Tensor]:
    return {"weights": torch.tensor(weights), "other": torch.tensor([other])}


def total(of: list[dict[str, torch.Tensor]], **settings) -> torch.Tensor:
    """The sum without noise, all its vectors in one."""
    private = mechanism(noise_multiplier=0.0, **settings)
    server = Server([0.0] * len(of[0]["weights"])) if of else Server()
    sums = private.sums(server, dict(enumerate(of)), len(of), 1)
    return torch.cat([sums.total(name) for name in sorted(sums)])


numbers = st.floats(-1e5, 1e5, width=32)
messages = st.builds(message, numbers, numbers, numbers, other=numbers)


@given(st.lists(messages, min_size=2, max_size=8), messages)
def test_one_client_moves_the_sum_by_its_clip(of, other):
    """Removal by C and replacement by 2 C at most, whatever clients send; in integers, so rounding
    is in it."""
    whole = total(of)
    assert float((whole - total(of[1:])).norm()) <= C
    assert float((whole - total([other, *of[1:]])).norm()) <= 2 * C


def test_the_bounds_are_met_and_short_messages_are_left_alone():
    far, back = message(3e4, -1e4, 7.0, other=2e4), message(-3e4, 1e4, -7.0, other=-2e4)
    one = message(0.1, 0.0, 0.0)
    assert float((total([one, far]) - total([one, back])).norm()) == pytest.approx(2 * C, rel=1e-6)
    assert total([message(0.1, 0.2, 0.0, other=0.3)]).tolist() == pytest.approx(
        [0.3, 0.1, 0.2, 0.0], abs=1e-7
    )


def test_one_norm_over_all_tensors():
    """A clip for each of four tensors would leave a message of 2 C."""
    clipped, norm = clip_together([torch.full((25,), C / 5)] * 4, C, 32)
    assert norm == pytest.approx(2 * C)
    assert float(torch.cat(clipped).norm()) == pytest.approx(C, rel=1e-6)
    assert [float(vector.norm()) for vector in clipped] == pytest.approx([C / 2] * 4, rel=1e-6)


@given(st.integers(1, 10**6), st.integers(1, 5000))
def test_rounding_to_integers_is_part_of_the_clip(cohort, size):
    """The integers themselves, of values that all round up, have a norm of at most C."""
    bits = fraction_bits(cohort)
    values = torch.full((size,), C / math.sqrt(size), dtype=torch.float64)
    (clipped,), _ = clip_together([values], C, bits)
    integers = clipped * 2.0**bits
    assert torch.equal(integers, integers.round())
    assert sum(int(value) ** 2 for value in integers) <= (C * 2.0**bits) ** 2


def test_a_clip_without_room_for_rounding_leaves_nothing():
    """C can become as small where it follows a quantile."""
    for message in (torch.zeros(100), torch.ones(100)):
        assert not clip_together([message], 1e-13, 30)[0][0].any()


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e200])
def test_a_message_without_a_norm_counts_as_nothing(value):
    clipped, norm = clip_together([torch.tensor([value, 1.0], dtype=torch.float64)], C, 32)
    assert norm == math.inf
    assert clipped[0].tolist() == [0.0, 0.0]


def noises(rounds: int, clients: int = COHORT, **settings) -> np.ndarray:
    """What a thousand sums of messages of zeros are, ``[rounds, 4]``."""
    private, of = mechanism(**settings), {id: message(0.0, 0.0, 0.0) for id in range(clients)}
    sums = [private.sums(Server(), of, clients, round) for round in range(1, rounds + 1)]
    return np.array([torch.cat([s.total("other"), s.total("weights")]).tolist() for s in sums])


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("z", [0.7, 4.0])
def test_the_noise_has_the_variance_that_is_accounted(z):
    """Over 1 000 sums; the 4 values of a message are independent, and rounds are."""
    found = noises(1000, noise_multiplier=z) / (z * C)
    assert found.mean() == pytest.approx(0, abs=4 / math.sqrt(4000))
    assert found.var() == pytest.approx(1, abs=4 * math.sqrt(2 / 4000))
    assert np.abs(np.corrcoef(found.T) - np.eye(4)).max() < 0.13
    assert abs(np.corrcoef(found[1:].ravel(), found[:-1].ravel())[0, 1]) < 0.07


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("where", ["central", "distributed"])
def test_the_count_of_messages_below_the_clip_has_the_noise_that_is_accounted(where):
    """Over 1 000 sums of messages of zeros, of which each is below C: what the share is off by."""
    private = mechanism(where=where, min_returned=1, target_quantile=0.5, count_noise=3.0)
    of, found = {id: message(0.0, 0.0, 0.0) for id in range(COHORT)}, []
    for round in range(1, 1001):
        private.clip_norm = C  # it would follow the quantile
        sums = private.sums(Server(), of, COHORT, round)
        found.append([COHORT * (sums.share_below - 1), *sums.total("weights").tolist()])
    count = np.array(found)[:, 0]
    assert count.mean() == pytest.approx(0, abs=4 * 3 / math.sqrt(1000))
    assert count.std() == pytest.approx(3, rel=0.08)
    assert np.abs(np.corrcoef(np.array(found).T)[0, 1:]).max() < 0.13


@pytest.mark.slow
@pytest.mark.essential
def test_distributed_noise_is_central_noise():
    """Kolmogorov-Smirnov, with as many clients as have to return; with all of them it is larger,
    never smaller."""
    least = mechanism(where="distributed", min_returned=0.5).least_returned(COHORT)
    assert least == COHORT // 2
    central = noises(600).ravel()
    shares = noises(600, clients=least, where="distributed", min_returned=0.5).ravel()
    assert stats.ks_2samp(central, shares).pvalue > 0.01
    assert stats.kstest(shares, "norm", (0, C)).pvalue > 0.01
    assert stats.kstest(0.9 * shares, "norm", (0, C)).pvalue < 0.01
    everybody = noises(300, where="distributed", min_returned=0.5)
    assert everybody.var() / C**2 == pytest.approx(2, rel=0.15)


@pytest.mark.parametrize("quantile", [None, 0.5])
def test_noise_hides_that_nobody_returned(quantile):
    """Else the model would stay to the bit, which tells it for certain."""
    method = make("FedAvg")
    method.server = {"weights": torch.arange(1000.0)}
    found = mechanism(noise_multiplier=4.0, target_quantile=quantile).sums(method, {}, 0, 1)
    moved = found.mean("weights") - torch.arange(1000.0)
    expected = (
        mechanism(noise_multiplier=4.0, target_quantile=quantile).deviation("weights") / COHORT
    )
    assert float(moved.std()) == pytest.approx(expected, rel=0.1)
    assert mechanism(where="distributed").sums(method, {}, 0, 1) is None


@pytest.mark.parametrize("kind", [FedAdaLoRA, FedVEMoE, HESTLadder])
@pytest.mark.parametrize("where", ["central", "distributed"])
def test_of_sums_of_its_own_a_round_without_uploads_has_none_and_says_so(kind, where, caplog):
    """Nobody knows their names and sizes then."""
    method = kind.__new__(kind)  # which is asked for nothing
    assert mechanism(where=where, target_quantile=0.5).sums(method, {}, 0, 7) is None
    assert f"round 7: nobody returned, and what {kind.__name__} adds up is not known" in caplog.text
    assert "the model stays, without noise, which says that nobody returned" in caplog.text


def test_a_round_in_which_shares_of_noise_are_missing_is_void(caplog):
    private = mechanism(where="distributed", min_returned=0.5)
    of = {id: message(0.0, 0.0, 0.0) for id in range(9)}
    assert private.sums(Server(), of, 9, 1) is None
    assert "the model stays" in caplog.text


@pytest.mark.parametrize("deviation", [0.4, 1.5, 9.0])
def test_the_discrete_gaussian(deviation):
    """Chi-square against its probabilities."""
    draws = discrete_gaussian(np.random.default_rng(1), 40_000, deviation)
    values = np.arange(-80, 81)
    probabilities = np.exp(-(values**2) / (2 * deviation**2))
    expected = 40_000 * probabilities / probabilities.sum()
    seen = np.array([(draws == value).sum() for value in values])
    assert seen.sum() == 40_000
    often = expected > 20
    rest = [[numbers[~often].sum()] for numbers in (seen, expected)]
    seen, expected = (
        np.concatenate([seen[often], rest[0]]),
        np.concatenate([expected[often], rest[1]]),
    )
    assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 0.01


def test_noisy_integers_can_be_masked():
    """What a client adds, noise included, are integers as they stand: one client at a time in int64
    they add up to the sum bit for bit, which is all that a secure sum asks."""
    private, server = mechanism(where="distributed"), Server()
    of = {id: message(0.1 * id, -0.2, 0.3, other=1.0) for id in range(COHORT)}
    sums, added = private.sums(server, of, COHORT, 1), {}
    for id, upload in of.items():
        addends = private.private_addends(server, server.addends(upload, id, 1), id, 1)
        for name, addend in addends.items():
            exact = ExactSum(len(addend.values), COHORT)
            exact.add([addend.values], [addend.weight / addend.most])
            assert torch.equal(exact.integers.double() * 2.0**-private.bits, addend.values)
            added[name] = added.get(name, 0) + exact.integers
    for name in sums:
        assert torch.equal(added[name].double() * 2.0**-private.bits, sums.total(name))


def test_means_are_divided_by_the_cohort_that_was_asked():
    """Clients that drop out count as ones that learned nothing, and the start is added again."""
    private = mechanism(noise_multiplier=0.0)
    server = Server([1.0, 2.0, 3.0])
    of = {id: message(1.1, 2.0, 3.0, other=0.2) for id in range(5)}
    sums = private.sums(server, of, 5, 1)
    assert sums.mean("weights").tolist() == pytest.approx([1 + 0.1 * 5 / COHORT, 2, 3])
    assert sums.mean("other").tolist() == pytest.approx([0.2 * 5 / COHORT])


def test_a_bound_of_the_server_comes_before_the_clip():
    server = Server([1.0, 0.0, 0.0])
    addends = server.addends(message(4.0, 0.0, 0.0), 0, 1)
    clipped, norm = clip_addends(addends, NormClipping(0.25), C, COHORT)
    assert norm == pytest.approx(0.25)
    assert clipped["weights"].values.tolist() == pytest.approx([0.25, 0, 0])


def test_the_clip_follows_the_quantile():
    """Norms are 0.01 to 0.2: from far below and from far above, C comes to the one that 70 % are
    below."""
    of = {id: message(0.01 * (id + 1), 0.0, 0.0) for id in range(COHORT)}
    for first in (0.001, 10.0):
        private = mechanism(clip_norm=first, target_quantile=0.7, count_noise=1.0)
        seen = []
        for round in range(1, 150):
            private.sums(Server(), of, COHORT, round)
            seen.append(private.clip_norm)
        assert np.median(seen[-60:]) == pytest.approx(0.145, rel=0.15)


@given(st.floats(0.1, 20), st.integers(1, 5000), st.none() | st.floats(0.51, 20))
def test_the_count_and_the_message_are_together_as_private_as_z(z, cohort, times):
    """In units of what one client moves, 1/2 for the count and C for the message, by adding or
    removing it."""
    settings = ClientPrivacy(
        noise_multiplier=z,
        clip_norm=C,
        target_quantile=0.5,
        count_noise=None if times is None else times * z,
    )
    parts = settings.message_multiplier(cohort), settings.count_deviation(cohort) / 0.5
    assert sum(part**-2 for part in parts) == pytest.approx(z**-2)


def test_addends_that_no_clip_could_bound_are_refused():
    weighty = {"weights": Addend(torch.zeros(3), 2, 7)}
    with refused("weight 2 / 7", kind=MisuseError):
        clip_addends(weighty, WEIGHTED_MEAN, C, COHORT)
    private, server = mechanism(), Server()
    server.addends = lambda upload, id, weight: {
        "weights": Addend(upload, start=torch.full((3,), 1.0 * id))
    }
    with refused("different starts", kind=MisuseError):
        private.sums(server, {id: torch.zeros(3) for id in range(2)}, 2, 1)
    with refused("a cohort of 21", kind=MisuseError):
        private.sums(SimpleNamespace(cohort=21), {}, 2, 1)


def test_without_the_package_it_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with refused("trainer.privacy", instead='pip install "fl_lightning[privacy]"'):
        run(
            make("FedAvg", weigh_by="clients"), images(), tmp_path / "run",
            privacy=ClientPrivacy(noise_multiplier=1.0, clip_norm=C),
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"delta": 1.0}, "delta"),
        ({"min_returned": 0.0}, "min_returned"),
        ({"target_quantile": 1.5}, "target_quantile"),
        ({"clip_learning_rate": 0.0}, "clip_learning_rate"),
        ({"noise_multiplier": 2.0, "count_noise": 1.0}, "count_noise"),
        ({"max_epsilon": 0.0}, "max_epsilon"),
        ({"noise_multiplier": 0.0, "max_epsilon": 1.0}, "noise_multiplier 0"),
        ({"where": "clients"}, "where"),
    ],
)
def test_settings_out_of_range(settings, name):
    with refused(f"--trainer.privacy.{name}"):
        ClientPrivacy(**{"noise_multiplier": 1.0, "clip_norm": C, **settings})


def test_without_clip_and_noise_it_is_the_plain_mean():
    """The neutral setting of the sums, on one cohort without drop-outs."""
    of = [message(0.1 * id, -0.1, 1.0, other=0.5 * id) for id in range(COHORT)]
    private = mechanism(noise_multiplier=0.0, clip_norm=100.0)
    found, server = private.sums(Server(), dict(enumerate(of)), COHORT, 1), Server()
    plain = sums_of([server.addends(m, id, 1) for id, m in enumerate(of)], WEIGHTED_MEAN, COHORT)
    for name in plain:
        torch.testing.assert_close(found.mean(name), plain.mean(name), rtol=1e-6, atol=1e-9)
