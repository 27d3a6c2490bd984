"""Helpers of the corruptions: plasma, frost, motion blur, zoom. The sources are those of
``recipes.py``.

Arrays are batches: ``n`` images, height ``H``, width ``W``, ``C`` channels. Colours are in [0, 1]
unless stated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.ndimage import zoom

from fl_lightning.errors import InputError

FROST_FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
"""The published photographs that the published code uses; it never uses the sixth."""
FROST_COLOURS = np.array(
    [[78, 149, 166], [201, 205, 214], [201, 205, 214], [138, 153, 166], [112, 123, 135]], np.float32
)
"""Measured mean colours (RGB, 0 to 255) of the five photographs."""
FROST_CONTRAST, FROST_SLOPE = 22.0, 0.47
"""Standard deviation of grey, and exponent of amplitude over frequency, of 32x32 cuts of the
photographs."""


def plasma(n: int, side: int, decay: float, rng: np.random.Generator) -> np.ndarray:
    """Return height maps in [0, 1] by the diamond-square algorithm, ``[n, side, side]``.

    The noise of each level is ``decay`` times smaller than that of the level before.
    """
    size = 2 ** math.ceil(math.log2(side))
    height = np.zeros((n, size, size))
    step, wobble = size, 100.0

    def mean(total: np.ndarray) -> np.ndarray:
        return total / 4 + wobble * rng.uniform(-wobble, wobble, total.shape)

    while step >= 2:
        half = step // 2
        corners = height[:, ::step, ::step]
        squares = corners + np.roll(corners, -1, axis=1)
        height[:, half::step, half::step] = mean(squares + np.roll(squares, -1, axis=2))
        centres = height[:, half::step, half::step]
        above, left = centres + np.roll(centres, 1, axis=1), centres + np.roll(centres, 1, axis=2)
        height[:, ::step, half::step] = mean(above + corners + np.roll(corners, -1, axis=2))
        height[:, half::step, ::step] = mean(left + corners + np.roll(corners, -1, axis=1))
        step, wobble = half, wobble / decay
    height -= height.min(axis=(1, 2), keepdims=True)
    return (height / height.max(axis=(1, 2), keepdims=True))[:, :side, :side]


def clipped_zoom(images: np.ndarray, factor: float) -> np.ndarray:
    """Return the centre of ``images`` ``[n, side, side, C]``, enlarged by ``factor`` to the same
    size."""
    side = images.shape[1]
    cut = math.ceil(side / factor)
    top = (side - cut) // 2
    large = zoom(images[:, top : top + cut, top : top + cut], (1, factor, factor, 1), order=1)
    top = (large.shape[1] - side) // 2
    return large[:, top : top + side, top : top + side]


def motion_blur(images: np.ndarray, radius: int, sigma: float, angles: np.ndarray) -> np.ndarray:
    """Blur images along a line as ImageMagick does; return ``[n, H, W, C]``.

    The kernel is half a Gaussian over ``2 radius + 1`` pixels. Pixels at the edges are repeated.

    Args:
        images: float ``[n, H, W, C]``.
        radius: half length of the line in pixels.
        sigma: standard deviation of the Gaussian in pixels.
        angles: direction of the line for each image in degrees, ``[n]``.
    """
    n, H, W, _ = images.shape
    step = np.arange(2 * radius + 1)
    weight = np.exp(-(step**2) / (2 * sigma**2))
    weight /= weight.sum()
    angle = np.deg2rad(angles)[:, None]
    down, right = (np.ceil(step * part(angle) - 0.5).astype(np.int64) for part in (np.sin, np.cos))
    blurred = np.zeros_like(images)
    for i, share in enumerate(weight):
        row = np.clip(np.arange(H) + down[:, i, None], 0, H - 1)
        column = np.clip(np.arange(W) + right[:, i, None], 0, W - 1)
        blurred += share * images[np.arange(n)[:, None, None], row[:, :, None], column[:, None, :]]
    return blurred


def frost_photographs(folder: Path) -> list[np.ndarray]:
    """Return the published photographs at a fifth of their size, RGB uint8.

    The list is empty unless all five are in ``folder``.

    Raises:
        InputError: a file is no picture.
    """
    import cv2

    if not all((folder / name).is_file() for name in FROST_FILES):
        return []
    photographs = []
    for name in FROST_FILES:
        photograph = cv2.imread(str(folder / name))
        if photograph is None:
            raise InputError(
                f"{folder / name}", "it is no picture", "fetch it again, or move the folder away"
            )
        photographs.append(cv2.resize(photograph, (0, 0), fx=0.2, fy=0.2)[..., ::-1])
    return photographs


def frost_layers(
    n: int, side: int, rng: np.random.Generator, photographs: Sequence[np.ndarray] = ()
) -> np.ndarray:
    """Return layers of frost, float32 RGB in 0 to 255, ``[n, side, side, 3]``.

    They are random cuts of the photographs or, without photographs, noise with the mean colours,
    contrast and spectrum of the published ones.
    """
    which = rng.integers(5, size=n)
    if not photographs:
        return _drawn_frost(FROST_COLOURS[which], side, rng)
    cuts = []
    for index in which:
        photograph = photographs[index]
        row, column = (rng.integers(0, size - side) for size in photograph.shape[:2])
        cuts.append(photograph[row : row + side, column : column + side])
    return np.stack(cuts).astype(np.float32)


def _drawn_frost(colours: np.ndarray, side: int, rng: np.random.Generator) -> np.ndarray:
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    frequency[0, 0] = np.inf  # the noise has mean zero; the colour is added below
    spectrum = (
        np.fft.rfft2(rng.standard_normal((len(colours), side, side))) * frequency**-FROST_SLOPE
    )
    noise = np.fft.irfft2(spectrum, s=(side, side))
    noise *= FROST_CONTRAST / noise.std(axis=(1, 2), keepdims=True)
    return np.clip(colours[:, None, None, :] + noise[..., None], 0, 255).astype(np.float32)
