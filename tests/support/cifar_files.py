"""Small files in CIFAR's true format."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np

from fl_lightning.data.cifar import Cifar


def python2_batch(images: np.ndarray, labels: dict[str, list[int]]) -> bytes:
    """A batch as Python 2 and NumPy 1 pickled it (protocol 2), opcode by opcode: the form of the
    published files."""

    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    def blob(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = (
        b"cnumpy\ndtype\n"
        + text("u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text("|")
        + b"NNN"
        + number(-1) * 2
        + b"K\x00tb"
    )
    shape = number(images.shape[0]) + number(images.shape[1]) + b"\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
    )
    array += b"(K\x01" + shape + dtype + b"\x89" + blob(images.tobytes()) + b"tb"
    items = text("data") + array + text("batch_label") + text("a batch")
    for name, values in labels.items():
        items += text(name) + b"](" + b"".join(map(number, values)) + b"e"
    return b"\x80\x02}(" + items + b"u."


def write_cifar(
    root: Path, dataset: str, *, rows: int = 20, modern: bool = False
) -> dict[str, tuple[np.ndarray, list[int]]]:
    files, content = Cifar(dataset, root=str(root)), {}
    files.folder.mkdir(parents=True)
    rng = np.random.Generator(np.random.Philox(8))
    for name, _ in [*files.published.train_list, *files.published.test_list]:
        images, fine = (
            rng.integers(0, 256, (rows, 3072), np.uint8),
            rng.integers(0, files_classes(dataset), rows).tolist(),
        )
        labels = (
            {"fine_labels": fine, "coarse_labels": [0] * rows}
            if dataset == "cifar100"
            else {"labels": fine}
        )
        whole = {b"data": images, **{key.encode(): value for key, value in labels.items()}}
        (files.folder / name).write_bytes(
            pickle.dumps(whole) if modern else python2_batch(images, labels)
        )
        content[name] = images, fine
    return content


def files_classes(dataset: str) -> int:
    return 100 if dataset == "cifar100" else 10
