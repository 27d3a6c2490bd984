"""Folders of images of one colour each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"blue": (0, 0, 200), "red": (200, 0, 0)}


def write(
    folder: Path, n: int = 10, shape: tuple[int, int] = (20, 20), colours: dict | None = None
) -> Path:
    """Images of one colour and some noise in a folder for each colour."""
    rng = np.random.default_rng(n)
    for name, colour in (colours or COLOURS).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(n):
            pixels = np.array(colour) + rng.integers(0, 50, (*shape, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:03}.png")
    return folder


def damaged(folder: Path) -> None:
    path = write(folder) / "red" / "003.png"
    path.write_bytes(path.read_bytes()[:200])
