"""Images that need no download: scikit-learn's scanned digits, and synthetic images.

Both data sets are the same in every run.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate

from fl_lightning.data.partition import share_of_each
from fl_lightning.rng import stream

Arrays = tuple[np.ndarray, np.ndarray]
DIGITS_SPLIT_SEED = 0  # not the run's seed: all runs have the same test set


def _to_uint8(values: torch.Tensor) -> np.ndarray:
    return values.round().clamp(0, 255).to(torch.uint8).numpy()


def digits() -> tuple[Arrays, Arrays]:
    """Return 1 797 scanned digits (8x8, 17 grey levels), enlarged to 32x32, uint8 ``[N, 1, 32,
    32]``.

    Of every class, 80 % are training and 20 % are test images. The arrays are the caller's own.
    """
    (images, labels), (test_images, test_labels) = _digits()
    return (images.copy(), labels.copy()), (test_images.copy(), test_labels.copy())


def _scanned() -> Arrays:
    """Return what scikit-learn's ``load_digits`` returns, from the file that it reads: importing
    scikit-learn takes half a second, which every first round would wait for."""
    try:
        file = Path(
            str(distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz"))
        )
    except PackageNotFoundError:  # it can be imported all the same where a system has put it
        file = Path()
    if not file.is_file():
        from sklearn.datasets import load_digits

        return load_digits(return_X_y=True)
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1], table[:, -1]


@cache  # a sweep reads them for every cell, and they are a text file
def _digits() -> tuple[Arrays, Arrays]:
    pixels, labels = _scanned()
    grey = torch.from_numpy(pixels).reshape(-1, 1, 8, 8) * (255 / 16)
    images = _to_uint8(interpolate(grey, size=(32, 32), mode="bilinear", align_corners=False))
    labels = labels.astype(np.int64)
    in_test = share_of_each(labels, 0.2, stream(DIGITS_SPLIT_SEED, "digits/test"))
    return (images[~in_test], labels[~in_test]), (images[in_test], labels[in_test])


def synthetic(
    *, sizes: tuple[int, int], side: int, num_classes: int, seed: int
) -> tuple[Arrays, Arrays]:
    """Return synthetic training and test images that a network can learn to classify.

    An image is the sum of a smooth pattern of its class, a smooth pattern of its own, and pixel
    noise. Both patterns come from a 4x4 grid, so classes overlap and the accuracy stays below 1.

    Args:
        sizes: number of training and of test images.
        side: side of an image in pixels.
        num_classes: number of classes.
        seed: seed of the images.
    """
    prototype = 0.5 * stream(seed, "synthetic/classes").standard_normal(
        (num_classes, 3, 4, 4), np.float32
    )

    def draw(part: str, count: int) -> Arrays:
        rng = stream(seed, f"synthetic/{part}")
        labels = rng.permutation(np.arange(count, dtype=np.int64) % num_classes)
        images = np.empty((count, 3, side, side), np.uint8)
        # in blocks: the floats of 50 000 images would be 0.6 GB
        for start in range(0, count, 4096):
            label = labels[start : start + 4096]
            grid = prototype[label] + rng.standard_normal((len(label), 3, 4, 4), np.float32)
            smooth = interpolate(
                torch.from_numpy(grid), size=(side, side), mode="bilinear", align_corners=False
            )
            noise = torch.from_numpy(rng.standard_normal((len(label), 3, side, side), np.float32))
            images[start : start + 4096] = _to_uint8(128 + 40 * smooth + 12 * noise)
        return images, labels

    return draw("train", sizes[0]), draw("test", sizes[1])
