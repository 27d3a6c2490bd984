"""Partitions of the field's benchmarks: example for example those of the published code, with the
statistics that papers say, and without its endless loops."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fl_lightning.data import (
    DirichletPerClient,
    LabelsPerClient,
    NIIDBenchDirichlet,
    NIIDBenchIID,
    Partition,
    PFLlibPathological,
    PFLlibPractical,
    Quantity,
    UncappedDirichlet,
)

TEN = np.random.Generator(np.random.Philox(7)).integers(0, 10, 6000)
NIID, PFLLIB = "NIID-Bench at 61b901a", "PFLlib at d832e76"


def owners(partition: Partition, labels: np.ndarray, num_clients: int, seed: int) -> np.ndarray:
    """Who holds each example; a partition that does not cover all examples once is an error."""
    parts = partition(labels, num_clients, seed)
    assert len(parts) == num_clients
    assert all(np.all(np.diff(part) > 0) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    owner = np.empty(len(labels), "<i8")
    for client, part in enumerate(parts):
        owner[part] = client
    return owner


def table(partition: Partition, labels: np.ndarray, num_clients: int, seed: int = 0) -> np.ndarray:
    """The number of examples by client and class."""
    owner, classes = owners(partition, labels, num_clients, seed), int(labels.max()) + 1
    return np.bincount(owner * classes + labels, minlength=num_clients * classes).reshape(
        num_clients, -1
    )


@pytest.mark.parametrize(
    ("code", "partition", "num_clients", "at_0", "at_3"),
    [
        (NIID, NIIDBenchIID(), 23, "b48f2807a5e1", "7aaf3744d503"),
        (NIID, LabelsPerClient(1), 10, "d07d0c4d5d6f", "d07d0c4d5d6f"),
        (NIID, LabelsPerClient(2), 10, "8f7c703e927d", "6d2e7811985a"),
        (NIID, LabelsPerClient(3), 10, "7d779452a683", "809ede300ded"),
        (NIID, LabelsPerClient(2), 23, "58b624c6e9e3", "16acdf3f25df"),
        (NIID, NIIDBenchDirichlet(0.5), 10, "5056c79ebebe", "49b01eb98d04"),
        (NIID, NIIDBenchDirichlet(0.1), 20, "bfe91359a373", "97e51a3f22d7"),
        (NIID, Quantity(0.5), 10, "f0c03dbaa813", "23d00dfa3751"),
        (PFLLIB, PFLlibPathological(2), 20, "08e77804dbeb", "b6d2ddedbb4d"),
        (PFLLIB, PFLlibPathological(2, balanced=True), 20, "b29ef27acbe5", "b29ef27acbe5"),
        (PFLLIB, PFLlibPractical(), 20, "576eecbac6cb", "3fbfdc100f87"),
    ],
    ids=repr,
)
def test_the_assignment_is_that_of_the_published_code(
    code, partition, num_clients, at_0, at_3
) -> None:
    """The digests are of what the published functions returned for these labels after
    ``np.random.seed`` and ``random.seed`` of 0 and 3."""
    found = [
        hashlib.sha256(owners(partition, TEN, num_clients, seed).tobytes()).hexdigest()
        for seed in (0, 3)
    ]
    assert [digest[:12] for digest in found] == [at_0, at_3], code


@pytest.mark.parametrize("labels", [1, 2, 5, 10])
def test_every_client_has_so_many_classes_in_equal_parts(labels: int) -> None:
    counts = table(LabelsPerClient(labels), TEN, 30)
    assert ((counts > 0).sum(axis=1) == labels).all()
    assert all(counts[client, client % 10] > 0 for client in range(30))
    for of_class in counts.T:
        assert np.ptp(of_class[of_class > 0]) <= 1


def test_quantity_skews_sizes_and_no_classes() -> None:
    labels = np.arange(100_000) % 10
    counts = table(Quantity(0.5), labels, 10)
    sizes = counts.sum(axis=1)
    assert sizes.min() >= 9  # the share of 10 is before rounding
    assert sizes.max() > 2 * 10_000
    large = counts[sizes > 5000] / sizes[sizes > 5000, None]
    assert np.abs(large - 0.1).max() < 0.02


def test_shares_of_a_quantity_skew_have_the_right_variance() -> None:
    """One of two shares is Beta(b, b), of variance 1 / (4 (2 b + 1))."""
    labels = np.zeros(1000, np.int64)
    share = [len(Quantity(2.0, min_size=0)(labels, 2, seed)[0]) / 1000 for seed in range(1500)]
    assert np.mean(share) == pytest.approx(0.5, abs=0.02)
    assert np.var(share) == pytest.approx(1 / 20, rel=0.1)


def test_clients_of_their_own_dirichlet_draws_are_equal_in_size_and_skewed_as_they_say() -> None:
    """The expected sum of squares of Dirichlet(b) over C classes is (b + 1) / (C b + 1), and n
    draws from it add (1 - that) / n. The first clients find every class."""
    labels = np.arange(100_003) % 10
    for beta in (0.1, 1.0):
        counts = table(DirichletPerClient(beta), labels, 1000)
        sizes = counts.sum(axis=1)
        assert np.bincount(sizes)[100:].tolist() == [997, 3]
        square = ((counts / sizes[:, None]) ** 2).sum(axis=1)[:500].mean()
        expected = (beta + 1) / (10 * beta + 1)
        assert square == pytest.approx(expected + (1 - expected) / 100, rel=0.06)


def test_without_a_cap_sizes_are_skewed_as_well() -> None:
    """Of C classes of equal size, a client's share of all is the mean of C draws of Beta(b, b)."""
    labels = np.arange(2000) % 4
    shares = [
        len(UncappedDirichlet(0.5, min_size=0)(labels, 2, seed)[0]) / 2000 for seed in range(1500)
    ]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.02)
    assert np.var(shares) == pytest.approx(1 / (4 * 2.0) / 4, rel=0.1)


