"""Test sets of the clients' own: training and test images are dealt out together, then each
client's are split.

The content of images by a name has a SHA-256 as well, by which runs are paired and continued.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from fashion_files import needs_package
from refusals import refused
from toy import ready

from fl_lightning.data import (
    IID,
    Dirichlet,
    FederatedImages,
    Natural,
    Partition,
    PFLlibPathological,
    PFLlibPractical,
    RotatedClients,
)
from fl_lightning.data.image_base import ImageData
from fl_lightning.data.local import digits
from fl_lightning.data.test_owners import deal_test_set
from fl_lightning.study.results.published import CONTENT_BY_NAME

TEN = np.random.Generator(np.random.Philox(7)).integers(0, 10, 6000)
PATHOLOGICAL = PFLlibPathological(2, balanced=True)


def split(partition: Partition, **settings: object) -> FederatedImages:
    return ready(
        **{
            "dataset": "digits",
            "num_clients": 20,
            "partition": partition,
            "local_test_fraction": 0.25,
        }
        | settings
    )


def counts(owner: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The number of examples by client and class."""
    return np.bincount(owner * 10 + label, minlength=200).reshape(20, 10)


@pytest.mark.parametrize(
    ("partition", "digests"),
    [
        (PFLlibPractical(), ["01c978561b58", "179fb4e4c746", "7d43b1c8b737"]),
        (PFLlibPathological(2), ["536750f460b1", "7baca7a76fcd", "808aba98539d"]),
        (PATHOLOGICAL, ["d19efed89ed6", "077555dfa954", "27a2e7d2fced"]),
    ],
    ids=repr,
)
def test_the_split_is_that_of_the_published_code(partition: Partition, digests: list[str]) -> None:
    """The digests are of what ``separate_data`` and then ``split_data`` of PFLlib at d832e76
    returned for these labels after seeds of 0, 1 and 3: of each client its training and its test
    examples, sorted."""
    found = []
    for seed in (0, 1, 3):
        digest, holdings = hashlib.sha256(), partition.with_tests(TEN, 20, seed, 0.25)
        for client in range(20):
            for part in holdings.client(client):
                digest.update(part.astype("<i8").tobytes())
        found.append(digest.hexdigest()[:12])
    assert found == digests
    fixed = type(partition)(**{**vars(partition), "drawn_at": 1})
    for seed in (0, 3):
        one, other = (a.with_tests(TEN, 20, b, 0.25) for a, b in ((fixed, seed), (partition, 1)))
        assert one.sha256() == other.sha256()


@pytest.mark.parametrize(
    "partition",
    [PATHOLOGICAL, PFLlibPractical(1.0, batch_size=2), Dirichlet(0.5, min_size=4)],
    ids=repr,
)
def test_every_client_is_tested_on_a_quarter_of_its_own_images(partition: Partition) -> None:
    data = split(partition, val_fraction=0.0)
    (train_images, train_labels), (test_images, test_labels) = digits()
    every, label = (
        np.concatenate([train_images, test_images]),
        np.concatenate([train_labels, test_labels]),
    )
    parts = partition(label, 20, data.seed)
    owner, tested = deal_test_set(data), data.test_holdings
    assert tested is not None
    for client, part in enumerate(parts):
        mine = tested.parts()[client]
        assert np.array_equal(np.sort(np.concatenate([data.client(client).train, mine])), part)
        assert abs(len(mine) - 0.25 * len(part)) < 1
        assert np.array_equal(
            np.flatnonzero(owner == client), np.flatnonzero(np.isin(tested.index, mine))
        )
    assert len(data.test_target) == len(owner) == tested.sizes.sum()
    assert torch.equal(data.test_target, torch.from_numpy(label[tested.index]))
    assert torch.equal(data.test_images[:, 0], torch.from_numpy(every[tested.index, 0]))
    held = np.concatenate([data.client(client).train for client in range(20)])
    assert len(held) + len(owner) == len(label)
    # its known statistics: two classes a client, four clients a class, in both parts
    if partition is PATHOLOGICAL:
        assert ((counts(owner, label[tested.index]) > 0).sum(axis=1) == 2).all()
        assert ((counts(owner, label[tested.index]) > 0).sum(axis=0) == 4).all()


