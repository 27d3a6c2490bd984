"""CIFAR's files: read in their true format, refused when damaged or hostile."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from cifar_files import files_classes, python2_batch, write_cifar
from toy import ready

from fl_lightning.data import IID, FederatedImages
from fl_lightning.data.cifar import Cifar, read_batch


@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_cifar_files_are_read(tmp_path: Path, dataset: str, modern: bool) -> None:
    content = write_cifar(tmp_path, dataset, modern=modern)
    data = ready(dataset=dataset, root=str(tmp_path), num_clients=4, partition=IID())
    *train, test = content.values()
    assert torch.equal(
        data.train_images.flatten(1),
        torch.from_numpy(np.concatenate([images for images, _ in train])),
    )
    assert data.train_target.tolist() == [*chain(*(labels for _, labels in train))]
    assert torch.equal(data.test_images.flatten(1), torch.from_numpy(test[0]))
    assert data.test_target.tolist() == test[1]
    assert data.num_classes == files_classes(dataset)


def test_a_hostile_pickle_is_refused_and_does_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    for payload in (
        Evil(),
        {"data": Evil(), "labels": [1]},
        {"data": np.array([Evil()], object), "labels": [1]},
    ):
        path = tmp_path / "data_batch_1"
        path.write_bytes(pickle.dumps(payload))
        with pytest.raises(ValueError, match=r"data_batch_1.*system"):
            read_batch(path)
    path.write_bytes(b"cnumpy\nndarray.eval\n.")
    with pytest.raises(ValueError, match="data_batch_1"):
        read_batch(path)
    assert not (tmp_path / "executed").exists()


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    good = path.read_bytes()
    images, labels = read_batch(path)
    short = python2_batch(images.reshape(20, -1)[:, :100], {"labels": labels.tolist()})
    for bad in (
        good[: len(good) // 2],
        b"",
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"labels": [1]}),
        short,
    ):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="data_batch_3") as error:
            ready(dataset="cifar10", root=str(tmp_path))
        assert "\n" not in str(error.value)
        assert path.read_bytes() == bad
    path.write_bytes(python2_batch(images.reshape(20, -1), {"labels": [11] * 20}))
    with pytest.raises(ValueError, match="0 to 9"):
        ready(dataset="cifar10", root=str(tmp_path))


@pytest.mark.parametrize("download", [False, True])
def test_missing_files_are_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, download: bool
) -> None:
    import torchvision.datasets.utils as utils

    def no_network(url: str, root: str, **_: object) -> None:
        os.makedirs(root, exist_ok=True)  # as torchvision does, before it connects
        raise OSError("no route\nto host")

    monkeypatch.setattr(utils, "download_and_extract_archive", no_network)
    with pytest.raises(ValueError, match="data_batch_1") as error:
        FederatedImages(
            "cifar10", root=str(tmp_path / "new" / "root"), download=download
        ).prepare_data()
    message = str(error.value)
    assert "\n" not in message
    assert str(tmp_path / "new" / "root" / "cifar-10-batches-py") in message
    assert "configs/kd_default.yaml" in message
    assert ("no route to host" if download else "--data.download true") in message
    assert not (tmp_path / "new").exists()  # bad input creates nothing


def test_an_archive_that_is_there_is_unpacked_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path / "there", "cifar10")
    files = Cifar("cifar10", root=str(tmp_path))
    archive = tmp_path / files.published.filename
    shutil.make_archive(
        str(archive).removesuffix(".tar.gz"), "gztar", tmp_path / "there", files.folder.name
    )
    found = hashlib.md5(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(files.published, "tgz_md5", found)
    monkeypatch.setattr("urllib.request.urlopen", None)
    files.prepare(download=True)
    assert not files.missing()
    assert hashlib.md5(archive.read_bytes()).hexdigest() == found


def test_a_download_puts_whole_files_there_and_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.datasets.utils as utils

    write_cifar(tmp_path / "there", "cifar10")
    files = Cifar("cifar10", root=str(tmp_path / "here"))
    files.folder.mkdir(parents=True)
    (files.folder / "data_batch_1").write_bytes(b"mine")
    before = files.missing()

    def fetch(url: str, root: str, *, fails: bool, **_: object) -> None:
        folder = Path(root) / files.folder.name
        there = tmp_path / "there" / files.folder.name
        shutil.copytree(there, folder, dirs_exist_ok=True)
        if fails:
            (folder / "data_batch_2").write_bytes(b"half")
            raise OSError("the line is dead")

    monkeypatch.setattr(utils, "download_and_extract_archive", partial(fetch, fails=True))
    with pytest.raises(ValueError, match="the line is dead"):
        files.prepare(download=True)
    assert files.missing() == before
    monkeypatch.setattr(utils, "download_and_extract_archive", partial(fetch, fails=False))
    files.prepare(download=True)
    assert not files.missing()
    assert (files.folder / "data_batch_1").read_bytes() == b"mine"
    assert len([*files.folder.iterdir()]) == 6
