"""Robust server averages by hand, and the attacks that they are for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused
from toy import CENTRES, Points, on_points, run, sgd

from callbacks import ByzantineClients
from fl_lightning.aggregation import averages
from fl_lightning.aggregation.average import Average
from fl_lightning.client import Client
from fl_lightning.data import IID, FederatedImages
from fl_lightning.methods import (
    AQFL,
    CoordinateMedian,
    FedAvg,
    FedMPQ,
    FedPQ,
    NormClipping,
    QFedAvg,
    TrimmedMean,
    WeightedMean,
)
from fl_lightning.wire import Codes, Payload

ROBUST = [CoordinateMedian(), TrimmedMean(0.2), NormClipping(1.0)]
by_average = pytest.mark.parametrize(
    "average", [WeightedMean(), *ROBUST], ids=lambda average: type(average).__name__
)


def vectors(*rows) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float32) for row in rows]


def test_the_weighted_mean_is_that_of_numpy():
    torch.manual_seed(0)
    rows, shares = [torch.randn(1000) for _ in range(7)], [0.1, 0.2, 0.3, 0.05, 0.05, 0.25, 0.05]
    expected = np.zeros(1000)
    for row, share in zip(rows, shares, strict=True):
        expected += share * row.numpy().astype(np.float64)
    ours = WeightedMean()(rows, shares, torch.randn(1000)).numpy()
    # float32's own rounding and nothing more
    np.testing.assert_allclose(ours, expected, rtol=1.2e-7, atol=1e-12)


def test_median_by_hand():
    start = torch.zeros(3)
    odd = vectors([1, 9, -1], [3, 5, 0], [2, -100, 1e9])
    # n_k does not enter
    assert CoordinateMedian()(odd, [0.98, 0.01, 0.01], start).tolist() == [2, 5, 0]
    assert CoordinateMedian()([*odd, torch.tensor([7.0, 7, 7])], [0.25] * 4, start).tolist() == [
        2.5,
        6,
        3.5,
    ]
    assert CoordinateMedian()(odd[:1], [1.0], start).tolist() == [1, 9, -1]


def test_trimmed_mean_by_hand():
    rows, start = vectors([1, 50], [2, 40], [3, 30], [4, 20], [1e6, -1e6]), torch.zeros(2)
    shares = [0.1, 0.2, 0.3, 0.3, 0.1]
    middle = [(0.2 * 2 + 0.3 * 3 + 0.3 * 4) / 0.8, (0.2 * 40 + 0.3 * 30 + 0.3 * 20) / 0.8]
    assert TrimmedMean(0.2)(rows, shares, start).tolist() == pytest.approx(middle)
    # rounded up: one at each end
    assert TrimmedMean(0.01)(rows, shares, start).tolist() == pytest.approx(middle)
    assert TrimmedMean(0.49)(rows, shares, start).tolist() == [3, 30]  # at least one stays
    assert torch.equal(TrimmedMean(0)(rows, shares, start), WeightedMean()(rows, shares, start))
    assert TrimmedMean(0.4)(rows[:2], [0.5, 0.5], start).tolist() == [
        1.5,
        45,
    ]  # of two nobody can be left out


def test_norm_clipping_by_hand():
    start = torch.tensor([1.0, 1.0])
    rows = vectors([4, 5], [1, 1.5], [1, 1])  # updates of length 5, 0.5 and 0
    expected = [1 + 0.5 * 2 * 3 / 5, 1 + 0.5 * 2 * 4 / 5 + 0.25 * 0.5]
    assert NormClipping(2.0)(rows, [0.5, 0.25, 0.25], start).tolist() == pytest.approx(expected)
    torch.testing.assert_close(
        NormClipping(1e9)(rows, [0.5, 0.25, 0.25], start),
        WeightedMean()(rows, [0.5, 0.25, 0.25], start),
    )


@by_average
def test_order_of_clients_and_size_of_chunks_do_not_matter(average, monkeypatch):
    torch.manual_seed(0)
    rows, start = [torch.randn(101) for _ in range(9)], torch.randn(101)
    shares = [k / 45 for k in range(1, 10)]
    expected = average(rows, shares, start)
    shuffled = average(rows[::-1], shares[::-1], start)
    torch.testing.assert_close(shuffled, expected, rtol=1e-6, atol=1e-7)
    monkeypatch.setattr(averages, "MAX_ORDERED_VALUES", 50)  # five columns at a time
    assert torch.equal(average(rows, shares, start), expected)
    assert expected.dtype == torch.float32


@pytest.mark.parametrize("average", ROBUST, ids=lambda average: type(average).__name__)
def test_one_client_in_six_moves_a_robust_average_by_little(average):
    torch.manual_seed(0)
    rows, shares, start = [torch.randn(50) for _ in range(6)], [1 / 6] * 6, torch.zeros(50)
    far = average([*rows[:5], torch.full((50,), 1e12)], shares, start)
    assert far.abs().max() < max(row.abs().max() for row in rows[:5])


@pytest.mark.parametrize("trim", [-0.1, 0.5, float("nan")])
def test_bad_trim(trim):
    with refused("TrimmedMean(trim=", "trim: 0.1"):
        TrimmedMean(trim)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_max_norm(max_norm):
    with refused("NormClipping(max_norm=", "max_norm: 1.0"):
        NormClipping(max_norm)


# Methods use it


class Recorder(Average):
    """Notes what it is asked and answers with the first client's weights."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[torch.Tensor], list[float], torch.Tensor]] = []

    def __call__(self, vectors, shares, start):
        self.calls.append((list(vectors), list(shares), start))
        return vectors[0]


