"""Partitions: covers, caps, sizes, skew, and that they are a function of the seed."""

from __future__ import annotations

import hashlib
import resource
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.data import IID, Dirichlet, Partition, Shards, dirichlet_partition
from fl_lightning.data import partition as partition_module
from fl_lightning.data.partition import _draw, check_memory, make_holdings
from fl_lightning.errors import InputError
from fl_lightning.rng import stream


def is_partition(parts: list[np.ndarray], total: int) -> bool:
    return all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts) and np.sort(
        np.concatenate(parts)
    ).tolist() == [*range(total)]


@settings(max_examples=150, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    num_clients=st.integers(1, 12),
    beta=st.sampled_from([1e-6, 0.1, 0.5, 10.0, 1e300, float("inf")]),
    seed=st.integers(0, 5),
)
def test_dirichlet_is_a_disjoint_cover(
    labels: list[int], num_clients: int, beta: float, seed: int
) -> None:
    parts = dirichlet_partition(labels, num_clients, beta, seed, min_size=0)
    again = dirichlet_partition(labels, num_clients, beta, seed, min_size=0)
    assert len(parts) == num_clients
    assert is_partition(parts, len(labels))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize(
    "partition", [Dirichlet(0.1), Dirichlet(float("inf")), IID(), Shards(2)], ids=repr
)
def test_every_partition_covers_and_follows_the_seed(partition: Partition) -> None:
    labels = np.random.Generator(np.random.Philox(3)).integers(0, 10, 1000)
    one, same, other = partition(labels, 20, 1), partition(labels, 20, 1), partition(labels, 20, 2)
    assert is_partition(one, 1000)
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("partition", "digests"),
    [
        (Dirichlet(0.1), ["3b1231ef3afe", "d8c78d91ccad"]),
        (Dirichlet(0.5, min_size=10), ["2976e8052288", "9dfcfb64e71b"]),
        (IID(), ["5c029262057d", "85bf19dfd3ea"]),
        (Shards(2), ["c7c717873b54", "270a1d991b50"]),
    ],
    ids=repr,
)
def test_a_partition_is_for_ever(partition: Partition, digests: list[str]) -> None:
    """Finished runs are continued and compared by who holds what: these were taken before others
    came."""
    labels = np.random.Generator(np.random.Philox(7)).integers(0, 10, 6000)
    found = [
        hashlib.sha256(
            b"".join(part.astype("<i8").tobytes() + b"|" for part in partition(labels, 20, seed))
        )
        for seed in (0, 3)
    ]
    assert [digest.hexdigest()[:12] for digest in found] == digests


def test_a_full_client_gets_no_more() -> None:
    """With one example of each class, in turn, the cap holds everybody at N / K; without it, the
    skew would break it."""
    parts = dirichlet_partition(np.arange(300), 10, 0.05, seed=0, min_size=0)
    assert [len(part) for part in parts] == [30] * 10
    # from the second class on, whoever had N / K of the first is not served
    by_class = np.split(np.arange(1000), [600])
    for attempt in range(50):
        owner, held = _draw(by_class, 5, 0.3, stream(0, "cap", round=attempt))
        first = np.bincount(owner[:600], minlength=5)
        assert np.array_equal(held[first >= 200], first[first >= 200])
        assert np.array_equal(held, np.bincount(owner, minlength=5))


def test_min_size_holds_and_is_needed() -> None:
    labels = np.arange(400) % 10
    assert min(map(len, dirichlet_partition(labels, 20, 0.1, 0, min_size=0))) < 5
    assert min(map(len, dirichlet_partition(labels, 20, 0.1, 0, min_size=5))) >= 5


def test_skew_falls_with_beta() -> None:
    """Mean number of classes that hold 90 % of a client's examples: few at 0.1, all but one at
    infinity."""
    labels = np.arange(10_000) % 10

    def breadth(beta: float) -> float:
        counts = [
            np.sort(np.bincount(labels[part], minlength=10))[::-1]
            for part in dirichlet_partition(labels, 10, beta, 0, 1)
        ]
        return float(np.mean([np.searchsorted(np.cumsum(c) / c.sum(), 0.9) + 1 for c in counts]))

    assert breadth(0.1) < 4 < breadth(1.0) < 8 < breadth(100.0) <= breadth(float("inf"))


