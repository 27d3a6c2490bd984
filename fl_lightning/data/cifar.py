"""CIFAR-10 and CIFAR-100 from the published files, which are pickles and are read as untrusted
input.

torchvision provides the addresses and checksums of the files. They are unpickled here, because a
pickle can run any code: this unpickler builds arrays, lists and dictionaries only. It also avoids
NumPy's deprecation warning about the dtype in these old files.
"""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.data.local import Arrays
from fl_lightning.data.published_files import PublishedFiles
from fl_lightning.errors import InputError, as_bad_input

log = logging.getLogger(__name__)


def _dtype(spec: str, align: int = 0, copy: int = 0) -> np.dtype:
    return np.dtype(spec, bool(align), bool(copy))


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")  # Python 3 pickles bytes for Python 2 as latin1 text


_RECONSTRUCT, _SCALAR = np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _RECONSTRUCT for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _SCALAR for core in ("core", "_core")},
    **{
        (f"numpy.{core}.numeric", "_frombuffer"): np.empty(0).__reduce_ex__(5)[0]
        for core in ("core", "_core")
    },
}


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that refuses all globals but those that rebuild arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def read_batch(path: Path) -> Arrays:
    """Return the images uint8 ``[n, 3, 32, 32]`` and labels int64 ``[n]`` of one batch file.

    Raises:
        InputError: the file is damaged or no batch in CIFAR's format.
    """
    instead = "delete it and write --data.download true, or run configs/kd_default.yaml, which needs no files"
    # a damaged pickle can raise nearly any error
    with as_bad_input(f"{path}", "not a batch in CIFAR's format or damaged", instead, Exception):
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="latin1").load()
        content = {
            key.decode("latin1") if isinstance(key, bytes) else key: value
            for key, value in content.items()
        }
        images = np.asarray(content["data"])
        labels = np.asarray(
            content["fine_labels"] if "fine_labels" in content else content["labels"]
        ).astype(np.int64)
        if images.dtype != np.uint8 or images.shape != (len(labels), 3 * 32 * 32):
            raise ValueError(f"{images.dtype} {images.shape} for {len(labels)} labels")
    return images.reshape(-1, 3, 32, 32), labels


class Cifar(PublishedFiles):
    """The files of CIFAR-10 or CIFAR-100.

    Args:
        dataset: ``cifar10`` or ``cifar100``.
        root: the folder that holds torchvision's folder.
    """

    def __init__(self, dataset: str, *, root: str) -> None:
        from torchvision import datasets

        self.published = datasets.CIFAR100 if dataset == "cifar100" else datasets.CIFAR10
        super().__init__(dataset, Path(root) / self.published.base_folder)

    def missing(self) -> list[str]:
        """Return the names of the files that are not in the folder."""
        files = [*self.published.train_list, *self.published.test_list]
        return [name for name, _ in files if not (self.folder / name).is_file()]

    def prepare(self, download: bool) -> None:
        super().prepare(download)
        self._compare_checksums()

    def download(self, folder: Path) -> None:
        from torchvision.datasets.utils import check_integrity, download_and_extract_archive

        name, md5 = self.published.filename, self.published.tgz_md5
        if check_integrity(str(self.folder.parent / name), md5):  # it was copied there
            (folder.parent / name).symlink_to((self.folder.parent / name).resolve())
        download_and_extract_archive(self.published.url, str(folder.parent), filename=name, md5=md5)

    def _compare_checksums(self) -> None:
        from torchvision.datasets.utils import check_integrity

        for name, md5 in [*self.published.train_list, *self.published.test_list]:
            if not check_integrity(str(self.folder / name), md5):
                log.warning(
                    "%s: this is not the published file (its checksum differs)", self.folder / name
                )

    def read(self) -> tuple[Arrays, Arrays]:
        """Return training and test images and labels, in the form of :func:`read_batch`.

        Raises:
            InputError: a file is damaged or has labels of another data set.
        """
        train = [read_batch(self.folder / name) for name, _ in self.published.train_list]
        test = [read_batch(self.folder / name) for name, _ in self.published.test_list]
        (train_x, train_y), (test_x, test_y) = (
            tuple(map(np.concatenate, zip(*part, strict=True))) for part in (train, test)
        )
        limit = 100 if self.dataset == "cifar100" else 10
        for labels in (train_y, test_y):
            if len(labels) == 0 or labels.min() < 0 or labels.max() >= limit:
                raise InputError(
                    f"{self.folder}",
                    f"labels of {self.dataset} are 0 to {limit - 1}, these are not",
                    "write the data set to which they belong",
                )
        return (train_x, train_y), (test_x, test_y)
