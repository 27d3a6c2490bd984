"""Clients' batches, augmentation, data sets, and files that are missing, damaged or hostile."""

from __future__ import annotations

import json
import random
from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor
from toy import ready

from fl_lightning.client import Client
from fl_lightning.data import IID, Dirichlet, FederatedImages, Shards
from fl_lightning.data.batches import batch_sizes
from fl_lightning.engines.stacked.batches import stacked_batches
from fl_lightning.rng import stream

CPU = torch.device("cpu")


def number_images(data: FederatedImages) -> None:
    """Every training image becomes its own index, and normalisation the identity, so that batches
    can be read."""
    index = torch.arange(len(data.train_images))
    data.train_images[:] = 0
    data.train_images[:, 0, 0, 0], data.train_images[:, 1, 0, 0] = (
        (index % 256).byte(),
        (index // 256).byte(),
    )
    data._mean, data._std = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)


def read_index(x: Tensor) -> list[int]:
    low, high = (x[:, channel, 0, 0].mul(255).round().long() for channel in (0, 1))
    return (low + 256 * high).tolist()


# --- batches
# ---------------------------------------------------------------------------------------------------------------


def test_every_example_comes_once_an_epoch_with_its_label() -> None:
    data = ready(partition=Dirichlet(0.3), batch_size=7, num_clients=12)
    number_images(data)
    for client in map(data.client, range(12)):
        batches = list(data.train_batches(client, round=3, epochs=3))
        seen = [read_index(x) for x, _ in batches]
        assert len(batches) == data.num_steps(client, 3)
        assert all(
            torch.equal(y, data.train_target[i]) for i, (_, y) in zip(seen, batches, strict=True)
        )
        copies = 2 if len(client.train) == 1 else 1
        assert sorted(chain(*seen)) == sorted(client.train.tolist() * 3 * copies)
        per_epoch = np.array([*chain(*seen)]).reshape(3, -1)
        assert all(sorted(row) == sorted(per_epoch[0]) for row in per_epoch.tolist())
        assert len(client.train) < 5 or not np.array_equal(per_epoch[0], per_epoch[1])


def test_no_batch_has_a_single_example() -> None:
    for n in range(40):
        for size in range(2, 9):
            sizes = batch_sizes(n, size)
            assert min(sizes, default=2) >= 2
            assert sum(sizes) == (2 if n == 1 else n)
            assert all(s == size for s in sizes[:-1])
    assert batch_sizes(3, 1) == [1, 1, 1]
    data = ready(batch_size=4)
    number_images(data)
    none = np.empty(0, np.int64)
    (x, y), *rest = data.train_batches(Client(0, np.array([5]), none), round=1, epochs=1)
    assert read_index(x) == [5, 5]
    assert y.tolist() == data.train_target[[5, 5]].tolist()
    assert not rest
    assert [
        len(y) for _, y in data.train_batches(Client(0, np.arange(9), none), round=1, epochs=2)
    ] == [
        4,
        5,
        4,
        5,
    ]
    assert not list(data.train_batches(Client(0, none, none), round=1, epochs=1))


def test_steps_cut_and_labels_replace() -> None:
    data = ready(batch_size=8, crop="pad", flip=True)
    client = data.client(4)
    whole = list(data.train_batches(client, round=2, epochs=2))
    cut = list(data.train_batches(client, round=2, epochs=2, steps=3))
    longer = list(data.train_batches(client, round=2, epochs=3))
    assert len(cut) == 3
    assert all(
        torch.equal(a, b)
        for one, other in zip(cut, whole, strict=False)
        for a, b in zip(one, other, strict=True)
    )
    assert all(
        torch.equal(a, b)
        for one, other in zip(whole, longer, strict=False)
        for a, b in zip(one, other, strict=True)
    )
    number_images(data)
    data.crop, data.flip = "none", False
    other = 9 - data.labels(client)
    for x, y in data.train_batches(client, round=2, epochs=1, labels=other):
        assert y.tolist() == (9 - data.train_target[read_index(x)]).tolist()


