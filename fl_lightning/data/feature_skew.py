"""Feature skew: each client sees the images in a way of its own, whatever their classes are.

The images that a client holds are changed once, when they are dealt out, and stay so in every
round. Of the global test set each image is changed as for the client that it is dealt to, so that
the test is the mixture of what all clients see, and a client's own model is tested on its own
features. Images of the public set, which nobody holds, stay as they are.

``n`` images, ``K`` clients, ``C`` channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fl_lightning.config.constraints import within
from fl_lightning.config.recorded import Recorded, with_settings
from fl_lightning.errors import MisuseError, require
from fl_lightning.rng import stream
from fl_lightning.support.hook_forms import form_of


class FeatureSkew(Recorded, ABC):
    """What each client sees of its images: a pure function of its arguments."""

    dtype: ClassVar[torch.dtype] = torch.uint8
    """The type of the changed images; float16 where they leave 0 to 255 or are no whole numbers."""

    @abstractmethod
    def change(
        self, images: Tensor, client: int, num_clients: int, rng: np.random.Generator
    ) -> Tensor:
        """Return what one client sees of images.

        Args:
            images: uint8 ``[n, C, side, side]``.
            client: 0 .. K - 1.
            num_clients: K.
            rng: random numbers of this client's images.

        Returns:
            images in the same shape, of ``dtype``, whose white is 255: uint8, or where ``dtype`` is
            a floating-point type any finite numbers.
        """

    __repr__ = with_settings

    def change_all(
        self, images: Tensor, owner: np.ndarray, num_clients: int, seed: int, part: str
    ) -> Tensor:
        """Return images as their owners see them.

        Args:
            images: uint8 ``[N, C, side, side]`` on the CPU.
            owner: client that holds each image, int64 ``[N]``; -1 for nobody.
            num_clients: K.
            seed: seed of the run.
            part: name of the random stream, one for training and one for test images.
        """
        changed, order = images.to(self.dtype, copy=True), np.argsort(owner, kind="stable")
        starts = np.searchsorted(owner[order], np.arange(num_clients + 1))
        for client in np.flatnonzero(np.diff(starts)).tolist():
            index = torch.from_numpy(order[starts[client] : starts[client + 1]])
            rng = stream(seed, f"feature_skew/{part}", client=client)
            found = self.change(images[index], client, num_clients, rng)
            changed[index] = self._checked(found, images[index])
        return changed

    def _checked(self, found: Any, images: Tensor) -> Tensor:
        """Return changed images in ``dtype``.

        Raises:
            MisuseError: they are none, or casting would make others of them.
        """
        fits = isinstance(found, Tensor) and found.shape == images.shape
        if fits and (found.dtype == self.dtype or self.dtype != torch.uint8):
            cast = found.to(self.dtype)
            if bool(cast.isfinite().all()):
                return cast
        raise MisuseError(
            f"{type(self).__name__}.change, which returned {form_of(found)}",
            f"it returns a {self.dtype} tensor {[*images.shape]}, finite, whose white is 255",
            "write .clamp(0, 255).round().to(torch.uint8), or dtype = torch.float16 in the class",
        )


class FeatureNoise(FeatureSkew):
    """Client i of K sees Gaussian noise of standard deviation ``sigma * i / (K - 1)``, i from 0.

    It is the ``noise`` of NIID-Bench (Li et al., ICDE 2022), on pixels in [0, 1] that are not
    clipped, as its code has it; its paper says N for N - 1, and variance. The code draws the noise
    anew whenever it reads an image; here an image has one noise.

    Args:
        sigma: standard deviation of the last client's noise, 0 to 30: the most that float16 holds
            whatever is drawn.
    """

    dtype = torch.float16

    def __init__(
        self,
        sigma: Annotated[float, within("[0, 30]", "noise has a level from 0 to 30", 0.1)] = 0.1,
    ) -> None:
        self.sigma = float(sigma)

    def change(
        self, images: Tensor, client: int, num_clients: int, rng: np.random.Generator
    ) -> Tensor:
        level = self.sigma * client / max(num_clients - 1, 1)
        noise = torch.from_numpy(rng.standard_normal(tuple(images.shape), np.float32))
        return images + 255 * level * noise


class RotatedClients(FeatureSkew):
    """Client i sees its images turned by an angle, the angles in turn (Ghosh et al., NeurIPS 2020).

    Args:
        angles: counter-clockwise, in degrees. What turns into a corner of the image is black.
    """

    def __init__(self, angles: list[float] | None = None) -> None:
        self.angles = (
            [0.0, 90.0, 180.0, 270.0] if angles is None else [float(angle) for angle in angles]
        )
        require(
            self.angles and all(map(np.isfinite, self.angles)),
            f"angles={self.angles}",
            "there is an angle for each client in turn, in degrees",
            "write e.g. [0, 90, 180, 270]",
        )

    def change(
        self, images: Tensor, client: int, num_clients: int, rng: np.random.Generator
    ) -> Tensor:
        turns, rest = divmod(self.angles[client % len(self.angles)], 90)
        if not rest:  # exact
            return torch.rot90(images, int(turns) % 4, (2, 3))
        from torchvision.transforms.functional import InterpolationMode, rotate

        return rotate(images, 90 * turns + rest, InterpolationMode.BILINEAR)