def test_another_split_is_another_partition_and_none_changes_nothing() -> None:
    one, other, own = (
        split(IID()),
        split(IID(), local_test_fraction=0.5),
        split(IID(), local_test_fraction=0.0),
    )
    assert len({data.partition_hash for data in (one, other, own)}) == 3
    assert one.content_sha256 == own.content_sha256
    assert own.test_holdings is None
    assert len(own.test_target) == 359
    assert one.partition_summary()["test"]["sizes"] == one.test_holdings.sizes.tolist()
    assert "test" not in own.partition_summary()
    again, first = split(IID()), one.partition_hash
    again.distribute(7, torch.device("cpu"))
    assert again.partition_hash != first
    again.distribute(one.seed, torch.device("cpu"))
    assert again.partition_hash == first
    assert torch.equal(again.test_images, one.test_images)


def test_a_client_is_tested_on_images_as_it_sees_them() -> None:
    plain, turned = split(IID()), split(IID(), feature_skew=RotatedClients([0, 90]))
    owner = deal_test_set(plain)
    for client in range(4):
        mine = np.flatnonzero(owner == client)
        seen = torch.rot90(plain.test_images[mine], client % 2, (2, 3))
        turns = [
            torch.equal(turned.test_images[mine], torch.rot90(seen, k, (2, 3))) for k in (0, 2)
        ]
        assert any(turns), client


def test_pixels_are_normalised_by_the_moments_that_are_given() -> None:
    data = ready(dataset="digits", num_clients=4, partition=IID(), moments=(0.5, 0.25), channels=1)
    index = torch.arange(5)
    expected = (data.train_images[index].float() / 255 - 0.5) / 0.25
    assert torch.allclose(data.inputs("train", index), expected)
    for wrong in ((0.5, 0.0), (0.5, math.nan), (math.nan, 0.5), (0.5, math.inf), (-math.inf, 0.5)):
        with refused(f"moments={wrong}"):
            FederatedImages(moments=wrong)


def test_what_does_not_go_with_test_sets_of_clients_is_refused() -> None:
    with refused("local_test_fraction=0.25 with the partition Natural"):
        FederatedImages(partition=Natural(), local_test_fraction=0.25)
    with refused("local_test_fraction=0.25 with public_examples=50"):
        FederatedImages(public_examples=50, local_test_fraction=0.25)
    FederatedImages(
        public_examples=50,
        local_test_fraction=0.25,
        dataset="cifar10",
        public_dataset="synthetic",
    )
    with refused("local_test_fraction=0.25 where nodes have data of their own"):
        data = split(IID())
        data.distribute_apart(data._holdings, 0, torch.device("cpu"))


class OwnImages(ImageData):
    """Images of a user's class, which checks nothing itself."""

    dataset, side, channels, num_classes = "own", 32, 1, 10

    def setup(self, stage: str | None = None) -> None:
        self.hold(*digits())


def test_no_class_tests_clients_on_public_images() -> None:
    data = OwnImages(public_examples=50, local_test_fraction=0.25, num_clients=4, partition=IID())
    data.setup()
    with refused("local_test_fraction=0.25 with public_examples=50"):
        data.distribute(0, torch.device("cpu"))


@pytest.mark.parametrize("dataset", ["digits", pytest.param("fashion_mnist", marks=needs_package)])
def test_images_by_a_name_are_known_by_their_content(dataset: str) -> None:
    """It is what published runs of an earlier release are paired by, which do not say it."""
    partitions = {"num_clients": 10, "partition": IID()}
    found = {
        ready(dataset=dataset, channels=channels, **partitions).content_sha256
        for channels in (1, 3)
    }
    assert found == CONTENT_BY_NAME[dataset]


def test_other_images_have_another_content() -> None:
    small = {
        "dataset": "synthetic",
        "synthetic_examples": 50,
        "synthetic_test_examples": 20,
        "num_clients": 2,
    }
    seeds = [
        ready(**small, partition=IID(), synthetic_seed=seed).content_sha256 for seed in (0, 1, 1)
    ]
    assert seeds[0] != seeds[1] == seeds[2]