@pytest.mark.parametrize("kind", [FedAvg, QFedAvg, AQFL, FedPQ, FedMPQ])
def test_every_averaging_method_hands_it_decoded_weights(kind, tmp_path):
    recorder = Recorder()
    method = kind(optimizer=sgd(0.01), average=recorder)
    data = FederatedImages(dataset="digits", num_clients=4, partition=IID())
    run(method, data, tmp_path, max_rounds=1, participation=0.5, local_epochs=1)
    ((rows, shares, start),) = recorder.calls
    assert len(rows) == 2
    assert sum(shares) == pytest.approx(1)
    assert all(row.shape == start.shape == (method.layout.size,) for row in rows)
    assert torch.equal(method.server["weights"], rows[0])
    for row in rows:  # weights, not updates
        assert 0 < (row - start).norm() < 0.5 * start.norm()


# The attack

SIX = (2, 2, 2, 2, 2, 2)


def fitted(average, attack, tmp_path, **settings) -> torch.Tensor:
    """Where FedAvg ends if one of six clients attacks, all of whom have client 0's optimum."""
    method = on_points(FedAvg(average=average))
    byzantine = ByzantineClients(clients=1 / 6, attack=attack, **{"strength": 20.0, **settings})
    run(
        method,
        Points(SIX, labels=(0,) * 6),
        tmp_path,
        max_rounds=10,
        local_epochs=12,
        callbacks=[byzantine],
    )
    return method.server["weights"]


@pytest.mark.parametrize("attack", ["sign_flip", "scale", "noise"])
def test_the_mean_falls_and_the_median_and_the_trimmed_mean_stand(attack, tmp_path):
    for average in (CoordinateMedian(), TrimmedMean(0.2)):
        torch.testing.assert_close(fitted(average, attack, tmp_path), CENTRES[0], rtol=0, atol=1e-2)
    # 5/6 u - 20/6 u: away from the optimum; 20/6 u + 5/6 u: beyond it, and closer all the same
    if attack == "sign_flip":
        assert (fitted(WeightedMean(), attack, tmp_path) - CENTRES[0]).norm() > 1e3


def test_an_attack_starts_in_its_round(tmp_path):
    never, late = (
        fitted(WeightedMean(), "sign_flip", tmp_path / str(round), round=round) for round in (11, 5)
    )
    torch.testing.assert_close(never, CENTRES[0], rtol=0, atol=1e-2)
    assert (late - CENTRES[0]).norm() > 1


def context(method=None, seed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        seed=seed,
        max_rounds=10,
        method=method,
        data=SimpleNamespace(sizes=np.array([5, 0, *[3] * 98])),
    )


