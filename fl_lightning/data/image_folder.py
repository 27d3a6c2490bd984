"""Images in folders: a folder for each class, or a folder for each client with a folder for each
class."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from fl_lightning.config.constraints import path_to, within
from fl_lightning.data.arrays import (
    ClientCount,
    Names,
    check_count,
    check_test_fraction,
    class_numbers,
    default_partition,
    in_test,
    name_from,
    number_names,
    numbers_by_name,
)
from fl_lightning.data.base import ValFraction
from fl_lightning.data.form import Form
from fl_lightning.data.image_base import ImageData
from fl_lightning.data.local import Arrays
from fl_lightning.data.partition import Partition, check_memory
from fl_lightning.data.pixels import is_deep
from fl_lightning.errors import InputError, as_bad_input, require

log = logging.getLogger(__name__)

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


class ImageFile(NamedTuple):
    """An image on disk, with the names of its class and, if folders say it, of its client."""

    path: Path
    label: str
    client: str | None


IMAGES = path_to("folder", "there is no such folder", "write the path of a folder of images")


class ImageFolder(ImageData):
    """Images of one's own, as ``class/image`` or ``client/class/image``, distributed to clients.

    Images become RGB of ``size`` x ``size`` pixels: what a square of another shape cuts off at the
    edges is left out, and the rest is resized. They stay bytes, and are cropped, flipped and
    normalised in batches.

    Args:
        train: folder of the training images.
        test: folder of the test images, in the form of ``train``; null: ``test_fraction`` of every
            class.
        test_fraction: share of every class that becomes the test set if there is no ``test``, in
            (0, 1); the same images in every run.
        client_folders: whether the folders are those of clients, which hold folders of classes.
        size: side of the images in pixels.
        num_clients: number of clients; 0: as many as there are folders of clients.
        partition: rule that assigns training images to clients; null: Natural with folders of
            clients, else Dirichlet with beta 0.1.
        val_fraction: share of each client's images that is held out for validation, in [0, 1).
        settings: those of all images, see :class:`~fl_lightning.data.image_base.ImageData`.
    """

    examplewise = True
    names = Names()

    def __init__(
        self,
        train: Annotated[str, IMAGES],
        test: Annotated[str | None, IMAGES] = None,
        test_fraction: float = 0.2,
        client_folders: bool = False,
        size: Annotated[
            int, within("[1, inf)", "an image has at least one pixel", "write e.g. 32")
        ] = 32,
        num_clients: ClientCount = 0,
        partition: Partition | None = None,
        val_fraction: ValFraction = 0.1,
        **settings: Any,
    ) -> None:
        self.count_clients = check_count(num_clients, client_folders)
        check_test_fraction(test is not None, test_fraction)
        self.train_path, self.test_path = Path(train), Path(test) if test else None
        self.dataset, self.root, self.side = name_from(train), str(self.train_path.parent), size
        super().__init__(
            num_clients=num_clients or 1,
            partition=default_partition(client_folders) if partition is None else partition,
            val_fraction=val_fraction,
            **settings,
        )
        self.test_fraction, self.client_folders = test_fraction, client_folders
        self.check_public()

    def prepare_data(self) -> None:
        """Check that the folders hold images.

        Raises:
            InputError: a folder is missing or holds no images, or its form is another one.
        """
        for path in filter(None, (self.train_path, self.test_path)):
            find_images(path, self.client_folders, tells=True)

    def setup(self, stage: str | None = None) -> None:
        """Read the images.

        Raises:
            InputError: an image is damaged, a class of the test has no training images, or all
                images are of one class.
        """
        train = find_images(self.train_path, self.client_folders)
        test: list[ImageFile] = []
        if self.test_path:
            test = find_images(self.test_path, self.client_folders)
        elif self.run_form is None:
            chosen = in_test(np.array([file.label for file in train]), self.test_fraction)
            test = [file for file, take in zip(train, chosen, strict=True) if take]
            train = [file for file, take in zip(train, chosen, strict=True) if not take]
        labels = [file.label for file in train]
        classes = class_numbers(labels, self.run_form, f"{self.train_path}")
        for file in test:
            require(
                file.label in classes,
                f"{file.path}",
                f"the class {file.label} has no training images",
                "remove the folder, or give training images of that class",
            )
        tested = {file.label for file in test}
        if test and (untested := [name for name in classes if name not in tested]):
            some = ", ".join(untested[:5]) + (" ..." if len(untested) > 5 else "")
            log.warning(
                "%s has no image of %s: accuracy is of the other classes",
                self.test_path or "the test set",
                some,
            )
        clients = number_names(file.client for file in train) if self.client_folders else {}
        self._owner, self._test_owner = (
            numbers_by_name([file.client for file in files], clients) for files in (train, test)
        )
        self.names = Names(classes=list(classes), clients=list(clients))
        self.num_classes = len(classes)
        if self.count_clients:
            self.num_clients = len(clients)
        held = [self._arrays(files, classes) for files in (train, test)]
        self.hold(held[0], held[1])

    def _arrays(self, files: Sequence[ImageFile], classes: dict[Any, int]) -> Arrays:
        check_memory(
            f"{len(files)} images of {self.side}x{self.side} pixels", 3 * self.side**2 * len(files)
        )
        images = np.empty((len(files), 3, self.side, self.side), np.uint8)
        for number, file in enumerate(files):
            images[number] = read_image(file.path, self.side)
        return images, np.array([classes[file.label] for file in files], np.int64)

    def form(self) -> Form:
        return replace(super().form(), classes=list(self.names.classes))

    def partition_summary(self) -> dict[str, Any]:
        """Return the content of ``partition.json``, with the names of classes and clients and the
        SHA-256 of all images."""
        return super().partition_summary() | self.names.summary(self._digest)


def find_images(folder: Path, client_folders: bool, *, tells: bool = False) -> list[ImageFile]:
    """Return the images below a folder, in the order of their paths. What is no image is left out.

    Args:
        folder: holds folders of classes, or of clients with folders of classes.
        client_folders: whether it holds those of clients.
        tells: whether warnings say what is left out.

    Raises:
        InputError: there is no such folder, it holds no images, or its form is another one.
    """
    IMAGES.check(folder)
    form = "client/class/image" if client_folders else "class/image"
    splits = sorted(path.name for path in _folders(folder))
    require(
        client_folders or not ({"train", "test"} <= set(splits)),
        f"{folder}",
        "it holds train and test, which are no classes",
        f"write train: {folder / 'train'} and test: {folder / 'test'}",
    )
    found: list[ImageFile] = []
    left_out: Counter[str] = Counter()
    empty: list[str] = []
    for outer in _folders(folder):
        inner = _folders(outer)
        require(
            client_folders or not inner,
            f"{outer}",
            f"it holds folders, and the form is {form}",
            "write client_folders: true if they are client/class/image, or move the images up",
        )
        for label in inner if client_folders else [outer]:
            before = len(found)
            for path in sorted(label.iterdir()):
                if path.name.startswith("."):  # such as ._1.png, which macOS leaves beside 1.png
                    continue
                if path.is_file() and path.suffix.lower() in SUFFIXES:
                    found.append(
                        ImageFile(path, label.name, outer.name if client_folders else None)
                    )
                else:
                    left_out[path.suffix or path.name] += 1
            empty += [label.relative_to(folder).as_posix()] if len(found) == before else []
    if not found:
        flat = sum(path.is_file() and path.suffix.lower() in SUFFIXES for path in folder.iterdir())
        rule = f"it holds no images; the form is {form}"
        instead = f"give images: {', '.join(SUFFIXES)}"
        if flat:
            rule = f"its {flat} images lie outside of class folders; the form is {form}"
            instead = "make a folder for each class, and move the images there"
        raise InputError(f"{folder}", rule, instead)
    if left_out and tells:
        kinds = ", ".join(f"{count} of {kind}" for kind, count in left_out.most_common(5))
        log.warning("%s: left out as no images: %s", folder, kinds)
    if empty and tells:
        log.warning("%s: left out, as they hold no image: %s", folder, ", ".join(empty))
    return found


def read_image(path: Path, side: int) -> np.ndarray:
    """Return an image as uint8 ``[3, side, side]``.

    Raises:
        InputError: it is damaged, or has pixels of more than 8 bits.
    """
    errors = OSError, ValueError, SyntaxError, Image.DecompressionBombError
    with (
        as_bad_input(f"{path}", "it is no image or damaged", "remove or mend it", *errors),
        Image.open(path) as image,
    ):
        deep = is_deep(image)
        square = ImageOps.fit(image.convert("RGB"), (side, side), method=Image.Resampling.BILINEAR)
    require(
        not deep, f"{path}", "its pixels have more than 8 bits", "convert it to 8 bits a channel"
    )
    return np.asarray(square).transpose(2, 0, 1)


def _folders(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
