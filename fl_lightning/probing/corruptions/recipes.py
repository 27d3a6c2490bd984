"""The 15 standard and 4 extra corruptions of CIFAR-10-C and CIFAR-100-C at severity 3.

Source: Hendrycks & Dietterich, ICLR 2019. The recipes and constants are those of the authors'
``ImageNet-C/create_c/make_cifar_c.py`` for images of 32x32. (Packages on the registry have the
constants of ImageNet, which are ten times as strong on small images.) The differences are:

- noise comes from streams of the run's seed; images are corrupted in batches;
- motion blur is ImageMagick's algorithm, without ImageMagick;
- photographs of frost are used if they are in ``<data.root>/frost``; otherwise frost is drawn, see
  ``layers.frost_layers``.

Images are uint8 RGB ``[n, side, side, 3]``; inside, floats in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO

import numpy as np
import torch
from scipy.ndimage import gaussian_filter, map_coordinates
from torch import Tensor

from fl_lightning.probing.corruptions.layers import clipped_zoom, frost_layers, motion_blur, plasma
from fl_lightning.rng import stream

STANDARD = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SEVERITY = 3
IMAGES_PER_BLOCK = 1000  # images that are corrupted at once, which bounds the memory
Images = np.ndarray
Generator = np.random.Generator


def corrupt(name: str, images: Images, seed: int, photographs: Sequence[np.ndarray] = ()) -> Images:
    """Return the images with one corruption, uint8; the result is the same for all methods with one
    seed.

    Args:
        name: one of ``STANDARD`` or ``EXTRA``.
        images: uint8 RGB ``[n, side, side, 3]``.
        seed: seed of the run.
        photographs: photographs of frost, RGB uint8, larger than the images; if empty, frost is
            drawn.
    """
    blocks = []
    for number, start in enumerate(range(0, len(images), IMAGES_PER_BLOCK)):
        block = images[start : start + IMAGES_PER_BLOCK]
        rng = stream(seed, f"corruption/{name}", number)
        done = _frost(block, rng, photographs) if name == "frost" else RECIPES[name](block, rng)
        blocks.append(done if done.dtype == np.uint8 else _to_bytes(done))
    return np.concatenate(blocks)


def corrupt_images(
    name: str, images: Tensor, seed: int, photographs: Sequence[np.ndarray] = ()
) -> Tensor:
    """Return :func:`corrupt` of images uint8 ``[n, C, side, side]``, in the same shape, on the CPU.

    Grey images, C = 1, are corrupted as three equal channels, of which the first is returned.
    """
    colours = images.cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    done = torch.from_numpy(corrupt(name, colours, seed, photographs)).permute(0, 3, 1, 2)
    return done[:, : images.shape[1]]


def _to_bytes(x: np.ndarray) -> Images:
    return (np.clip(x, 0, 1) * 255).astype(np.uint8)  # truncated, not rounded, as published


def _to_unit_range(images: Images, dtype: type = np.float64) -> np.ndarray:
    # the precision is the published one, because it decides how ``_to_bytes`` truncates
    return images.astype(dtype) / dtype(255)


def _gaussian(x: np.ndarray, sigma: float) -> np.ndarray:
    return gaussian_filter(x, (0, sigma, sigma, 0), mode="nearest", truncate=4)


# Noise


def gaussian_noise(images: Images, rng: Generator) -> np.ndarray:
    """Add Gaussian noise of standard deviation 0.08."""
    return _to_unit_range(images) + rng.normal(0, 0.08, images.shape)


def shot_noise(images: Images, rng: Generator) -> np.ndarray:
    """Replace each value by a Poisson count with mean 100 times the value, divided by 100."""
    return rng.poisson(_to_unit_range(images) * 100) / 100


def impulse_noise(images: Images, rng: Generator) -> np.ndarray:
    """Replace 3 % of the values by 0 or 1."""
    hit, salt = rng.random(images.shape) <= 0.03, rng.random(images.shape) <= 0.5
    return np.where(hit, salt, _to_unit_range(images))


def speckle_noise(images: Images, rng: Generator) -> np.ndarray:
    """Multiply each value by 1 plus Gaussian noise of standard deviation 0.12."""
    return _to_unit_range(images) * (1 + rng.normal(0, 0.12, images.shape))


# Blur


def gaussian_blur(images: Images, rng: Generator) -> np.ndarray:
    """Blur with a Gaussian of 0.7 pixels."""
    return _gaussian(_to_unit_range(images), 0.7)


def defocus_blur(images: Images, rng: Generator) -> np.ndarray:
    """A 3x3 Gaussian of 0.6 pixels: the disk of radius 0.5 is one pixel, so only its anti-aliasing
    blurs."""
    return gaussian_filter(
        _to_unit_range(images), (0, 0.6, 0.6, 0), mode="mirror", radius=(0, 1, 1, 0)
    )


def glass_blur(images: Images, rng: Generator) -> np.ndarray:
    """Each pixel is replaced by a neighbour up or left.

    As in the published code it is copied, although the paper speaks of swaps.
    """
    x = _to_bytes(_gaussian(_to_unit_range(images), 0.4))
    n, side = x.shape[:2]
    up, left = rng.integers(-1, 1, (2, n, side, side))
    for h in range(side - 1, 1, -1):
        for w in range(side - 1, 1, -1):
            x[:, h, w] = x[np.arange(n), h + up[:, h, w], w + left[:, h, w]]
    return _gaussian(_to_unit_range(x), 0.4)


def motion_blur_recipe(images: Images, rng: Generator) -> np.ndarray:
    """Blur along a line of random direction within 45 degrees of the horizontal."""
    return motion_blur(_to_unit_range(images), 6, 2, rng.uniform(-45, 45, len(images)))


def zoom_blur(images: Images, rng: Generator) -> np.ndarray:
    """Average the image with enlargements of it, up to a factor of 1.15."""
    x, factors = _to_unit_range(images, np.float32), np.arange(1, 1.16, 0.01)
    return (x + sum(clipped_zoom(x, factor) for factor in factors)) / (len(factors) + 1)


# Weather


def snow(images: Images, rng: Generator) -> np.ndarray:
    """Brighten the image and add blurred flakes."""
    x = _to_unit_range(images, np.float32)
    flakes = clipped_zoom(rng.normal(0.15, 0.3, (*x.shape[:3], 1)), 1.75)
    flakes = _to_unit_range(_to_bytes(np.where(flakes < 0.55, 0, flakes)))
    flakes = motion_blur(flakes, 10, 4, rng.uniform(-135, -45, len(x)))
    grey = (x @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]
    return (
        0.9 * x + 0.1 * np.maximum(x, grey * 1.5 + 0.5) + flakes + np.rot90(flakes, 2, axes=(1, 2))
    )


def _frost(images: Images, rng: Generator, photographs: Sequence[np.ndarray]) -> np.ndarray:
    layers = frost_layers(len(images), images.shape[1], rng, photographs)
    return 0.9 * _to_unit_range(images) + 0.4 * layers / 255


def fog(images: Images, rng: Generator) -> np.ndarray:
    """Add a plasma map and scale the result back to the brightness of the image."""
    x = _to_unit_range(images)
    most = x.max(axis=(1, 2, 3), keepdims=True)
    return (x + 0.75 * plasma(len(x), x.shape[1], 2.5, rng)[..., None]) * most / (most + 0.75)


def spatter(images: Images, rng: Generator) -> np.ndarray:
    """Pale turquoise drops, brighter towards one side."""
    x = _to_unit_range(images, np.float32)
    liquid = gaussian_filter(
        rng.normal(0.65, 0.3, x.shape[:3]), (0, 1, 1), mode="nearest", truncate=4
    )
    liquid = _to_bytes(np.where(liquid < 0.69, 0, liquid))
    drops = np.stack([_drops(layer) for layer in liquid])
    return x + 0.5 * drops[..., None] * np.array([175, 238, 238], np.float32) / 255


def _drops(liquid: np.ndarray) -> np.ndarray:
    import cv2

    distance = cv2.distanceTransform(255 - cv2.Canny(liquid, 50, 150), cv2.DIST_L2, 5)
    distance = cv2.equalizeHist(cv2.blur(np.minimum(distance, 20), (3, 3)).astype(np.uint8))
    relief = cv2.filter2D(distance, cv2.CV_8U, np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]))
    drops = liquid * cv2.blur(relief, (3, 3)).astype(np.float32)
    return drops / max(float(drops.max()), 1e-12)  # a small image may have no drops at all


# Light and colour


def brightness(images: Images, rng: Generator) -> np.ndarray:
    """Raise the value in HSV by 0.15."""
    return _in_hsv(images, 2, lambda value: value + 0.15)


def saturate(images: Images, rng: Generator) -> np.ndarray:
    """Multiply the saturation in HSV by 1.5."""
    return _in_hsv(images, 1, lambda saturation: saturation * 1.5)


def _in_hsv(images: Images, channel: int, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    from matplotlib.colors import hsv_to_rgb, rgb_to_hsv

    hsv = rgb_to_hsv(_to_unit_range(images))
    hsv[..., channel] = np.clip(change(hsv[..., channel]), 0, 1)
    return hsv_to_rgb(hsv)


def contrast(images: Images, rng: Generator) -> np.ndarray:
    """Reduce the distance to the mean colour to 40 %."""
    x = _to_unit_range(images)
    mean = x.mean(axis=(1, 2), keepdims=True)
    return (x - mean) * 0.4 + mean


# Digital


def elastic_transform(images: Images, rng: Generator) -> np.ndarray:
    """A random affine map, then a smooth random displacement; both grow with the side."""
    import cv2

    x, side = _to_unit_range(images, np.float32), images.shape[1]
    alpha, sigma, corner = 0.08 * side, 0.06 * side, 0.06 * side
    centre, third = side // 2, side // 3
    here = centre + third * np.array([[1, 1], [1, -1], [-1, -1]], np.float32)
    there = here + rng.uniform(-corner, corner, (len(x), 3, 2)).astype(np.float32)
    shift = (
        gaussian_filter(
            rng.uniform(-1, 1, (2, *x.shape[:3])), (0, 0, sigma, sigma), mode="reflect", truncate=3
        )
        * alpha
    )
    row, column = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    for image, corners, down, right in zip(x, there, *shift, strict=True):
        turned = cv2.warpAffine(
            image,
            cv2.getAffineTransform(here, corners),
            (side, side),
            borderMode=cv2.BORDER_REFLECT_101,
        )
        for channel in range(3):
            image[..., channel] = map_coordinates(
                turned[..., channel], (row + down, column + right), order=1, mode="reflect"
            )
    return x


def pixelate(images: Images, rng: Generator) -> Images:
    """Reduce the image to 85 % of its side and enlarge it again."""
    from PIL import Image

    side = images.shape[1]
    small, full, box = (int(side * 0.85),) * 2, (side, side), Image.Resampling.BOX
    return np.stack(
        [
            np.asarray(Image.fromarray(image).resize(small, box).resize(full, box))
            for image in images
        ]
    )


def jpeg_compression(images: Images, rng: Generator) -> Images:
    """Encode as JPEG at quality 58 and decode."""
    from PIL import Image

    done = []
    for image in images:
        file = BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=58)
        done.append(np.asarray(Image.open(file)))
    return np.stack(done)


RECIPES: dict[str, Callable[[Images, Generator], np.ndarray]] = {
    "motion_blur": motion_blur_recipe,
    **{
        recipe.__name__: recipe
        for recipe in (
            gaussian_noise,
            shot_noise,
            impulse_noise,
            defocus_blur,
            glass_blur,
            zoom_blur,
            snow,
            fog,
            brightness,
            contrast,
            elastic_transform,
            pixelate,
            jpeg_compression,
            speckle_noise,
            gaussian_blur,
            spatter,
            saturate,
        )
    },
}
"""All recipes by name, except frost, which needs the photographs as well."""