@pytest.mark.parametrize("augmented", [False, True])
def test_batches_side_by_side_are_those_of_each_client(augmented: bool) -> None:
    """Of clients with 1 to 100 examples, some of which stop early, or make fewer epochs."""
    data = ready(
        partition=Dirichlet(0.3), batch_size=7, crop="pad" if augmented else "none", flip=augmented
    )
    single = Client(77, np.array([5]), np.empty(0, np.int64))
    clients = [*(data.client(int(id)) for id in data.active), single]
    assert all(map(torch.equal, data.labels_of(clients), map(data.labels, clients)))
    labels = [9 - own for own in data.labels_of(clients)]
    epochs = [2 + at % 2 for at in range(len(clients))]
    steps = [1 + data.num_steps(client, 3) // (1 + at % 3) for at, client in enumerate(clients)]
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in clients]
    groups = 0
    for step in stacked_batches(data, clients, round=3, epochs=epochs, labels=labels, steps=steps):
        groups = max(groups, len(step))
        for where, (x, y) in step:
            for at, batch in zip(where, zip(x, y, strict=True), strict=True):
                seen[at].append(batch)
    assert groups > 1
    for at, client in enumerate(clients):
        alone = list(
            data.train_batches(
                client, round=3, epochs=epochs[at], labels=labels[at], steps=steps[at]
            )
        )
        assert len(alone) == len(seen[at])
        assert all(
            torch.equal(a, b)
            for one, other in zip(alone, seen[at], strict=True)
            for a, b in zip(one, other, strict=True)
        )


def test_global_seeds_change_nothing_and_rounds_and_clients_do() -> None:
    def batches(poison: int, *, round: int = 1, client: int = 0, seed: int = 0) -> Tensor:
        random.seed(poison)
        np.random.seed(poison)  # noqa: NPY002
        torch.manual_seed(poison)
        data = ready(seed, partition=IID(), crop="pad", flip=True)
        return torch.cat(
            [x for x, _ in data.train_batches(data.client(client), round=round, epochs=1)]
        )

    one = batches(1)
    assert torch.equal(one, batches(2))
    assert not torch.equal(one, batches(1, round=2))
    assert not torch.equal(one, batches(1, client=1))
    assert not torch.equal(one, batches(1, seed=1))


@pytest.mark.parametrize(
    ("crop", "flip"),
    [("none", False), ("none", True), ("pad", False), ("pad", True), ("shrink", True)],
)
def test_augmentation_is_the_plain_loop(crop: str, flip: bool) -> None:
    """Same draws, one image at a time, by slicing."""
    data = ready(
        crop=crop, flip=flip, crop_size=27, synthetic_size=32, batch_size=16, partition=IID()
    )
    client, side = data.client(1), 27 if crop == "shrink" else 32
    order = stream(0, "batches", 5, 1)
    position = np.stack([order.permutation(len(client.train)) for _ in range(2)])
    uniform = stream(0, "augment", 5, 1).random((2, len(client.train), 3))
    places = {"none": 1, "pad": 9, "shrink": 6}[crop]
    mean, std = (
        np.float32(data.train_mean)[:, None, None],
        np.float32(data.train_std)[:, None, None],
    )
    expected = []
    for epoch in range(2):
        for where in position[epoch]:
            image = data.train_images[client.train[where]].numpy()
            if crop == "pad":
                image = np.pad(image, ((0, 0), (4, 4), (4, 4)))
            top, left = (
                int(uniform[epoch, where, 0] * places),
                int(uniform[epoch, where, 1] * places),
            )
            image = image[:, top : top + side, left : left + side]
            if flip and uniform[epoch, where, 2] >= 0.5:
                image = image[:, :, ::-1]
            expected.append((image.astype(np.float32) / np.float32(255) - mean) / std)
    got = torch.cat([x for x, _ in data.train_batches(client, round=5, epochs=2)])
    assert got.shape[1:] == data.example_shape == (3, side, side)
    assert torch.equal(got, torch.from_numpy(np.stack(expected)))


def test_augmentation_reaches_every_place() -> None:
    data = FederatedImages("synthetic", crop="pad", crop_padding=2, flip=True)
    draws = data.draws(stream(0, "x"), 20, 100)
    assert draws is not None
    assert len(np.unique(draws.reshape(-1, 3), axis=0)) == 5 * 5 * 2


def test_normalisation_and_its_inverse() -> None:
    data = ready(crop="shrink", crop_size=28)
    pixels = data.train_images.double() / 255
    assert data.train_mean == pytest.approx(pixels.mean((0, 2, 3)).tolist())
    assert data.train_std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist())
    x = torch.cat([x for x, _ in data.test_batches(batch_size=17)])
    centre = data.test_images[:, :, 2:30, 2:30].float() / 255
    assert x.dtype == torch.float32
    mean, std = (
        torch.tensor(data.train_mean)[:, None, None],
        torch.tensor(data.train_std)[:, None, None],
    )
    torch.testing.assert_close(x, (centre - mean) / std)
    torch.testing.assert_close(data.denormalise(x), centre)


# --- clients
# ---------------------------------------------------------------------------------------------------------------


def test_validation_split() -> None:
    data = ready(num_clients=40, partition=Dirichlet(0.1, min_size=0), val_fraction=0.05)
    for id, shard in enumerate(data.partition(data.train_target.numpy(), 40, 0)):
        client = data.client(id)
        assert sorted([*client.train, *client.val]) == sorted(shard)
        assert sorted(client.train) == client.train.tolist()
        assert len(client.val) == (0 if len(shard) < 2 else max(round(0.05 * len(shard)), 1))
        assert len(client.train) >= min(len(shard), 1)
    assert all(len(ready(val_fraction=0).client(id).val) == 0 for id in range(10))
    kept: dict[str, Tensor] = {}
    assert data.client(0, kept).state is kept


