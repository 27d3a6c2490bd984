"""Images of data sets that are known by a short name: CIFAR, Fashion-MNIST, digits and synthetic
images.

A data set is one entry of ``DATASETS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fl_lightning.config.constraints import one_of, within
from fl_lightning.data.arrays import sha256_of
from fl_lightning.data.cifar import Cifar
from fl_lightning.data.fashion_mnist import FashionMnist
from fl_lightning.data.image_base import ImageData
from fl_lightning.data.local import Arrays, digits, synthetic
from fl_lightning.data.partition import check_memory
from fl_lightning.data.published_files import PublishedFiles
from fl_lightning.errors import require


@dataclass(frozen=True)
class ImageSet:
    """A data set of images that is known by a name.

    Args:
        read: returns training and test images uint8 ``[N, C, side, side]`` with their classes int64
            ``[N]``, given the data that have the settings, as all functions here.
        num_classes: number of classes.
        side: side of an image in pixels.
        prepare: downloads and checks the files; by default there are none.
        grey: whether its images have one channel, C = 1, and not 3.
    """

    read: Callable[[FederatedImages], tuple[Arrays, Arrays]]
    num_classes: Callable[[FederatedImages], int]
    side: Callable[[FederatedImages], int] = lambda data: 32
    prepare: Callable[[FederatedImages], None] = lambda data: None
    grey: bool = False


def _published(
    files: Callable[[FederatedImages], PublishedFiles],
    *,
    num_classes: int,
    side: int = 32,
    grey: bool = False,
) -> ImageSet:
    return ImageSet(
        read=lambda data: files(data).read(),
        num_classes=lambda data: num_classes,
        side=lambda data: side,
        prepare=lambda data: files(data).prepare(data.download),
        grey=grey,
    )


DATASETS = {
    "fashion_mnist": _published(
        lambda data: FashionMnist(root=data.root), num_classes=10, side=28, grey=True
    ),
    "cifar10": _published(lambda data: Cifar("cifar10", root=data.root), num_classes=10),
    "cifar100": _published(lambda data: Cifar("cifar100", root=data.root), num_classes=100),
    "digits": ImageSet(read=lambda data: digits(), num_classes=lambda data: 10, grey=True),
    "synthetic": ImageSet(
        read=lambda data: synthetic(
            sizes=data.synthetic_sizes,
            side=data.synthetic_size,
            num_classes=data.synthetic_classes,
            seed=data.synthetic_seed,
        ),
        num_classes=lambda data: data.synthetic_classes,
        side=lambda data: data.synthetic_size,
    ),
}
"""All data sets by name. A new one is an entry here, and nothing else."""
GREY = tuple(name for name, images in DATASETS.items() if images.grey)
ONE_OR_MORE = within("[1, inf)", "at least 1", "write 1 or more")
KNOWN_DATASET = one_of(
    tuple(DATASETS),
    instead="write one of them, or name other data: --data HuggingFaceData, ImageFolder or DatasetData",
    near=True,
)


class FederatedImages(ImageData):
    """Images and their classes, distributed to clients.

    Args:
        dataset: fashion_mnist (read from root or from Debian's package dataset-fashion-mnist),
            cifar10, cifar100 (read from root), digits (1 797 scanned digits, no files needed) or
            synthetic.
        root: folder of the files (the one that holds FashionMNIST, cifar-10-batches-py or
            cifar-100-python).
        download: whether missing files may be fetched from the network.
        channels: of grey images (fashion_mnist, digits): 3 equal channels, as networks and
            corruptions for colours take them, or 1. Other images have 3.
        public_dataset: data set whose training images, without labels, are the public set of FedKD,
            all of them if public_examples is 0; null: a slice of dataset's own training images,
            taken out before they are dealt to clients. Normalised like dataset's.
        synthetic_examples: training examples of the synthetic data set.
        synthetic_test_examples: test examples of the synthetic data set.
        synthetic_size: side in pixels of the synthetic images.
        synthetic_classes: number of classes of the synthetic data set.
        synthetic_seed: seed of the synthetic images; the run's own seed never changes them.
        settings: those of all images, see :class:`~fl_lightning.data.image_base.ImageData`.
    """

    examplewise = True

    def __init__(
        self,
        dataset: Annotated[str, KNOWN_DATASET] = "digits",
        root: str = "data",
        download: bool = False,
        channels: Annotated[int, one_of((1, 3), "write 3, or 1 for grey images")] = 3,
        public_dataset: str | None = None,
        synthetic_examples: Annotated[int, ONE_OR_MORE] = 5000,
        synthetic_test_examples: Annotated[int, ONE_OR_MORE] = 1000,
        synthetic_size: Annotated[int, ONE_OR_MORE] = 32,
        synthetic_classes: Annotated[int, within("[2, inf)", "at least 2", "write 2 or more")] = 10,
        synthetic_seed: int = 0,
        **settings: Any,
    ) -> None:
        if "synthetic" in (dataset, public_dataset):
            examples = synthetic_examples + synthetic_test_examples
            size = (
                f"{examples} synthetic images of {synthetic_size}x{synthetic_size} pixels in "
                f"{synthetic_classes} classes"
            )
            # bytes of the pixels and labels, and of the float32 patterns of the classes
            check_memory(
                size, examples * (3 * synthetic_size**2 + 8) + synthetic_classes * 3 * 4 * 4 * 4
            )
        self.dataset, self.root, self.channels = dataset, root, channels
        self.download: bool = download
        self.synthetic_sizes: tuple[int, int] = (synthetic_examples, synthetic_test_examples)
        self.synthetic_size: int = synthetic_size
        self.synthetic_classes: int = synthetic_classes
        self.synthetic_seed: int = synthetic_seed
        self.side = DATASETS[dataset].side(self)
        super().__init__(**settings)
        self.public_dataset = public_dataset
        self.check_public()
        self._check_channels()
        self.num_classes = DATASETS[dataset].num_classes(self)

    def check_public(self) -> None:
        """Refuse a public set whose images do not fit, or that clients are tested on."""
        super().check_public()
        name, dataset, seen = self.public_dataset, self.dataset, self.view_side
        if name is None:
            return
        require(
            name in DATASETS,
            f"public_dataset={name!r}",
            f"one of {', '.join(DATASETS)}",
            "write null for a slice",
        )
        require(
            name != dataset,
            f"public_dataset={name!r} for dataset={dataset!r}",
            "the public set is never the clients' own data",
            "write public_dataset null and public_examples 200 for a slice that no client holds",
        )
        side = DATASETS[name].side(self)
        require(
            side == seen or (self.crop == "shrink" and side > seen),
            f"public_dataset={name!r} with {side}x{side} images",
            f"the network sees {seen}x{seen}",
            f"write crop shrink and a crop_size of {min(side, self.side)} or less",
        )

    def _check_channels(self) -> None:
        """Refuse one channel of images that have three."""
        for name in filter(None, (self.dataset, self.public_dataset)):
            require(
                self.channels == 3 or name in GREY,
                f"channels={self.channels} for {name}",
                "its images have three channels",
                f"write channels 3, or a data set of grey images: {', '.join(GREY)}",
            )

    def prepare_data(self) -> None:
        """Download missing files if allowed, and check the files.

        Raises:
            InputError: a file is missing.
        """
        for dataset in filter(None, (self.dataset, self.public_dataset)):
            DATASETS[dataset].prepare(self)

    def setup(self, stage: str | None = None) -> None:
        """Load the images and compute the mean and standard deviation of the training pixels.

        Raises:
            InputError: a file is damaged.
        """
        train, test = self._read(self.dataset)
        public = self._read(self.public_dataset)[0][0] if self.public_dataset else None
        self.hold(train, test, public)

    @property
    def public_sha256(self) -> str:
        public = self.public_images
        return "" if public is None else sha256_of([public[self.public_index]])

    def _read(self, dataset: str) -> tuple[Arrays, Arrays]:
        """Return training and test images with their classes, all images with ``channels``
        channels."""
        parts = DATASETS[dataset].read(self)
        train, test = (
            (
                images
                if images.shape[1] == self.channels
                else images.repeat(self.channels, axis=1),
                labels,
            )
            for images, labels in parts
        )
        return train, test
