"""CIFAR-10-C and CIFAR-100-C as published.

There is one ``.npy`` file for each corruption, with 10 000 images for each of five severities in
order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fl_lightning.errors import InputError, as_bad_input
from fl_lightning.probing.corruptions.recipes import EXTRA, SEVERITY, STANDARD

FOLDERS = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}
ROWS = slice(10_000 * (SEVERITY - 1), 10_000 * SEVERITY)


class PublishedImages:
    """The published corrupted images of a data set under ``root``; :meth:`read` reads them.

    Args:
        dataset: name of the data set.
        root: the folder that holds the published folder.
    """

    def __init__(self, dataset: str, root: str) -> None:
        self.folder = Path(root) / FOLDERS.get(dataset, "none")
        names = (*STANDARD, *EXTRA, "labels")
        self.missing = [
            f"{name}.npy"
            for name in names
            if dataset not in FOLDERS or not (self.folder / f"{name}.npy").is_file()
        ]
        self.known = dataset in FOLDERS

    @property
    def why_not(self) -> str | None:
        """The reason why the published images cannot be used; None if they can."""
        if not self.known:
            return "the data set has no published corrupted images"
        if self.missing:
            return f"{self.folder} lacks {len(self.missing)} of 20 files, first {self.missing[0]}"
        return None

    def read(self, name: str) -> np.ndarray:
        """Return the images of one corruption at severity 3, uint8 RGB ``[10000, 32, 32, 3]``.

        Raises:
            InputError: the file cannot be read or has another shape or type.
        """
        images = self._load(name)
        if images.shape != (50_000, 32, 32, 3) or images.dtype != np.uint8:
            raise InputError(
                f"{self.folder / name}.npy",
                f"it holds {images.dtype} {list(images.shape)}, published are uint8 [50000, 32, 32, 3]",
                "fetch it again, or move the folder away",
            )
        return np.array(images[ROWS])

    def check_labels(self, target: np.ndarray) -> None:
        """Check that the published labels are those of this test set, int64 ``[10000]``.

        Raises:
            InputError: they differ.
        """
        labels = self._load("labels")[ROWS]
        if not np.array_equal(labels, target):
            raise InputError(
                f"{self.folder / 'labels.npy'}",
                f"its rows {ROWS.start} to {ROWS.stop} are not the labels of the test set",
                "fetch it again, or move the folder away",
            )

    def _load(self, name: str) -> np.ndarray:
        path, again = self.folder / f"{name}.npy", "fetch it again, or move the folder away"
        with as_bad_input(f"{path}", "it cannot be read", again, OSError, ValueError, EOFError):
            return np.load(path, mmap_mode="r", allow_pickle=False)
