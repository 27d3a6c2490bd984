"""Small files in Fashion-MNIST's true format, and where the real ones are."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from fl_lightning.data import fashion_mnist
from fl_lightning.data.fashion_mnist import DEBIAN_COMMAND, DEBIAN_FOLDER, SHA256

NAMES = tuple(SHA256)
PACKAGE = DEBIAN_FOLDER
"""Where the Debian package puts its files; tests write others' files elsewhere."""
needs_package = pytest.mark.skipif(
    not (PACKAGE / f"{NAMES[0]}.gz").is_file(), reason=f"needs the real files: {DEBIAN_COMMAND}"
)


def idx(array: np.ndarray) -> bytes:
    """A file of the idx format, whose numbers are bytes."""
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(
        f">{array.ndim}i", *array.shape
    )
    return header + array.astype(np.uint8).tobytes()


def write_fashion(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, rows: int = 40, packed: bool = True
) -> dict[str, np.ndarray]:
    """Write the four files with random images, which are the published ones until the test ends,
    and let no Debian package be installed."""
    rng = np.random.Generator(np.random.Philox(8))
    content = {}
    folder.mkdir(parents=True)
    for name in NAMES:
        kind = "images" if "images" in name else "labels"
        content[name] = (
            rng.integers(0, 256, (rows, 28, 28), np.uint8)
            if kind == "images"
            else (np.arange(rows) % 10).astype(np.uint8)
        )
        data = idx(content[name])
        (folder / (f"{name}.gz" if packed else name)).write_bytes(
            gzip.compress(data) if packed else data
        )
        monkeypatch.setitem(fashion_mnist.SHA256, name, hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", folder.parent / "no package")
    return content
