"""Images that need no network: scikit-learn's scanned digits, and synthetic ones. Both are the same in every
run."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import interpolate

from fl_lightning.rng import stream

Arrays = tuple[np.ndarray, np.ndarray]
SPLIT_SEED = 0  # of the digits' test set: never the run's seed, the test set is the same for everyone


def _to_uint8(values: torch.Tensor) -> np.ndarray:
    return values.round().clamp(0, 255).to(torch.uint8).numpy()


def digits() -> tuple[Arrays, Arrays]:
    """1 797 scanned digits (8x8, 17 grey levels) as RGB 32x32: 80 % training, 20 % test, the same share of
    every class."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    grey = torch.from_numpy(pixels).reshape(-1, 1, 8, 8) * (255 / 16)
    images = _to_uint8(interpolate(grey, size=(32, 32), mode="bilinear", align_corners=False)).repeat(
        3, axis=1
    )
    labels = labels.astype(np.int64)
    rng = stream(SPLIT_SEED, "digits/test")
    in_test = np.zeros(len(labels), bool)
    for value in range(10):
        members = rng.permutation(np.flatnonzero(labels == value))
        in_test[members[: round(0.2 * len(members))]] = True
    return (images[~in_test], labels[~in_test]), (images[in_test], labels[in_test])


def synthetic(*, sizes: tuple[int, int], side: int, num_classes: int, seed: int) -> tuple[Arrays, Arrays]:
    """Learnable images: a smooth pattern for each class, a smooth pattern of the example's own, and pixel
    noise.

    The two patterns live in the same 4x4 grid, so the classes overlap and accuracy stays below 1.
    """
    prototype = 0.5 * stream(seed, "synthetic/classes").standard_normal((num_classes, 3, 4, 4), np.float32)

    def draw(part: str, count: int) -> Arrays:
        rng = stream(seed, f"synthetic/{part}")
        labels = rng.permutation(np.arange(count, dtype=np.int64) % num_classes)
        images = np.empty((count, 3, side, side), np.uint8)
        for start in range(0, count, 4096):  # in blocks: the floats of 50 000 images would be 0.6 GB
            label = labels[start : start + 4096]
            grid = prototype[label] + rng.standard_normal((len(label), 3, 4, 4), np.float32)
            smooth = interpolate(
                torch.from_numpy(grid), size=(side, side), mode="bilinear", align_corners=False
            )
            noise = torch.from_numpy(rng.standard_normal((len(label), 3, side, side), np.float32))
            images[start : start + 4096] = _to_uint8(128 + 40 * smooth + 12 * noise)
        return images, labels

    return draw("train", sizes[0]), draw("test", sizes[1])