def test_pathological_clients_hold_classes_in_turn() -> None:
    counts = table(PFLlibPathological(2, balanced=True), TEN, 20)
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert ((counts > 0).sum(axis=0) == 4).all()
    assert counts[0, 0] > 0
    assert counts[0, 1] > 0  # clients 0 to 3 are first in both of the first two classes
    for of_class in counts.T:
        assert np.ptp(of_class[of_class > 0]) <= 3  # the last one takes what division leaves over


EVERY = [
    *(
        NIIDBenchIID(),
        LabelsPerClient(2),
        Quantity(5.0, min_size=1),
        NIIDBenchDirichlet(0.5, min_size=1),
    ),
    *(
        PFLlibPathological(20),
        PFLlibPractical(1.0),
        DirichletPerClient(0.1),
        UncappedDirichlet(0.1),
    ),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("partition", EVERY, ids=repr)
def test_five_hundred_clients_of_a_hundred_classes_come_to_an_end(partition: Partition) -> None:
    labels = np.random.Generator(np.random.Philox(1)).integers(0, 100, 50_000)
    one = owners(partition, labels, 500, 1)
    assert np.bincount(one, minlength=500).min() >= 1
    assert np.array_equal(one, owners(partition, labels, 500, 1))
    assert not np.array_equal(one, owners(partition, labels, 500, 2))


@pytest.mark.parametrize("partition", [NIIDBenchDirichlet(min_size=0), PFLlibPractical()], ids=repr)
def test_no_example_is_dealt_out_to_nobody(partition: Partition) -> None:
    assert owners(partition, TEN[:0], 3, 0).tolist() == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("partition", "labels", "num_clients", "words"),
    [
        (LabelsPerClient(11), TEN, 10, "labels=11; the data have 10 classes; write 10 or less"),
        (LabelsPerClient(1), TEN, 9, "nobody holds one of the 10 classes"),
        (Quantity(0.01), TEN, 500, "draws left a client with fewer than 10 examples"),
        (NIIDBenchDirichlet(0.01), TEN, 500, "draws left a client with fewer than 10 examples"),
        (PFLlibPractical(1e-3), TEN, 200, "draws left a client with fewer than 15 examples"),
        (PFLlibPathological(2), TEN, 12, "do not come out evenly"),
        (PFLlibPathological(11), TEN, 20, "write classes_per_client 10 or less"),
        (PFLlibPathological(10), TEN, 600, "write fewer clients, or balanced true"),
        (DirichletPerClient(), TEN[:9], 10, "num_clients=10; 9 examples"),
        (LabelsPerClient(), TEN, 0, "num_clients=0"),
    ],
    ids=repr,
)
def test_what_cannot_be_dealt_out_is_refused(partition, labels, num_clients, words) -> None:
    with pytest.raises(ValueError, match=words) as error:
        partition(labels, num_clients, 0)
    assert "write" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LabelsPerClient(0),
        lambda: Quantity(0.0),
        lambda: Quantity(float("inf")),
        lambda: NIIDBenchDirichlet(-1.0),
        lambda: PFLlibPractical(batch_size=0),
        lambda: PFLlibPathological(0),
        lambda: DirichletPerClient(float("nan")),
        lambda: UncappedDirichlet(min_size=-1),
    ],
)
def test_constructors_refuse_at_once(make) -> None:
    with pytest.raises(ValueError, match="write"):
        make()