def test_attackers_are_a_seeded_share_of_the_clients_with_data():
    chosen = ByzantineClients(clients=0.2).attackers(context())
    assert len(chosen) == 20
    assert 1 not in chosen
    assert (
        chosen
        == ByzantineClients(clients=0.2).attackers(context())
        != ByzantineClients(clients=0.2).attackers(context(seed=1))
    )
    assert not ByzantineClients(clients=0.0).attackers(context())
    assert len(ByzantineClients(clients=0.001).attackers(context())) == 1


def attacked(
    method, upload: Payload, attack: str, strength: float = 10.0, round: int = 1
) -> Payload:
    client = Client(0, np.arange(5), np.arange(0))
    byzantine = ByzantineClients(clients=1.0, attack=attack, strength=strength)
    return byzantine.change_upload(upload, client=client, round=round, context=context(method))


def trained(kind, **settings):
    """A method, and an honest upload to it."""
    from test_averaging_methods import sent

    method = kind(optimizer=sgd(0.01), **settings)
    return method, Payload.from_bytes(
        sent(method, FederatedImages(dataset="digits", num_clients=4, partition=IID()), order=(0,))[
            0
        ]
    )


@pytest.mark.parametrize(("attack", "factor"), [("sign_flip", -10.0), ("scale", 10.0)])
@pytest.mark.parametrize("kind", [FedAvg, QFedAvg, FedPQ, AQFL, FedMPQ])
def test_what_the_server_reads_of_an_attack(kind, attack, factor):
    method, honest = trained(kind)
    start, client = method.server["weights"], Client(0, np.arange(5), np.arange(0))
    bad = Payload.from_bytes(attacked(method, honest, attack).to_bytes())
    method.check(bad, client)  # well-formed: only an average can help
    assert bad.nbytes == honest.nbytes
    before, after = method.decode(honest), method.decode(bad)
    if kind in (AQFL, FedMPQ):  # codes of weights: they are turned themselves
        coded = method.codec.layout.unpack(before), method.codec.layout.unpack(after)
        for name in method.codec.names:
            torch.testing.assert_close(
                coded[1][name], factor * coded[0][name], rtol=1e-5, atol=1e-6
            )
        rest = [
            method.codec.rest.pack(tensors) for tensors in (*coded, method.layout.unpack(start))
        ]
        torch.testing.assert_close(
            rest[1] - rest[2], factor * (rest[0] - rest[2]), rtol=1e-4, atol=1e-5
        )
    else:
        torch.testing.assert_close(after - start, factor * (before - start), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", [FedAvg, QFedAvg, FedPQ, AQFL, FedMPQ])
def test_noise_is_seeded_by_round_and_client(kind):
    method, honest = trained(kind)
    bad = attacked(method, honest, "noise")
    method.check(bad, Client(0, np.arange(5), np.arange(0)))
    assert (
        bad.to_bytes()
        == attacked(method, honest, "noise").to_bytes()
        != attacked(method, honest, "noise", round=2).to_bytes()
    )
    if kind is FedAvg:
        update = honest.tensor("weights") - method.server["weights"]
        noise = bad.tensor("weights") - honest.tensor("weights")
        assert float(noise.std() / update.square().mean().sqrt()) == pytest.approx(10, rel=0.05)
    assert int(bad.tensor("examples")) == int(honest.tensor("examples"))


def test_other_entries():
    """Soft labels and the like are the update themselves; integers and bit-widths stay."""
    upload = Payload(
        {
            "examples": torch.tensor(3, dtype=torch.int32),
            "probs": torch.tensor([0.2]),
            "bits": Codes(torch.tensor([3]), 4),
        }
    )
    bad = attacked(
        SimpleNamespace(server={}, entry_starts=lambda upload: {}),
        upload,
        "sign_flip",
        strength=2.0,
    )
    assert int(bad.tensor("examples")) == 3
    assert bad.tensor("probs").tolist() == pytest.approx([-0.4])
    assert bad.codes("bits").values.tolist() == [3]


@pytest.mark.parametrize(
    "settings",
    [
        {"clients": 1.5},
        {"attack": "bribe"},
        {"strength": 0.0},
        {"strength": float("inf")},
        {"round": 0},
    ],
)
def test_bad_settings_of_byzantine_clients(settings):
    with refused(f"ByzantineClients({next(iter(settings))}=", f"write {next(iter(settings))}: "):
        ByzantineClients(**settings)
