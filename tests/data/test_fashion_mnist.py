"""Fashion-MNIST: where its files are found, what is in them, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from fashion_files import NAMES, PACKAGE, needs_package, write_fashion
from places import CONFIGS
from toy import ready

from fl_lightning.__main__ import main
from fl_lightning.cli import parser as cli
from fl_lightning.data import IID, FederatedImages, fashion_mnist
from fl_lightning.study.plan.study import Study

SYNTHETIC = ("data.dataset", "data.synthetic")


def fashion(root: Path, **settings: object) -> FederatedImages:
    return ready(
        dataset="fashion_mnist", root=str(root), num_clients=4, partition=IID(), **settings
    )


@pytest.mark.parametrize("place", ["torchvision", "torchvision packed", "package"])
@pytest.mark.parametrize("channels", [1, 3])
def test_files_are_found_where_torchvision_or_debian_put_them(
    tmp_path, monkeypatch, place, channels
) -> None:
    folder = tmp_path / ("package" if place == "package" else "FashionMNIST/raw")
    content = write_fashion(folder, monkeypatch, packed=place != "torchvision")
    if place == "package":
        monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", folder)
    data = fashion(tmp_path, channels=channels)
    train_x, train_y, test_x, test_y = map(torch.from_numpy, content.values())
    assert data.example_shape == (channels, 28, 28)
    assert data.num_classes == 10
    assert torch.equal(data.train_images, train_x[:, None].expand(-1, channels, -1, -1))
    assert torch.equal(data.test_images, test_x[:, None].expand(-1, channels, -1, -1))
    assert torch.equal(data.train_target, train_y.long())
    assert torch.equal(data.test_target, test_y.long())
    assert data.inputs("test", torch.arange(3)).shape == (3, channels, 28, 28)


def test_files_under_root_come_before_those_of_the_package(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "FashionMNIST/raw"
    content = write_fashion(folder, monkeypatch, packed=False)
    package = tmp_path / "package"
    shutil.copytree(folder, package)
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", package)
    (package / NAMES[0]).write_bytes(b"another file")
    assert torch.equal(fashion(tmp_path).train_images[:, 0], torch.from_numpy(content[NAMES[0]]))
    (folder / NAMES[3]).unlink()  # the package is taken whole or not at all
    with pytest.raises(ValueError, match=r"package.*SHA-256"):
        fashion(tmp_path)


def test_a_grey_image_cropped_and_mirrored_is_that_of_three_channels(tmp_path, monkeypatch) -> None:
    write_fashion(tmp_path / "FashionMNIST/raw", monkeypatch)
    one, three = (
        fashion(tmp_path, channels=channels, crop="pad", flip=True, val_fraction=0)
        for channels in (1, 3)
    )
    (train,) = {tuple(data.client(0).train.tolist()) for data in (one, three)}
    index, draws = torch.tensor(train), torch.tensor([[1, 7, 1]]).expand(len(train), -1)
    shown = [data.inputs("train", index, draws) for data in (one, three)]
    assert torch.equal(shown[0].expand(-1, 3, -1, -1), shown[1])


def test_a_file_that_is_not_the_published_one_is_refused_by_name(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "FashionMNIST/raw"
    write_fashion(folder, monkeypatch)
    path = folder / f"{NAMES[2]}.gz"
    good = path.read_bytes()
    damaged = bytearray(gzip.decompress(good))
    damaged[-1] ^= 1
    for bad in (
        good[: len(good) // 2],
        b"",
        b"not gzip",
        gzip.compress(bytes(damaged)),
        good[:20] + good[21:],
    ):
        path.write_bytes(bad)
        with pytest.raises(
            ValueError, match=r"t10k-images-idx3-ubyte\.gz.*apt-get install"
        ) as error:
            fashion(tmp_path)
        assert "\n" not in str(error.value)
        assert path.read_bytes() == bad


@pytest.mark.parametrize("download", [False, True])
def test_missing_files_are_named_with_the_command_in_one_line(
    tmp_path, monkeypatch, download
) -> None:
    import torchvision.datasets.utils as utils

    def no_network(url: str, root: str, **_: object) -> None:
        Path(root).mkdir(parents=True, exist_ok=True)  # as torchvision does, before it connects
        raise OSError("no route\nto host")

    monkeypatch.setattr(utils, "download_and_extract_archive", no_network)
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "no package")
    data = FederatedImages("fashion_mnist", root=str(tmp_path / "new" / "root"), download=download)
    with pytest.raises(ValueError, match="apt-get install dataset-fashion-mnist") as error:
        data.prepare_data()
    message = str(error.value)
    assert "\n" not in message
    assert f"train-images-idx3-ubyte.gz is not in {tmp_path}/new/root/FashionMNIST/raw" in message
    assert "configs/kd_default.yaml" in message
    assert ("no route to host" if download else "--data.download true") in message
    assert not (tmp_path / "new").exists()  # bad input creates nothing


def test_only_missing_files_are_fetched(tmp_path, monkeypatch) -> None:
    import torchvision.datasets.utils as utils

    folder, elsewhere = tmp_path / "FashionMNIST/raw", tmp_path / "elsewhere"
    write_fashion(folder, monkeypatch)
    shutil.move(folder, elsewhere)
    folder.mkdir()
    shutil.copy(elsewhere / f"{NAMES[1]}.gz", folder)
    fetched = []

    def from_elsewhere(url: str, root: str, *, filename: str, md5: str) -> None:
        fetched.append(filename)
        assert url.startswith("http")
        assert url.endswith(f"/{filename}")
        shutil.copy(elsewhere / filename, root)

    monkeypatch.setattr(utils, "download_and_extract_archive", from_elsewhere)
    data = fashion(tmp_path, download=True)
    assert sorted(fetched) == sorted(f"{name}.gz" for name in NAMES if name != NAMES[1])
    assert len(data.train_target) == 40


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dataset": "cifar10", "channels": 1}, "channels=1 for cifar10.*fashion_mnist, digits"),
        (
            {"dataset": "digits", "public_dataset": "synthetic", "channels": 1},
            "channels=1 for synthetic",
        ),
        ({"dataset": "digits", "channels": 2}, "channels=2.*write 3"),
        ({"dataset": "fashion_mnis"}, "write fashion_mnist"),
    ],
)
def test_channels_that_images_do_not_have_are_refused(settings, words) -> None:
    with pytest.raises(ValueError, match=words):
        FederatedImages(**settings)


def test_grey_digits_are_one_channel_of_the_three() -> None:
    one, three = (ready(dataset="digits", channels=channels) for channels in (1, 3))
    assert torch.equal(one.train_images.expand(-1, 3, -1, -1), three.train_images)
    assert one.partition_hash == three.partition_hash


@pytest.mark.parametrize(
    "args",
    [
        ["--config", "fashion", "--data.partition.min_size", "2"],
        [
            "--config",
            "kd_default",
            "--config",
            "overlays/fashion_mnist",
            "--data.num_clients",
            "10",
        ],
    ],
    ids=["fashion", "overlay"],
)
def test_the_configurations_run(tmp_path, monkeypatch, args) -> None:
    monkeypatch.chdir(tmp_path)
    write_fashion(tmp_path / "data/FashionMNIST/raw", monkeypatch, rows=400)
    assert main(["fit", *args, "--trainer.max_rounds", "2", "--trainer.logger", "false"]) == 0
    (metadata,) = (json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/metadata.json"))
    assert (metadata["dataset"], metadata["status"]) == ("fashion_mnist", "finished")


def test_corruptions_of_grey_images_are_reported_as_such(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_fashion(tmp_path / "data/FashionMNIST/raw", monkeypatch)
    few = ["--data.num_clients", "2", "--data.partition.min_size", "2", "--trainer.max_rounds", "1"]
    assert main(["fit", "--config", "fashion", *few, "--trainer.logger", "false"]) == 0
    (run,) = tmp_path.glob("runs/*/*")
    assert main(["test", "--ckpt_path", str(run), "--probes", "corruptions,fgsm"]) == 0
    found = json.loads((run / "test.json").read_text())
    assert "of a corrupted grey image the first one is shown" in json.dumps(found)


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("name", ["exp1_embedded", "exp2_embedded"])
def test_the_overlay_makes_studies_of_the_project_studies_of_clothing(name) -> None:
    """Its ends resolve, and but for the data they are what they were."""
    study = Study.read(CONFIGS / f"{name}.yaml")
    settings = {
        key: value for key, value in study.settings.items() if not key.startswith(SYNTHETIC)
    }
    overlays = (*study.overlays, CONFIGS / "overlays/fashion_mnist.yaml")
    ours = replace(study, settings=settings, overlays=overlays)
    for place in (0, -1):
        theirs, clothes = (
            yaml.safe_load(cli.resolve(one.cells()[place].args))
            for one in (replace(study, settings=settings), ours)
        )
        changed = {"dataset": "fashion_mnist", "root": "data", "download": False, "channels": 3}
        assert clothes["data"]["init_args"] == theirs["data"]["init_args"] | changed
        assert clothes["model"] == theirs["model"]


@needs_package
def test_the_real_files_are_the_published_ones() -> None:
    """The mean and the standard deviation are those that are known of Fashion-MNIST's 60 000
    images."""
    data = fashion(Path("there is no such folder"), channels=1)
    assert data.train_images.shape == (60_000, 1, 28, 28)
    assert torch.bincount(data.train_target).tolist() == [6000] * 10
    assert torch.bincount(data.test_target).tolist() == [1000] * 10
    assert data.train_mean[0] == pytest.approx(0.2860, abs=5e-5)
    assert data.train_std[0] == pytest.approx(0.3530, abs=5e-5)


@needs_package
def test_the_debian_files_are_those_that_torchvision_knows_under_another_header() -> None:
    """Debian packed with ``gzip -n``: with name and time, the packed files have the published
    MD5."""
    from torchvision.datasets import FashionMNIST

    times = {"train": 1504176606, "t10k": 1504176627}
    for name, md5 in FashionMNIST.resources:
        data = (PACKAGE / name).read_bytes()
        time = times[name.split("-")[0]].to_bytes(4, "little")
        named = (
            data[:3]
            + b"\x08"
            + time
            + data[8:10]
            + name.removesuffix(".gz").encode()
            + b"\0"
            + data[10:]
        )
        assert hashlib.md5(named).hexdigest() == md5, name
