"""Fashion-MNIST: 70 000 grey images of clothing, 28x28 pixels, in 10 classes (Xiao et al., 2017;
MIT).

The four files are in the idx format of MNIST, packed with gzip or not: as torchvision leaves them
under ``ROOT/FashionMNIST/raw``, or as Debian's package ``dataset-fashion-mnist`` installs them.
Debian packs the same contents anew, so a file is known by the SHA-256 of what is in it and not by
that of its packed form.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np

from fl_lightning.data.local import Arrays
from fl_lightning.data.published_files import PublishedFiles
from fl_lightning.errors import as_bad_input, require

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DEBIAN_COMMAND = "apt-get install dataset-fashion-mnist"
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""SHA-256 of the four published files without gzip."""
LARGEST_FILE = 16 + 60_000 * 28 * 28  # bytes; no more is unpacked


class FashionMnist(PublishedFiles):
    """The files of Fashion-MNIST, under ``root`` or as the Debian package has them.

    Args:
        root: the folder that holds torchvision's folder.
    """

    def __init__(self, *, root: str) -> None:
        super().__init__(
            "fashion_mnist",
            Path(root) / "FashionMNIST" / "raw",
            instead=f"run {DEBIAN_COMMAND}, put the files there",
        )

    def missing(self) -> list[str]:
        """Return the files that ``root`` lacks; none where the Debian package is installed."""
        if not _lacking(DEBIAN_FOLDER):
            return []
        return [f"{name}.gz" for name in _lacking(self.folder)]

    def download(self, folder: Path) -> None:
        from torchvision.datasets import FashionMNIST
        from torchvision.datasets.utils import download_and_extract_archive

        (mirror,) = FashionMNIST.mirrors
        lacking = [f"{name}.gz" for name in _lacking(self.folder)]
        for name, md5 in FashionMNIST.resources:
            if name in lacking:
                download_and_extract_archive(f"{mirror}{name}", str(folder), filename=name, md5=md5)

    def read(self) -> tuple[Arrays, Arrays]:
        """Return training and test images uint8 ``[N, 1, 28, 28]`` with their classes int64
        ``[N]``.

        Raises:
            InputError: a file is damaged, or is not the published one.
        """
        folder = DEBIAN_FOLDER if _lacking(self.folder) else self.folder
        train_x, train_y, test_x, test_y = (_read_idx(folder, name) for name in SHA256)
        return (
            (train_x[:, None], train_y.astype(np.int64)),
            (test_x[:, None], test_y.astype(np.int64)),
        )


def _lacking(folder: Path) -> list[str]:
    """Return the names of the files of which a folder has neither the plain nor the packed form."""
    return [name for name in SHA256 if _path_in(folder, name) is None]


def _path_in(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """Return the numbers of a file of the idx format, uint8 in the shape that it declares."""
    path = _path_in(folder, name)
    assert path is not None, f"{name} is not in {folder}: prepare() comes first"
    mend = "delete it and write --data.download true, or run " + DEBIAN_COMMAND
    with (
        as_bad_input(
            f"{path}", "it is damaged or cannot be read", mend, OSError, EOFError, zlib.error
        ),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file,
    ):
        content = file.read(LARGEST_FILE + 1)
    require(
        hashlib.sha256(content).hexdigest() == SHA256[name],
        f"{path}",
        "this is not the published file of Fashion-MNIST (the SHA-256 of its contents differs)",
        mend,
    )
    # two zero bytes, 8 for uint8, the number of dimensions, then each dimension as a big-endian
    # integer
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()