def test_validation_batches_carry_their_owner() -> None:
    data = ready(val_fraction=0.3)
    number_images(data)
    clients = [data.client(id) for id in (7, 2, 9)]
    batches = list(data.val_batches(clients, batch_size=8))
    got = [
        pair
        for x, y, owner in batches
        for pair in zip(owner.tolist(), read_index(x), y.tolist(), strict=True)
    ]
    assert got == [(c.id, i, int(data.train_target[i])) for c in clients for i in c.val.tolist()]
    assert any(len(owner.unique()) > 1 for _, _, owner in batches)
    assert not list(data.val_batches([]))


def test_summary_is_json_and_its_hash_is_of_the_indices() -> None:
    data, same, other = ready(1), ready(1), ready(2)
    summary = json.loads(json.dumps(data.partition_summary()))
    assert summary["method"] == "Dirichlet(beta=0.1, min_size=1)"
    assert sum(summary["sizes"]) == np.sum(summary["classes_per_client"]) == 300
    shard = summary["clients"][3]["train"] + summary["clients"][3]["val"]
    assert (
        np.bincount(data.train_target[shard], minlength=10).tolist()
        == summary["classes_per_client"][3]
    )
    assert data.partition_hash == same.partition_hash == summary["sha256"] != other.partition_hash
    assert data.partition_hash != ready(1, val_fraction=0.2).partition_hash


@pytest.mark.timeout(120)  # work of clients squared would take hours
def test_a_hundred_thousand_clients_can_start_and_it_is_said_that_half_have_nothing(caplog) -> None:
    partition = Dirichlet(0.1, min_size=0)
    data = ready(
        num_clients=100_000, synthetic_examples=50_000, synthetic_size=4, partition=partition
    )
    assert "clients" not in data.partition_summary()
    idle = 100_000 - len(data.active)
    assert f"{idle} of 100000 clients have no training example and never train" in caplog.text


# --- data sets
# -------------------------------------------------------------------------------------------------------------


def test_digits_are_learnable_and_split_by_class() -> None:
    from sklearn.linear_model import LogisticRegression

    data = ready(dataset="digits", partition=Shards(2))
    counts = [
        torch.bincount(target, minlength=10) for target in (data.train_target, data.test_target)
    ]
    assert sum(map(sum, counts)) == 1797
    assert torch.all((counts[1] / (counts[0] + counts[1]) - 0.2).abs() < 0.005)
    (train, test) = (
        images[:, 0, ::4, ::4].reshape(-1, 64).numpy() / 255
        for images in (data.train_images, data.test_images)
    )
    model = LogisticRegression(max_iter=300).fit(train, data.train_target)
    assert model.score(test, data.test_target) > 0.9


def test_synthetic_is_learnable_and_overlaps() -> None:
    data = ready(
        synthetic_examples=3000, synthetic_test_examples=500, synthetic_size=20, synthetic_classes=7
    )
    assert data.example_shape == (3, 20, 20)
    assert torch.bincount(data.train_target).tolist() == [429] * 4 + [428] * 3
    train, test = (images.flatten(1).float() for images in (data.train_images, data.test_images))
    centre = torch.stack([train[data.train_target == c].mean(0) for c in range(7)])
    accuracy = (torch.cdist(test, centre).argmin(1) == data.test_target).float().mean()
    assert 0.8 < accuracy < 1
    assert torch.equal(
        data.train_images,
        ready(5, synthetic_examples=3000, synthetic_size=20, synthetic_classes=7).train_images,
    )
    assert not torch.equal(
        data.train_images,
        ready(synthetic_examples=3000, synthetic_size=20, synthetic_seed=1).train_images,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dataset": "cifar-10"}, "write cifar10"),
        ({"dataset": "mnist"}, "write one of them, or name other data"),
        ({"dataset": "digit"}, "write digits"),
        ({"num_clients": 0}, "num_clients=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"val_fraction": 1.0}, "val_fraction=1.0"),
        ({"val_fraction": float("nan")}, "val_fraction=nan"),
        ({"crop": "centre"}, "one of none, pad, shrink"),
        ({"crop": "shrink", "crop_size": 33}, "write 1 to 32"),
        ({"crop_padding": -1}, "write 0 or more"),
        ({"synthetic_examples": 0}, "write 1 or more"),
    ],
)
def test_bad_arguments_say_what_to_write(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FederatedImages(**arguments)  # type: ignore[arg-type]