def test_dirichlet_shares_have_the_right_moments() -> None:
    """Two clients, one class: the share is Beta(b, b), of variance 1 / (4 (2 b + 1))."""
    members = [np.arange(2000)]
    for beta in (0.1, 0.5, 5.0):
        share = (
            np.array(
                [_draw(members, 2, beta, stream(1, "moments", round=i))[1][0] for i in range(3000)]
            )
            / 2000
        )
        assert share.mean() == pytest.approx(0.5, abs=0.03)
        assert share.var() == pytest.approx(1 / (4 * (2 * beta + 1)), rel=0.08)


def test_shards_give_each_client_its_number_of_classes() -> None:
    labels = np.random.Generator(np.random.Philox(0)).permutation(np.arange(2000) % 10)
    parts = Shards(2)(labels, 50, 0)
    assert {len(part) for part in parts} == {40}
    assert max(len(np.unique(labels[part])) for part in parts) == 2


@pytest.mark.timeout(120)  # work of clients squared would take hours
def test_a_hundred_thousand_clients_are_an_index_array() -> None:
    labels = np.arange(50_000) % 10
    tracemalloc.start()
    parts = dirichlet_partition(labels, 100_000, 0.1, 0, min_size=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert is_partition(parts, 50_000)
    assert peak < 100e6  # bytes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_clients": 0}, "num_clients=0"),
        ({"beta": 0.0}, "beta=0.0"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"min_size": -1}, "min_size=-1"),
        ({"min_size": 11}, "data.num_clients 9 or less, or data.partition.min_size 10 or less"),
        ({"beta": 0.01, "min_size": 10}, "a larger beta"),
    ],
)
def test_bad_arguments_say_what_to_write(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        dirichlet_partition(np.arange(100) % 2, **{"num_clients": 10, **arguments})  # type: ignore[arg-type]
    assert "write" in str(error.value)
    assert "\n" not in str(error.value)


def test_constructors_refuse_at_once() -> None:
    for make in (lambda: Dirichlet(-1), lambda: Dirichlet(min_size=-1), lambda: Shards(0)):
        with pytest.raises(ValueError, match="write"):
            make()
    with pytest.raises(ValueError, match="cannot be cut into 40 shards"):
        Shards(4)(np.zeros(30), 10, 0)


class Own(Partition):
    """What it returns is given to it."""

    def __init__(self, parts) -> None:
        self.parts = parts

    def __call__(self, labels, num_clients, seed):
        return self.parts


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([np.arange(6), np.arange(3)], "example 0 is listed twice, by the clients 0 and 1"),
        (
            [np.array([0, 0, 1, 2]), np.array([3, 4, 5])],
            "example 0 is listed twice, by the clients 0 and 0",
        ),
        ([np.arange(5), np.array([11])], "client 1; there is no example 11: the data has 6"),
        ([np.arange(5), np.array([-1])], "there is no example -1"),
        ([np.arange(6.0), np.arange(0)], "client 0 is no array of example numbers"),
        ([np.ones(6, bool), np.zeros(6, bool)], "client 0 is no array of example numbers"),
        ([np.arange(6)], "it has 1 parts for 2 clients"),
    ],
)
def test_a_partition_of_ones_own_that_is_none_is_refused(parts, says):
    with pytest.raises(InputError, match=says):
        make_holdings(Own(parts), np.zeros(6, np.int64), 2, 0)


def test_examples_that_an_own_partition_gives_to_nobody_are_counted(caplog):
    held = make_holdings(Own([[4, 0], []]), np.zeros(6, np.int64), 2, 0)
    assert held.sizes.tolist() == [2, 0]
    assert "partition Own gives 4 of 6 examples to nobody" in caplog.text


def test_data_are_refused_by_what_a_container_or_a_limit_leaves(tmp_path, monkeypatch):
    quota, words = tmp_path / "memory.max", r"and this process may have 1,000; write fewer"
    monkeypatch.setattr(partition_module, "QUOTAS", (str(tmp_path / "none"), str(quota)))
    quota.write_text("max\n")
    check_memory("rows", 2000)
    quota.write_text("1000\n")
    check_memory("rows", 1000)
    with pytest.raises(InputError, match=words):
        check_memory("rows", 1001)
    quota.unlink()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, resource.RLIM_INFINITY))
    with pytest.raises(InputError, match=words):
        check_memory("rows", 1001)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    check_memory("rows", 1001)
