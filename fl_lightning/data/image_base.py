"""Images that lie on the device as bytes, where they are cropped, flipped and normalised in
batches.

``N`` examples, ``B`` batch, ``E`` epochs, ``n`` examples of one client.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.config.constraints import Constraint, within
from fl_lightning.data.arrays import channel_moments, sha256_of
from fl_lightning.data.base import BatchSize, FederatedData, NumClients, PublicExamples, ValFraction
from fl_lightning.data.example_batches import Split
from fl_lightning.data.feature_skew import FeatureSkew
from fl_lightning.data.form import Form
from fl_lightning.data.holdings import Holdings
from fl_lightning.data.index_file import FromFile
from fl_lightning.data.local import Arrays
from fl_lightning.data.partition import Dirichlet, Natural, Partition, check_memory
from fl_lightning.data.test_owners import deal_test_set
from fl_lightning.errors import require
from fl_lightning.metrics.named import MetricFactory

Crop = Literal["none", "pad", "shrink"]
LOCAL_TEST = within(
    "[0, 1)", "a share in [0, 1)", "write e.g. 0.25, or 0 for the data's own test set"
)


class ImageData(FederatedData):
    """Square images and their classes; a subclass calls :meth:`hold` in ``setup``.

    A subclass sets :attr:`dataset`, :attr:`side`, :attr:`root` and, where it is not 3,
    :attr:`channels` before it calls this constructor.

    Args:
        num_clients: number of clients that hold the training examples.
        partition: rule that assigns training examples to clients; null: Dirichlet with beta 0.1.
        batch_size: examples of one local step.
        val_fraction: share of each client's examples held out for validation, in [0, 1); at least
            one of two or more.
        crop: none; pad: random crop after zero padding, test images whole; shrink: random crop,
            centre crop at test.
        crop_padding: pixels added on each side before a pad crop.
        crop_size: side in pixels that a shrink crop leaves; the network sees images of this size.
        flip: whether training images are mirrored left to right with probability 1/2.
        public_examples: training images of the public set, drawn by the run's seed; 0: no public
            set.
        feature_skew: how what clients see differs, such as FeatureNoise or RotatedClients; null:
            not at all.
        local_test_fraction: share of each client's images that is its own test set, in [0, 1).
            Training and test images are then dealt out together, as PFLlib does with 0.25, and the
            test set is that of all clients. 0: the data's own test set.
        moments: mean and standard deviation by which pixels in [0, 1] are normalised, such as
            ``[0.5, 0.5]``; null: those of the training images, by channel, with
            ``local_test_fraction`` of all that the files have for training.
        metrics: metrics of torchmetrics by class path that are evaluated beside the task's, as
            ``test/*`` and ``val/*``; null: none.
        primary: the metric that selects, of the task's or of ``metrics``; null: the task's primary
            one.
    """

    dataset: str
    """Name of the data set."""
    side: int
    """Side of an image in pixels."""
    channels: int = 3
    """Channels of an image."""
    root: str
    """Folder of the files, beside which the ``test`` command looks for those of corruptions."""

    train_images: Tensor
    test_images: Tensor
    train_mean: tuple[float, ...]
    train_std: tuple[float, ...]
    public_images: Tensor | None

    def __init__(
        self,
        *,
        num_clients: NumClients = 100,
        partition: Partition | None = None,
        batch_size: BatchSize = 64,
        val_fraction: ValFraction = 0.05,
        crop: Annotated[Crop, Constraint(instead="write none for no crop")] = "none",
        crop_padding: Annotated[int, within("[0, inf)", "at least 0", "write 0 or more")] = 4,
        crop_size: int = 28,
        flip: bool = False,
        public_examples: PublicExamples = 0,
        feature_skew: FeatureSkew | None = None,
        local_test_fraction: Annotated[float, LOCAL_TEST] = 0.0,
        moments: tuple[float, float] | None = None,
        metrics: list[MetricFactory] | None = None,
        primary: str | None = None,
    ) -> None:
        side = self.side
        require(
            crop != "shrink" or 1 <= crop_size <= side,
            f"crop_size={crop_size}",
            f"a crop lies inside the {side}x{side} image",
            f"write 1 to {side}",
        )
        if crop == "pad":
            padded = side + 2 * crop_padding
            check_memory(f"crop_padding={crop_padding} around an image", self.channels * padded**2)
        super().__init__(
            dataset=self.dataset,
            num_clients=num_clients,
            partition=Dirichlet(0.1) if partition is None else partition,
            batch_size=batch_size,
            val_fraction=val_fraction,
            public_examples=public_examples,
            metrics=metrics,
            primary=primary,
        )
        self.crop, self.crop_padding, self.flip = crop, crop_padding, flip
        self._digest = ""
        self.feature_skew, self.moments = feature_skew, moments
        self.local_test_fraction = local_test_fraction
        require(
            not (local_test_fraction and isinstance(self.partition, (FromFile, Natural))),
            f"local_test_fraction={local_test_fraction} with the partition {type(self.partition).__name__}",
            "it knows whose the training images are, and nothing of the test images",
            "write local_test_fraction: 0, or another partition",
        )
        require(
            moments is None or (np.isfinite(moments).all() and moments[1] > 0),
            f"moments={moments}",
            "both are finite, and the standard deviation, by which pixels are divided, above 0",
            "write e.g. [0.5, 0.5]",
        )
        self.view_side = crop_size if crop == "shrink" else side
        self.example_shape = (self.channels, self.view_side, self.view_side)

    def check_public(self) -> None:
        """Refuse a public set of images that clients are tested on."""
        require(
            not (self.local_test_fraction and self.public_examples and not self.public_dataset),
            f"local_test_fraction={self.local_test_fraction} with public_examples={self.public_examples}",
            "all images are dealt out to clients",
            "write public_examples: 0, or a public_dataset",
        )

    @abstractmethod
    def setup(self, stage: str | None = None) -> None:
        """Read the images and call :meth:`hold`."""

    def hold(self, train: Arrays, test: Arrays, public: np.ndarray | None = None) -> None:
        """Keep the images, and compute the mean and standard deviation of the training pixels.

        Args:
            train: training images uint8 ``[N, channels, side, side]`` and classes int64 ``[N]``.
            test: test images and classes, in the same form.
            public: images of another data set for the public set; None: there are none.
        """
        self._digest = sha256_of(
            torch.from_numpy(array) for arrays in (train, test) for array in arrays
        )
        moments = self.run_form.moments if self.run_form and self.run_form.moments else None
        if moments is None and self.moments is not None:
            moments = [(value,) * self.channels for value in self.moments]
        self.train_mean, self.train_std = map(tuple, moments or channel_moments(train[0]))
        if self.local_test_fraction:
            train = np.concatenate([train[0], test[0]]), np.concatenate([train[1], test[1]])
        self.public_images = None if public is None else torch.from_numpy(public)
        self.train_images, self.train_target = map(torch.from_numpy, train)
        self.test_images, self.test_target = map(torch.from_numpy, test)
        if self.feature_skew is not None or self.local_test_fraction:
            self._as_read = self.train_images, self.test_images
        self.move(self.device)

    def distribute(self, seed: int, device: torch.device) -> None:
        """Assign the training images to clients, and show them and the test images as the clients
        see them.

        Raises:
            InputError: the public set is refused, or the partition refuses the data.
        """
        self.check_public()
        super().distribute(seed, device)
        if self.feature_skew is None:
            return
        owner = np.full(len(self.train_target), -1)
        owner[self._holdings.index] = np.repeat(np.arange(self.num_clients), self._holdings.sizes)
        change = partial(self.feature_skew.change_all, num_clients=self.num_clients, seed=seed)
        train, test = self._as_read
        self.train_images = change(train, owner, part="train").to(self.device)
        self.test_images = change(test, deal_test_set(self), part="test").to(self.device)

    def deal(self, group: np.ndarray, seed: int) -> Holdings:
        if not self.local_test_fraction:
            return super().deal(group, seed)
        every = self.partition.with_tests(group, self.num_clients, seed, self.local_test_fraction)
        index = torch.from_numpy(every.validation()[0])
        self.test_holdings = Holdings.of_sizes(index.numpy(), every.held_out)
        self._as_read = self._as_read[0], self._as_read[0][index]
        self.test_images, self.test_target = self._as_read[1], self.train_target.cpu()[index]
        return every.without_held_out()

    def distribute_apart(self, holdings: Holdings, seed: int, device: torch.device) -> None:
        require(
            not self.local_test_fraction,
            f"local_test_fraction={self.local_test_fraction} where nodes have data of their own",
            "nobody has all images",
            "write local_test_fraction: 0",
        )
        require(
            self.feature_skew is None,
            f"feature_skew={self.feature_skew} where nodes have data of their own",
            "they are as they are",
            "write feature_skew: null",
        )
        super().distribute_apart(holdings, seed, device)

    def form(self) -> Form:
        return Form(moments=(self.train_mean, self.train_std))

    @property
    def content_sha256(self) -> str:
        """SHA-256 of all training and test images and their classes, as they are read."""
        return self._digest

    def move(self, device: torch.device) -> None:
        super().move(device)
        if self.public_images is not None:
            self.public_images = self.public_images.to(device)
        self.train_images = self.train_images.to(device)
        self.test_images = self.test_images.to(device)
        moments = torch.tensor([self.train_mean, self.train_std], device=device)
        self._mean, self._std = moments[:, :, None, None]

    def draws(self, rng: np.random.Generator, epochs: int, n: int) -> np.ndarray | None:
        """Draw the top and left edge of the crop and whether it is mirrored, int64 ``[E, n,
        3]``."""
        if self.crop == "none" and not self.flip:
            return None
        # one call, so that the first epochs do not depend on the number of epochs
        uniform = rng.random((epochs, n, 3))
        places = {
            "none": 1,
            "pad": 2 * self.crop_padding + 1,
            "shrink": self.side - self.view_side + 1,
        }[self.crop]
        return (uniform * [places, places, 2 if self.flip else 1]).astype(np.int64)

    def view(self, images: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return the part of the images that the network sees.

        Args:
            images: uint8 ``[B, channels, side, side]``.
            draws: crop and mirroring as :meth:`draws` returns them, ``[B, 3]``; None: the centre
                crop.
        """
        side = self.view_side
        if draws is None:
            margin = (images.shape[-1] - side) // 2
            return images[..., margin : margin + side, margin : margin + side]
        if self.crop == "pad":
            images = pad(images, (self.crop_padding,) * 4)
        top, left, mirrored = draws[:, :, None].unbind(1)
        steps = torch.arange(side, device=images.device)
        row = top + steps
        column = left + torch.where(mirrored.bool(), side - 1 - steps, steps)
        example = torch.arange(len(images), device=images.device)[:, None, None, None]
        channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
        # a single gather
        return images[example, channel, row[:, None, :, None], column[:, None, None, :]]

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalise pixels in [0, 1] with the constants of the training set."""
        return (pixels - self._mean) / self._std

    def denormalise(self, inputs: Tensor) -> Tensor:
        """Return the pixels in [0, 1] of normalised inputs; the inverse of :meth:`normalise`."""
        return inputs * self._std + self._mean

    def inputs(self, split: Split, index: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return the images at ``index``, cropped and normalised, float32 ``[B,
        *example_shape]``."""
        images = self.train_images if split == "train" else self.test_images
        return self.normalise(self.view(images[index], draws).float() / 255)

    def public_pool(self) -> int:
        return super().public_pool() if self.public_images is None else len(self.public_images)

    def public_inputs(self, position: Tensor) -> Tensor:
        """Return public images, float32 ``[B, *example_shape]``.

        They are not augmented, and are normalised with the constants of ``dataset``.
        """
        if self.public_images is None:
            return super().public_inputs(position)
        return self.normalise(
            self.view(self.public_images[self.public_index[position]]).float() / 255
        )
