"""Map-style datasets of torch, torchvision and one's own, and the datasets of a
LightningDataModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import isclass
from typing import Any

from lightning import LightningDataModule
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from fl_lightning.config.not_called import overridden, warn_of_ignored
from fl_lightning.data.arrays import ArrayData, Examples, Names
from fl_lightning.data.items import Key, Keys, read_items, to_examples
from fl_lightning.errors import InputError, error_reason
from fl_lightning.rng import torch_stream
from fl_lightning.support.user_code import is_bug_of_user

DatasetCallable = Callable[[], Dataset]
DataModuleCallable = Callable[[], LightningDataModule]
Splits = Mapping[str, tuple[Any, str]]
"""A map-style dataset and its name for messages, by split: ``train``, and those that there are."""


class ItemData(ArrayData):
    """Items that have an input, a target and perhaps more, at positions in a tuple or under names.

    Args:
        input: position in a tuple, or name in a dictionary, of the input; a list of names: the
            network takes a dictionary. null: position 0, or all names that are nothing else.
        target: position or name of the target; null: position 1.
        group: position or name of what partitions deal the items out by; null: the class.
        client: position or name of whose an item is, for the partition Natural; null: none.
        settings: those of all data in memory, see :class:`~fl_lightning.data.arrays.ArrayData`.
    """

    def __init__(
        self,
        *,
        input: Key | list[str] | None = None,
        target: Key | None = None,
        group: Key | None = None,
        client: Key | None = None,
        **settings: Any,
    ) -> None:
        self.keys, self.natural = Keys(input, target, group, client), client is not None
        super().__init__(**settings)

    def examples_of(
        self, splits: Splits, test_keys: Keys | None = None
    ) -> tuple[Examples, Examples, Names]:
        """Read the items of the training and the test dataset; without the latter the test items
        are taken from the training items.

        Args:
            splits: the datasets.
            test_keys: where the parts of a test item are; None: where they are of a training item.

        Raises:
            InputError: one cannot be read.
        """
        keys = {"train": self.keys, "test": test_keys or self.keys}
        found = {
            split: read_items(dataset, keys[split], place, split)
            for split, (dataset, place) in splits.items()
        }
        return to_examples(self, found["train"], found.get("test"))


class DatasetData(ItemData):
    """The items of a map-style ``torch.utils.data.Dataset``, such as torchvision's or one's own.

    Items are ``(input, target)`` or dictionaries. All are read once into memory, so a dataset's
    ``transform`` is applied once and not in every epoch. Images (of PIL, or uint8 ``[C, H, W]``)
    stay bytes, and a batch is normalised with the training images' mean and standard deviation;
    other inputs are taken as they are.

    Args:
        train: class path and arguments of the training dataset; in Python a function that returns
            it.
        test: the test dataset; null: ``test_fraction`` of the training dataset.
        settings: those of the items and of all data in memory, see :class:`ItemData`.
    """

    examplewise = True

    def __init__(
        self, train: DatasetCallable, test: DatasetCallable | None = None, **settings: Any
    ) -> None:
        self.dataset, self.has_test = name_of(train), test is not None
        super().__init__(**settings)
        self.sources = (train, test)
        self._made: Splits | None = None

    def prepare_data(self) -> None:
        """Make the datasets, which may download their files.

        Raises:
            InputError: a dataset refuses its arguments or lacks its files.
        """
        self._made = made_splits(*self.sources)

    def read(self) -> tuple[Examples, Examples, Names]:
        """Make the datasets if that has not been done, and read their items.

        Raises:
            InputError: a dataset cannot be made or read.
        """
        if self._made is None:
            self.prepare_data()
        assert self._made is not None
        examples = self.examples_of(self._made)
        self._made = None
        return examples


BATCH_HOOKS = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
"""What a LightningDataModule may do to batches, and nobody calls."""


class DataModuleData(ItemData):
    """The datasets behind the ``train_dataloader`` and ``test_dataloader`` of a
    ``LightningDataModule``.

    The items of the datasets are read as :class:`DatasetData` reads them; the loaders' batches,
    samplers and collate functions are not used.

    Args:
        module: class path and arguments of the module; in Python a function that returns it.
        settings: those of the items and of all data in memory, see :class:`ItemData`.
    """

    examplewise = True

    def __init__(self, module: DataModuleCallable, **settings: Any) -> None:
        self.dataset = name_of(module)
        super().__init__(**settings)
        self.source = module

    def prepare_data(self) -> None:
        """Call the module's ``prepare_data``.

        Raises:
            InputError: the module refuses its arguments or lacks its files.
        """
        prepare_module(self.source)

    def read(self) -> tuple[Examples, Examples, Names]:
        """Read the items of the module's datasets.

        Raises:
            InputError: the module has no training loader, or a dataset cannot be read.
        """
        return self.examples_of(module_splits(self.source, ("train", "test")))


def prepare_module(source: DataModuleCallable) -> None:
    """Call ``prepare_data`` of a LightningDataModule. What it draws is the same in every run.

    Raises:
        InputError: the module refuses its arguments or lacks its files.
    """
    with torch_stream(0, "data/make"):
        made(lambda: made(source, "data.module").prepare_data(), "data.module")


def made_splits(train: DatasetCallable, test: DatasetCallable | None) -> Splits:
    """Make the training dataset, and the test dataset if there is one. What they draw from global
    generators is the same in every run.

    Raises:
        InputError: one cannot be made.
    """
    found = {}
    with torch_stream(0, "data/make"):
        for split, source in (("train", train), ("test", test)):
            if source is not None:
                dataset = made(source, f"data.{split}")
                found[split] = dataset, f"data.{split} {name_of(dataset)}"
    return found


def module_splits(source: DataModuleCallable, splits: Sequence[str]) -> Splits:
    """Set a LightningDataModule up and return the datasets behind its loaders.

    Args:
        source: what makes the module, or the module itself.
        splits: ``train`` and others of ``val`` and ``test``.

    Raises:
        InputError: the module has no training loader, or a loader has not one dataset.
    """
    with torch_stream(0, "data/make"):
        module = made(source, "data.module")
    with torch_stream(0, "data_module"):  # a split that the module draws is the same in every run
        # before a loader is asked: one that ignores the stage splits anew
        for stage in ("fit", "test"):
            made(partial(module.setup, stage), "data.module")
        found = {split: _dataset_of(module, split) for split in splits}
    unread = ["val_dataloader"] * ("val" not in splits) + BATCH_HOOKS
    why = (
        "not called; items are read one by one, and data.val_fraction holds validation examples out"
    )
    warn_of_ignored(overridden(module, LightningDataModule, unread), module, why)
    return {
        split: (dataset, f"data.module {name_of(source)}, {split}")
        for split, dataset in found.items()
        if dataset is not None
    }


def _dataset_of(module: LightningDataModule, split: str) -> Any:
    """Return the dataset of a loader; None if the module does not define the loader or it gives
    none."""
    name = f"{split}_dataloader"
    defined = getattr(type(module), name) is not getattr(LightningDataModule, name)
    loaders = getattr(module, name)() if defined else None
    loaders = list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]
    if split != "train" and loaders in ([], [None]):
        return None
    found = [
        dataset for loader in loaders if (dataset := getattr(loader, "dataset", None)) is not None
    ]
    if len(loaders) != 1 or not found:
        given = "several loaders" if len(loaders) > 1 else "no loader with a dataset"
        raise InputError(
            f"data.module {name_of(module)}",
            f"its {name} gives {given}",
            "let it return a torch.utils.data.DataLoader",
        )
    warn_of_ignored(
        _unread(loaders[0]), loaders[0], f"not used of {name}; items are read one by one"
    )
    return found[0]


def _unread(loader: object) -> list[str]:
    """Return what a loader would do to its dataset beside batches and their order."""
    if not isinstance(loader, DataLoader):
        return []
    unread = {
        "collate_fn": loader.collate_fn not in (default_collate, default_convert),
        "batch_sampler": loader.batch_size is None and loader.batch_sampler is not None,
        "sampler": not isinstance(loader.sampler, (SequentialSampler, RandomSampler)),
        "drop_last": loader.drop_last,
    }
    return [name for name, is_set in unread.items() if is_set]


def made(make: Any, setting: str) -> Any:
    """Return what a function makes, or what was given instead of one.

    Raises:
        InputError: a library refuses its arguments, or a file is missing. A bug in the user's own
            code stays what it is.
    """
    if isinstance(make, (Dataset, LightningDataModule)) or not callable(make):
        return make
    try:
        return make()
    except InputError:
        raise
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        if is_bug_of_user(error):
            raise
        rule = f"it cannot be made ({error_reason(error)})"
        raise InputError(f"{setting} {name_of(make)}", rule, "correct its arguments") from error


def name_of(make: Any) -> str:
    """Return the name of the class or function that makes something, or of the class of what is
    made."""
    while isinstance(make, partial):
        make = make.args[-1] if make.args and isclass(make.args[-1]) else make.func
    name = getattr(make, "__name__", type(make).__name__)
    return name if name.isidentifier() else "dataset"
