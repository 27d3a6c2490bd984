"""Index arrays say exactly what a loop over clients, one array each, would say: who holds what,
validation examples, hash."""

from __future__ import annotations

import hashlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy import ready

from fl_lightning import loop
from fl_lightning.data import IID, Dirichlet, FederatedData, Partition, Shards, holdings
from fl_lightning.data.partition import make_holdings
from fl_lightning.rng import stream, streams
from fl_lightning.wire import LedgerEntry

K = 23
"""Clients of three examples and more, and a few blocks of them."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "CLIENTS_PER_BLOCK", 5)


class Unsorted(Partition):
    """Arrays that are in no order."""

    def __call__(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        return np.array_split(stream(seed, "unsorted").permutation(len(labels)), num_clients)


class Backwards(IID):
    """Says its arrays itself, though the class that it derives from says index arrays."""

    def __call__(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        return super().__call__(labels, num_clients, seed)[::-1]


PARTITIONS = [
    IID(),
    Dirichlet(0.1, min_size=0),
    Dirichlet(float("inf")),
    Shards(2),
    Unsorted(),
    Backwards(),
]


def one_by_one(data: FederatedData, seed: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], str]:
    """Training and validation examples of each client, and the hash of all: the definition, in a
    loop."""
    label, clients, digest = data.train_target.numpy(), [], hashlib.sha256()
    own = (
        np.arange(len(label))
        if data.public_dataset
        else np.delete(np.arange(len(label)), data.public)
    )
    for id, part in enumerate(data.partition(label[own], data.num_clients, seed)):
        shard, held_out = own[part], 0
        if data.val_fraction > 0 and len(part) >= 2:
            held_out = min(max(round(data.val_fraction * len(part)), 1), len(part) - 1)
            shard = stream(seed, "validation", client=id).permutation(shard)
        clients.append((np.sort(shard[held_out:]), np.sort(shard[:held_out])))
        for half in clients[-1]:
            digest.update(len(half).to_bytes(8, "little") + half.astype("<i8").tobytes())
    return clients, digest.hexdigest()


@pytest.mark.parametrize("public_examples", [0, 40])
@pytest.mark.parametrize("val_fraction", [0.0, 0.05, 0.5, 0.99])
@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: f"{type(p).__name__}{vars(p)}")
def test_everybody_holds_what_a_loop_over_clients_gives_them(
    partition: Partition, val_fraction: float, public_examples: int
) -> None:
    data = ready(
        7,
        num_clients=K,
        partition=partition,
        val_fraction=val_fraction,
        public_examples=public_examples,
    )
    expected, digest = one_by_one(data, 7)
    for id, (train, val) in enumerate(expected):
        client = data.client(id)
        assert (client.train.tolist(), client.val.tolist()) == (train.tolist(), val.tolist())
        assert client.train.dtype == client.val.dtype == np.int64
    assert data.partition_hash == digest
    assert data.sizes.tolist() == [len(train) for train, _ in expected]
    assert data.active.tolist() == [id for id, (train, _) in enumerate(expected) if len(train)]
    assert data.validating.tolist() == [id for id, (_, val) in enumerate(expected) if len(val)]
    label = data.train_target.numpy()
    counts = [np.bincount(label[np.concatenate(both)], minlength=10).tolist() for both in expected]
    assert data.group_counts().tolist() == counts
    batches = list(data.val_batches(batch_size=7))
    owners = torch.cat([owner for *_, owner in batches] or [torch.empty(0)]).tolist()
    assert owners == [id for id, (_, val) in enumerate(expected) for _ in val]
    targets: list[Tensor] = [y for _, y, _ in batches] or [torch.empty(0)]
    assert torch.cat(targets).tolist() == [int(label[i]) for _, val in expected for i in val]


@pytest.mark.parametrize("examples", [0, 1, 22, 23, 24, 300])
def test_iid_deals_like_cards(examples: int) -> None:
    owner = np.empty(examples, np.int64)
    owner[stream(3, "partition").permutation(examples)] = np.arange(examples) % K
    dealt = make_holdings(IID(), np.zeros(examples, np.int64), K, 3).parts()
    assert [part.tolist() for part in dealt] == [
        np.flatnonzero(owner == id).tolist() for id in range(K)
    ]


def test_streams_are_those_of_each_client() -> None:
    ids = [0, 5, 4, 10**6]
    for id, rng in zip(ids, streams(3, "validation", ids), strict=True):
        alone = stream(3, "validation", client=id)
        assert rng.permutation(9).tolist() == alone.permutation(9).tolist()
        # leaves half a word behind
        assert rng.integers(7, dtype=np.uint32) == alone.integers(7, dtype=np.uint32)


def test_a_second_seed_leaves_nothing_of_the_first() -> None:
    data, other = ready(1, val_fraction=0.3), ready(2, val_fraction=0.3)
    before = (
        data.partition_hash,
        data.sizes.tolist(),
        data.active.tolist(),
        *map(torch.Tensor.sum, data._all_validation),
    )
    data.distribute(2, torch.device("cpu"))
    after = (
        data.partition_hash,
        data.sizes.tolist(),
        data.active.tolist(),
        *map(torch.Tensor.sum, data._all_validation),
    )
    assert before != after
    assert after == (
        other.partition_hash,
        other.sizes.tolist(),
        other.active.tolist(),
        *map(torch.Tensor.sum, other._all_validation),
    )


def test_a_client_more_is_no_object_more() -> None:
    def kept(num_clients: int) -> int:
        before = sys.getallocatedblocks()
        data = ready(
            num_clients=num_clients,
            partition=IID(),
            synthetic_examples=60_000,
            synthetic_size=2,
            val_fraction=0.1,
        )
        assert (
            len(data.partition_hash)
            + len(data.sizes)
            + len(data.active)
            + len(list(data.val_batches()))
            > num_clients
        )
        assert len(data.client(num_clients - 1).train)
        return sys.getallocatedblocks() - before

    kept(10)
    assert abs(kept(20_000) - kept(10)) < 1000


def test_clients_that_keep_nothing_leave_nothing_behind() -> None:
    clients = [
        SimpleNamespace(id=id, state=state) for id, state in ((1, {}), (2, {}), (3, {"kept": 1}))
    ]
    receipts: list[Any] = [SimpleNamespace(client=client) for client in clients]
    fed: Any = SimpleNamespace(states={2: {"kept": 0}}, holders={})
    loop.keep_states(
        fed, receipts, [LedgerEntry(1, client.id, "trained") for client in clients], {}
    )
    assert fed.states == {3: {"kept": 1}}


@pytest.mark.parametrize("status", ["dropped", "lost", "rejected"])
def test_what_a_client_keeps_counts_where_its_upload_does(status: str) -> None:
    """Client 1 has been trained by another process than before, client 2 for the first time."""
    clients = [SimpleNamespace(id=id, state={"kept": 1}) for id in (1, 2, 3)]
    receipts: list[Any] = [SimpleNamespace(client=client) for client in clients]
    fed: Any = SimpleNamespace(states={1: {"kept": 0}, 3: {"kept": 0}}, holders={1: 1, 2: 1, 3: 1})
    entries = [LedgerEntry(1, id, status if id < 3 else "trained") for id in (1, 2, 3)]
    loop.keep_states(fed, receipts, entries, {1: 0, 3: 0})
    assert fed.states == {1: {"kept": 0}, 3: {"kept": 1}}
    assert fed.holders == {1: 0, 3: 1}


def test_the_summary_of_many_clients_is_small_and_says_what_is_missing() -> None:
    sizes = {"synthetic_examples": 30_000, "synthetic_size": 2, "val_fraction": 0.0}
    few, some, many = (
        ready(num_clients=n, partition=IID(), **sizes).partition_summary()
        for n in (1000, 10_000, 10_001)
    )
    assert "left_out" not in few
    assert len(few["clients"]) == 1000
    assert some["left_out"] == "clients of 10000 clients; sha256 stands for them"
    assert len(some["sizes"]) == len(some["classes_per_client"]) == 10_000
    assert (
        many["left_out"]
        == "clients, sizes, classes_per_client of 10001 clients; sha256 stands for them"
    )
    assert many["clients_by_size"] == {"2": 3, "3": 9998}
    assert sum(many["clients_by_number_of_classes"].values()) == 10_001
    assert len(json.dumps(many, indent=1)) < 1000
