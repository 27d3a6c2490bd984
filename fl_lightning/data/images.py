"""Images that lie on the device as bytes, where they are cropped, flipped and normalised in batches.

``N`` examples, ``B`` batch, ``E`` epochs, ``n`` examples of one client.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.data.base import FederatedData, Split
from fl_lightning.data.cifar import Cifar
from fl_lightning.data.local import Arrays, digits, synthetic
from fl_lightning.data.partition import Dirichlet, Partition, check_memory
from fl_lightning.errors import require

DATASETS = {"cifar10": 10, "cifar100": 100, "digits": 10, "synthetic": 0}  # number of classes
Crop = Literal["none", "pad", "shrink"]


class FederatedImages(FederatedData):
    """Images and their classes, distributed to clients.

    Args:
        dataset: cifar10, cifar100 (read from root), digits (1 797 scanned digits, no files needed) or
            synthetic.
        root: folder of the CIFAR files (the one that holds cifar-10-batches-py or cifar-100-python).
        download: whether missing CIFAR files may be fetched from the network.
        num_clients: number of clients that hold the training examples.
        partition: rule that assigns training examples to clients; by default Dirichlet with beta 0.1.
        batch_size: examples of one local step.
        val_fraction: share of each client's examples held out for validation, in [0, 1); at least one of two
            or more.
        crop: none; pad: random crop after zero padding, test images whole; shrink: random crop, centre crop
            at test.
        crop_padding: pixels added on each side before a pad crop.
        crop_size: side in pixels that a shrink crop leaves; the network sees images of this size.
        flip: whether training images are mirrored left to right with probability 1/2.
        public_dataset: data set whose training images, without labels, are the public set of FedKD; null: a
            slice of dataset's own training images, taken out before they are dealt to clients. Normalised
            like dataset's.
        public_examples: images of the public set, drawn by the run's seed; 0: all of public_dataset's, or
            with null no public set.
        synthetic_examples: training examples of the synthetic data set.
        synthetic_test_examples: test examples of the synthetic data set.
        synthetic_size: side in pixels of the synthetic images.
        synthetic_classes: number of classes of the synthetic data set.
        synthetic_seed: seed of the synthetic images; the run's own seed never changes them.
    """

    train_images: Tensor
    test_images: Tensor
    train_mean: tuple[float, ...]
    train_std: tuple[float, ...]
    public_images: Tensor | None

    examplewise = True

    def __init__(
        self,
        dataset: str = "digits",
        root: str = "data",
        download: bool = False,
        num_clients: int = 100,
        partition: Partition | None = None,
        batch_size: int = 64,
        val_fraction: float = 0.05,
        crop: Crop = "none",
        crop_padding: int = 4,
        crop_size: int = 28,
        flip: bool = False,
        public_dataset: str | None = None,
        public_examples: int = 0,
        synthetic_examples: int = 5000,
        synthetic_test_examples: int = 1000,
        synthetic_size: int = 32,
        synthetic_classes: int = 10,
        synthetic_seed: int = 0,
    ) -> None:
        near = (get_close_matches(str(dataset).lower(), DATASETS, n=1, cutoff=0.0) or ["digits"])[0]
        require(
            dataset in DATASETS,
            f"dataset={dataset!r}",
            f"one of {', '.join(DATASETS)}",
            f"did you mean {near}?",
        )
        require(
            crop in get_args(Crop),
            f"crop={crop!r}",
            f"one of {', '.join(get_args(Crop))}",
            "write none for no crop",
        )
        for name, value, least in (
            ("synthetic_examples", synthetic_examples, 1),
            ("synthetic_test_examples", synthetic_test_examples, 1),
            ("synthetic_size", synthetic_size, 1),
            ("synthetic_classes", synthetic_classes, 2),
            ("crop_padding", crop_padding, 0),
        ):
            require(value >= least, f"{name}={value}", f"at least {least}", f"write {least} or more")
        if "synthetic" in (dataset, public_dataset):
            examples = synthetic_examples + synthetic_test_examples
            size = (
                f"{examples} synthetic images of {synthetic_size}x{synthetic_size} pixels in "
                f"{synthetic_classes} classes"
            )
            # bytes of the pixels and labels, and of the float32 patterns of the classes
            check_memory(size, examples * (3 * synthetic_size**2 + 8) + synthetic_classes * 3 * 4 * 4 * 4)
        self.side = _side(dataset, synthetic_size)
        require(
            crop != "shrink" or 1 <= crop_size <= self.side,
            f"crop_size={crop_size}",
            f"a crop lies inside the {self.side}x{self.side} image",
            f"write 1 to {self.side}",
        )
        if public_dataset is not None:
            require(
                public_dataset in DATASETS,
                f"public_dataset={public_dataset!r}",
                f"one of {', '.join(DATASETS)}",
                "write null for a slice",
            )
            require(
                public_dataset != dataset,
                f"public_dataset={public_dataset!r} for dataset={dataset!r}",
                "the public set is never the clients' own data",
                "write public_dataset null and public_examples 200 for a slice that no client holds",
            )
            side, seen = _side(public_dataset, synthetic_size), crop_size if crop == "shrink" else self.side
            require(
                side == seen or (crop == "shrink" and side > seen),
                f"public_dataset={public_dataset!r} with {side}x{side} images",
                f"the network sees {seen}x{seen}",
                f"write crop shrink and a crop_size of {min(side, self.side)} or less",
            )
        if crop == "pad":
            padded = self.side + 2 * crop_padding
            check_memory(f"crop_padding={crop_padding} around an image", 3 * padded**2)
        super().__init__(
            dataset=dataset,
            num_clients=num_clients,
            partition=Dirichlet(0.1) if partition is None else partition,
            batch_size=batch_size,
            val_fraction=val_fraction,
            public_examples=public_examples,
            public_dataset=public_dataset,
        )
        self.root, self.download = root, download
        self.crop, self.crop_padding, self.flip = crop, crop_padding, flip
        self.view_side = crop_size if crop == "shrink" else self.side
        self.synthetic_sizes, self.synthetic_seed = (
            (synthetic_examples, synthetic_test_examples),
            synthetic_seed,
        )
        self.synthetic_size = synthetic_size
        self.num_classes, self.synthetic_classes = DATASETS[dataset] or synthetic_classes, synthetic_classes
        self.example_shape = (3, self.view_side, self.view_side)

    def prepare_data(self) -> None:
        """Download missing CIFAR files if allowed, and check the files.

        Raises:
            InputError: a file is missing.
        """
        for dataset in (self.dataset, self.public_dataset):
            if dataset and dataset.startswith("cifar"):
                Cifar(dataset, root=self.root).prepare(self.download)

    def setup(self, stage: str | None = None) -> None:
        """Load the images and compute the mean and standard deviation of the training pixels.

        Raises:
            InputError: a file is damaged.
        """
        train, test = self._read(self.dataset)
        self.public_images = (
            torch.from_numpy(self._read(self.public_dataset)[0][0]) if self.public_dataset else None
        )
        self.train_images, self.train_target = map(torch.from_numpy, train)
        self.test_images, self.test_target = map(torch.from_numpy, test)
        level = np.arange(256) / 255
        counts = np.stack([np.bincount(train[0][:, channel].ravel(), minlength=256) for channel in range(3)])
        share = counts / counts.sum(axis=1, keepdims=True)
        mean = share @ level
        # the lower bound avoids a division by zero where a channel is constant
        std = np.sqrt(share @ level**2 - mean**2 + 1e-12).clip(min=1 / 255)
        self.train_mean, self.train_std = tuple(mean.tolist()), tuple(std.tolist())
        self.move(self.device)

    def _read(self, dataset: str) -> tuple[Arrays, Arrays]:
        if dataset == "digits":
            return digits()
        if dataset == "synthetic":
            sizes, side = self.synthetic_sizes, self.synthetic_size
            return synthetic(
                sizes=sizes, side=side, num_classes=self.synthetic_classes, seed=self.synthetic_seed
            )
        return Cifar(dataset, root=self.root).read()

    def move(self, device: torch.device) -> None:
        """Move the images to the device."""
        super().move(device)
        if self.public_images is not None:
            self.public_images = self.public_images.to(device)
        self.train_images, self.test_images = self.train_images.to(device), self.test_images.to(device)
        self._mean, self._std = torch.tensor([self.train_mean, self.train_std], device=device)[
            :, :, None, None
        ]

    def draws(self, rng: np.random.Generator, epochs: int, n: int) -> np.ndarray | None:
        """Draw the top and left edge of the crop and whether it is mirrored, int64 ``[E, n, 3]``."""
        if self.crop == "none" and not self.flip:
            return None
        # one call, so that the first epochs do not depend on the number of epochs
        uniform = rng.random((epochs, n, 3))
        places = {"none": 1, "pad": 2 * self.crop_padding + 1, "shrink": self.side - self.view_side + 1}[
            self.crop
        ]
        return (uniform * [places, places, 2 if self.flip else 1]).astype(np.int64)

    def view(self, images: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return the part of the images that the network sees.

        Args:
            images: uint8 ``[B, 3, side, side]``.
            draws: crop and mirroring as :meth:`draws` returns them, ``[B, 3]``; None: the centre crop.
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
        channel = torch.arange(3, device=images.device)[:, None, None]
        return images[example, channel, row[:, None, :, None], column[:, None, None, :]]  # a single gather

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalise pixels in [0, 1] with the constants of the training set."""
        return (pixels - self._mean) / self._std

    def denormalise(self, inputs: Tensor) -> Tensor:
        """Return the pixels in [0, 1] of normalised inputs; the inverse of :meth:`normalise`."""
        return inputs * self._std + self._mean

    def inputs(self, split: Split, index: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return the images at ``index``, cropped and normalised, float32 ``[B, *example_shape]``."""
        images = self.train_images if split == "train" else self.test_images
        return self.normalise(self.view(images[index], draws).float() / 255)

    def public_pool(self) -> int:
        """Return the number of images from which the public set is drawn."""
        return super().public_pool() if self.public_images is None else len(self.public_images)

    def public_inputs(self, position: Tensor) -> Tensor:
        """Return public images, float32 ``[B, *example_shape]``.

        They are not augmented, and are normalised with the constants of ``dataset``.
        """
        if self.public_images is None:
            return super().public_inputs(position)
        return self.normalise(self.view(self.public_images[self.public_index[position]]).float() / 255)


def _side(dataset: str, synthetic_size: int) -> int:
    return synthetic_size if dataset == "synthetic" else 32
