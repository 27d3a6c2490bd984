"""Feature skew: who sees what, that it is drawn once, and that without it nothing changes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from toy import ready, run, sgd

from fl_lightning.__main__ import main
from fl_lightning.data import IID, FeatureNoise, FeatureSkew, FederatedImages, RotatedClients
from fl_lightning.data.test_owners import deal_test_set
from fl_lightning.errors import MisuseError
from fl_lightning.methods import FedAvg
from fl_lightning.probing.corruptions.recipes import corrupt
from fl_lightning.probing.corruptions.skew import CorruptedClients


def skewed(skew: FeatureSkew | None, **settings: object) -> FederatedImages:
    return ready(
        **{
            "dataset": "digits",
            "num_clients": 4,
            "partition": IID(),
            "feature_skew": skew,
            **settings,
        }
    )


def held(data: FederatedImages, client: int) -> np.ndarray:
    one = data.client(client)
    return np.concatenate([one.train, one.val])


def test_noise_grows_from_client_to_client_and_is_not_clipped() -> None:
    plain, noisy = skewed(None), skewed(FeatureNoise(0.3))
    added = {
        "train": (noisy.train_images - plain.train_images.float()) / 255,
        "test": (noisy.test_images - plain.test_images.float()) / 255,
    }
    owner = deal_test_set(noisy)
    for client in range(4):
        for part, index in (
            ("train", held(noisy, client)),
            ("test", np.flatnonzero(owner == client)),
        ):
            noise = added[part][index].double()
            assert noise.std().item() == pytest.approx(0.1 * client, rel=0.01), (part, client)
            assert abs(noise.mean().item()) < 0.002
    assert noisy.train_images.min() < 0
    assert noisy.train_images.max() > 255
    assert noisy.partition_hash == plain.partition_hash
    assert noisy.train_mean == plain.train_mean
    index = torch.arange(5)
    assert torch.allclose(
        noisy.denormalise(noisy.inputs("train", index)),
        noisy.train_images[index].float() / 255,
        atol=1e-5,
    )


def test_each_client_turns_its_images() -> None:
    plain, turned = skewed(None), skewed(RotatedClients())
    owner = deal_test_set(turned)
    for client in range(4):
        for name, index in (
            ("train_images", held(turned, client)),
            ("test_images", np.flatnonzero(owner == client)),
        ):
            before, after = getattr(plain, name)[index], getattr(turned, name)[index]
            assert torch.equal(after, torch.rot90(before, client, (2, 3)))
    assert turned.train_images.dtype == torch.uint8


def test_other_angles_turn_the_same_way() -> None:
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[..., 4, 8] = 255  # to the right; counter-clockwise by 45 degrees it is at the upper right
    turned = RotatedClients([45]).change(image, 0, 1, np.random.default_rng())
    row, column = np.unravel_index(int(turned.flatten().argmax()), (9, 9))
    assert (int(row), int(column)) == (1, 7)
    assert torch.equal(
        RotatedClients([-90.0]).change(image, 0, 1, np.random.default_rng()),
        torch.rot90(image, 3, (2, 3)),
    )


def test_each_client_has_a_fault_of_its_own() -> None:
    plain, faulty = (
        skewed(skew, channels=1) for skew in (None, CorruptedClients(["none", "contrast"]))
    )
    for client in range(4):
        before, after = (data.train_images[held(faulty, client)] for data in (plain, faulty))
        if client % 2 == 0:
            assert torch.equal(before, after)
        else:
            colours = before.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
            assert np.array_equal(after[:, 0].numpy(), corrupt("contrast", colours, 0)[..., 0])


class Own(FeatureSkew):
    def __init__(self, make):
        self.make = make

    def change(self, images, client, num_clients, rng):
        return self.make(images)


class Unclipped(Own):
    dtype = torch.float16


MAKES = {
    "floats": lambda images: images.float() + 60,
    "in [0, 1]": lambda images: images / 255,
    "no numbers": lambda images: images * torch.nan,
    "one channel": lambda images: images[:, :1],
    "one image": lambda images: images[:1],
    "nothing": lambda images: None,
    "an array": lambda images: images.numpy(),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_skew_returns_images_like_those_that_it_is_given(name: str) -> None:
    with refused("Own.change, which returned", "clamp(0, 255)", MisuseError):
        skewed(Own(MAKES[name]))


def test_one_that_is_not_clipped_says_so_and_is_finite() -> None:
    plain, found = skewed(None), skewed(Unclipped(lambda images: images + 300.0))
    assert torch.equal(found.train_images, plain.train_images.half() + 300)
    for value in (torch.nan, 1e6):
        with refused("Unclipped.change", "", MisuseError):
            skewed(Unclipped(lambda images, value=value: images + value))


def test_the_loudest_noise_fits_into_half_precision() -> None:
    """8.21 standard deviations are the most that NumPy draws in float32: where its tail begins,
    3.654, and 24 ln 2 / 3.654 of what lies beyond."""

    class Loud:
        def standard_normal(self, shape, dtype):
            return np.where(np.arange(np.prod(shape)) % 2, 8.21, -8.21).reshape(shape).astype(dtype)

    skew, images = FeatureNoise(30), torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    changed = skew._checked(skew.change(images, 3, 4, Loud()), images)
    assert changed.isfinite().all()
    assert changed.max() > 60_000


def test_it_is_drawn_once_and_anew_for_another_seed() -> None:
    data = skewed(FeatureNoise(0.2))
    first = data.train_images.clone(), data.test_images.clone()
    data.distribute(1, torch.device("cpu"))
    assert not torch.equal(data.train_images, first[0])
    data.distribute(0, torch.device("cpu"))
    assert torch.equal(data.train_images, first[0])
    assert torch.equal(data.test_images, first[1])


def test_the_public_set_is_seen_by_nobody() -> None:
    plain, noisy = (skewed(skew, public_examples=30) for skew in (None, FeatureNoise(0.5)))
    position = torch.arange(30)
    assert torch.equal(plain.public_inputs(position), noisy.public_inputs(position))


@pytest.mark.slow
@pytest.mark.essential
def test_no_noise_is_no_skew_bit_for_bit(tmp_path: Path) -> None:
    weights = []
    for skew in (None, FeatureNoise(0.0), RotatedClients([0.0]), RotatedClients()):
        trainer = run(
            FedAvg(optimizer=sgd(0.05)), skewed(skew, crop="pad", flip=True), tmp_path, max_rounds=2
        )
        weights.append(
            json.loads((trainer.run_dir / "metadata.json").read_text())["weights_sha256"]
        )
    assert weights[0] == weights[1] == weights[2] != weights[3]


@pytest.mark.slow
@pytest.mark.essential
def test_skews_are_settings_of_a_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["--trainer.max_rounds", "1", "--trainer.logger", "false", "--data.feature_skew"]
    corrupted = [
        "fl_lightning.probing.corruptions.skew.CorruptedClients",
        "--data.feature_skew.corruptions=[fog]",
    ]
    for skew in (
        ["FeatureNoise", "--data.feature_skew.sigma", "0.2"],
        ["RotatedClients"],
        corrupted,
    ):
        assert main(["fit", "--config", "plain", *few, *skew]) == 0
    noisy = next(path for path in tmp_path.glob("runs/plain/*") if "FeatureNoise" in path.name)
    assert main(["test", "--ckpt_path", str(noisy), "--probes", "clean,corruptions"]) == 0
    capsys.readouterr()
    assert (
        main(["fit", "--config", "plain", *few, "FeatureNoise", "--data.feature_skew.sigma", "-1"])
        == 2
    )
    assert "noise has a level from 0 to 30; write 0.1" in capsys.readouterr().err


def test_bad_skews_are_refused() -> None:
    for make in (
        lambda: FeatureNoise(float("nan")),
        lambda: FeatureNoise(30.5),
        lambda: FeatureNoise(float("inf")),
        lambda: RotatedClients([]),
        lambda: RotatedClients([float("inf")]),
        lambda: CorruptedClients(["rain"]),
    ):
        with pytest.raises(ValueError, match="write"):
            make()
    data = skewed(FeatureNoise())
    with pytest.raises(
        ValueError, match=r"feature_skew=FeatureNoise\(sigma=0.1\) where nodes have data"
    ):
        data.distribute_apart(data._holdings, 0, torch.device("cpu"))
