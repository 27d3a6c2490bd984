"""Sums of fixed-point integers against Python's own integers and fractions, in any order and
grouping."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch
from averaged import digits, sent
from refusals import refused

from fl_lightning.aggregation import exact_sum
from fl_lightning.aggregation.averages import NormClipping
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE, ExactSum, fraction_bits
from fl_lightning.errors import MisuseError
from fl_lightning.methods import (
    AQFL,
    FedAvg,
    FedMPQ,
    FedMPQKD,
    FedNTD,
    FedPQ,
    FedProx,
    Oracle,
    QFedAvg,
)
from fl_lightning.wire import Payload

LARGEST = float(np.nextafter(np.float32(MAX_MAGNITUDE), np.float32(0)))


def uploads(clients: int, size: int, magnitude: float = 1.0):
    """Vectors with values of all sizes, exact halves of a unit among them, and weights n_k /
    n_max."""
    draws = np.random.default_rng(clients)
    values = (
        draws.normal(size=(clients, size))
        * 10.0 ** draws.uniform(-12, 0, (clients, size))
        * magnitude
    )
    values[:, :20] = np.arange(20) * 2.0 ** -(fraction_bits(clients) + 1)
    examples = draws.integers(1, 300, clients)
    examples[0] = 300
    return [torch.tensor(row, dtype=torch.float32) for row in values], [
        n / 300 for n in examples.tolist()
    ]


def by_python(vectors, weights) -> list[int]:
    """The same sum in Python's integers."""
    scale = 2.0 ** fraction_bits(len(vectors))
    return [
        sum(round(w * scale * x) for x, w in zip(column, weights, strict=True))
        for column in torch.stack(vectors).double().T.tolist()
    ]


@pytest.mark.parametrize(
    ("clients", "magnitude"), [(1, 1.0), (5, 1.0), (5, 1e5), (1000, 1.0), (1000, 1e4)]
)
def test_the_sum_is_that_of_integers(clients, magnitude):
    vectors, weights = uploads(clients, 50, magnitude)
    exact = ExactSum(50, clients)
    exact.add(vectors, weights)
    assert exact.integers.tolist() == by_python(vectors, weights)


def test_no_order_and_no_grouping_changes_a_bit(monkeypatch):
    monkeypatch.setattr(exact_sum, "BLOCK_VALUES", 7)  # several blocks
    vectors, weights = uploads(5, 40, 1e4)
    whole = ExactSum(40, 5)
    whole.add(vectors, weights)
    for order in permutations(range(5)):
        here, there = ExactSum(40, 5), ExactSum(40, 5)
        here.add([vectors[k] for k in order[:2]], [weights[k] for k in order[:2]])
        for k in order[2:]:
            there.add([vectors[k]], [weights[k]])
        there.merge(here)
        assert torch.equal(there.integers, whole.integers)
        assert torch.equal(there.mean(sum(weights)), whole.mean(sum(weights)))


@pytest.mark.parametrize("clients", [1, 2, 3, 1000, 1025])
def test_the_largest_values_of_all_clients_do_not_overflow(clients):
    exact = ExactSum(2, clients)
    exact.add([torch.tensor([LARGEST, -LARGEST])] * clients, [1.0] * clients)
    most = clients * round(LARGEST * 2.0 ** fraction_bits(clients))
    assert exact.integers.tolist() == [most, -most]
    assert most < 2**63


def test_the_mean_is_off_by_half_a_unit_for_each_client_at_most():
    vectors, weights = uploads(9, 60)
    exact = ExactSum(60, 9)
    exact.add(vectors, weights)
    total = sum(map(Fraction, weights))
    bound = Fraction(9, 2) / 2 ** fraction_bits(9) / total
    for column, mean in zip(
        torch.stack(vectors).T.tolist(), exact.mean(float(total)).tolist(), strict=True
    ):
        true = sum(Fraction(w) * Fraction(x) for w, x in zip(weights, column, strict=True)) / total
        assert abs(Fraction(mean) - true) <= bound + abs(true) / 2**24  # float32 rounds once more


def test_what_does_not_fit_is_refused():
    for given, vectors, weights in [
        ("2 clients in a sum over 1", [torch.ones(1)] * 2, [1.0, 1.0]),
        ("values up to 1.04858e+06", [torch.tensor([MAX_MAGNITUDE])], [1.0]),
        ("values up to inf", [torch.tensor([-float("inf")])], [1.0]),
        ("values up to nan", [torch.tensor([float("nan")])], [1.0]),
        ("weights 1.5 to 1.5", [torch.ones(1)], [1.5]),
        ("vectors of shapes [(1,), (2,)]", [torch.ones(2)], [1.0]),
    ]:
        with refused(given, kind=MisuseError):
            ExactSum(1, 1).add(vectors, weights)


@pytest.mark.parametrize(
    "method",
    [
        *(FedAvg(), FedAvg(average=NormClipping(0.01)), FedAvg(max_share=0.3), FedProx(), FedNTD()),
        *(QFedAvg(), AQFL(), FedPQ(), FedMPQ(bits=[2, 3, 4.5, 8]), FedMPQKD(), Oracle()),
    ],
    ids=lambda method: (
        f"{type(method).__name__}-{type(method.average).__name__}-{method.max_share}"
    ),
)
def test_the_order_of_uploads_changes_no_bit(method):
    answers = {id: Payload.from_bytes(upload) for id, upload in sent(method, digits()).items()}
    start, results = dict(method.server), []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        method.server = dict(start)
        method.aggregate({id: answers[id] for id in order})
        results.append(method.server)
    moved = [name for name in start if not torch.equal(start[name], results[0][name])]
    assert moved
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)
