"""Data sets of the library Hugging Face ``datasets``, by name or from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_lightning.config.near_names import nearest_or_list
from fl_lightning.data.arrays import Examples, Names, name_from
from fl_lightning.data.map_style import ItemData
from fl_lightning.errors import as_bad_input, require

FILES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
"""The library's names of the kinds of files."""

SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of which a folder has one that ``save_to_disk`` wrote."""


class HuggingFaceData(ItemData):
    """The rows of a Hugging Face data set, with columns by their names.

    Rows are read once into memory. Images stay bytes and are normalised in batches; other columns
    are numbers or lists of numbers of one length.

    Args:
        path: a folder that ``save_to_disk`` wrote, a ``.parquet`` file, a folder of files, or a
            name on the Hub, which is downloaded.
        name: configuration of a data set on the Hub; null: its default.
        train: name of the training split.
        test: name of the test split; null: ``test_fraction`` of the training split.
        target: column of what is learnt.
        input: column that the network sees; a list of columns: it takes a dictionary; null: all
            columns that are nothing else.
        group: column by which partitions deal the rows out; null: the class.
        client: column that says whose a row is, for the partition Natural, which the test split
            need not have; null: none.
        settings: those of all data in memory, see :class:`~fl_lightning.data.arrays.ArrayData`.

    Raises:
        InputError: an argument is out of range, or the library is not installed.
    """

    examplewise = True
    own_setting = "path"

    def __init__(
        self,
        path: str,
        name: str | None = None,
        train: str = "train",
        test: str | None = None,
        target: str = "label",
        input: str | list[str] | None = None,
        group: str | None = None,
        client: str | None = None,
        **settings: Any,
    ) -> None:
        require(
            test != train,
            f"train={train}, test={test}",
            "a test split has other rows",
            "leave test out",
        )
        self.dataset, self.has_test = name_from(path), test is not None
        super().__init__(input=input, target=target, group=group, client=client, **settings)
        self.path, self.configuration, self.splits = path, name, (train, test)

    def prepare_data(self) -> None:
        """Download the data set if it is one of the Hub, and check its splits and columns.

        Raises:
            InputError: it cannot be loaded, or lacks a split or column.
        """
        self._load()

    def read(self) -> tuple[Examples, Examples, Names]:
        """Read the rows.

        Raises:
            InputError: the data set cannot be loaded, or a row has another form.
        """
        loaded = self._load()
        places = [f"{self.path}, {split}" for split in self.splits]
        features = [rows.features[self.keys.target] for rows in loaded if rows is not None]
        coded = hasattr(features[0], "int2str") and self.task.has_classes
        orders = [feature.names for feature in features if hasattr(feature, "names")]
        by_names = coded and (bool(self.run_form) or orders[0] != orders[-1])
        # a node knows classes by these, and in the test split a number may be another class
        if by_names:
            loaded = [
                None if rows is None else named_classes(rows, self.keys.target) for rows in loaded
            ]
        splits = {
            split: (self.items_of(rows, place), place)
            for split, rows, place in zip(("train", "test"), loaded, places, strict=True)
            if rows is not None
        }
        test = loaded[1]
        nameless = test is not None and self.keys.client not in test.column_names
        test_keys = replace(self.keys, client=None) if nameless else self.keys
        first, second, names = self.examples_of(splits, test_keys)
        if coded and not self.run_form:
            known = {*orders[0], *orders[-1]} if by_names else range(len(orders[0]))
            unknown = [
                name for name in names.classes if (name if by_names else int(name)) not in known
            ]
            require(
                not unknown,
                f"{self.path}, column {self.keys.target}",
                f"labels {', '.join(map(str, unknown))} are none of the {len(orders[0])} classes",
                "leave out rows without a label",
            )
        if coded and not by_names:
            names = Names(
                [orders[0][int(number)] for number in names.classes], names.groups, names.clients
            )
        return first, second, names

    def items_of(self, rows: Any, place: str) -> Any:
        """Return the items of a split's rows, map-style; by default the rows themselves.

        Args:
            rows: a ``datasets.Dataset``.
            place: its name, for messages.
        """
        return rows

    def input_columns(self) -> Sequence[object]:
        """Return the names of the columns of which inputs are made; None: all that are nothing
        else."""
        wanted = self.keys.input
        return wanted if isinstance(wanted, list) else [wanted]

    def _load(self) -> list[Any]:
        """Return the training split and the test split, or None where it is not named."""
        keys = self.keys
        columns = [keys.target, keys.group, *self.input_columns()]
        named = [name for name in columns if name is not None]
        return load_splits(self.path, self.configuration, self.splits, named, keys.client)


def named_classes(rows: Any, column: Any) -> Any:
    """Return a split whose column of class numbers has the names of the classes.

    A number that is of no class stays: it is refused as a class that the run has not.

    Args:
        rows: a ``datasets.Dataset``.
        column: name of a column that is a ``ClassLabel``.
    """
    feature, numbers = rows.features[column], list(rows[column])
    known = [number is not None and 0 <= number < feature.num_classes for number in numbers]
    names = [
        feature.int2str(number) if has_name else str(number)
        for number, has_name in zip(numbers, known, strict=True)
    ]
    return rows.remove_columns(column).add_column(column, names)


def load_splits(
    path: str,
    name: str | None,
    wanted: tuple[str, str | None],
    columns: Sequence[object],
    client: object = None,
) -> list[Any]:
    """Return the training split and the test split of a data set, or None where it is not named.

    Args:
        path: as :func:`load` takes it.
        name: configuration of a data set on the Hub; None: its default.
        wanted: names of the two splits.
        columns: names of the columns that both have to have.
        client: name of a column that the training split has to have; None: none.

    Raises:
        InputError: it cannot be loaded, or lacks a split or a column.
    """
    found = load(path, name)
    splits: list[Any] = []
    for split in wanted:
        if split is None:
            splits.append(None)
            continue
        if not isinstance(found, dict):  # a single split, which save_to_disk may write
            require(
                wanted[1] is None,
                f"test={wanted[1]}",
                f"{path} has a single split",
                "leave test out",
            )
            own = str(found.split or split)
            require(
                split in ("train", own),
                f"train={split}",
                f"{path} is the split {own}",
                f"write {own}",
            )
            splits.append(found)
            continue
        require(
            split in found,
            f"split {split}",
            f"{path} has no such split",
            f"write {nearest_or_list(split, found)}",
        )
        splits.append(found[split])
    needed = (columns if client is None else [*columns, client]), columns
    for split, one, names in zip(wanted, splits, needed, strict=True):
        for column in names if one is not None else ():
            require(
                column in one.column_names,
                f"{path}, {split}",
                f"there is no column {column}",
                f"write {nearest_or_list(column, one.column_names)}",
            )
    return splits


def load(path: str, name: str | None) -> Any:
    """Return a data set, or a dictionary of its splits.

    Raises:
        InputError: the library is not installed, or the data set cannot be loaded.
    """
    folder = Path(path)
    require(
        folder.exists() or not _is_path(path),
        path,
        "there is no such file or folder, and a data set of the Hub has no such name",
        "correct the path",
    )
    given, install = f"data set {path}", 'pip install "fl_lightning[datasets]"'
    with as_bad_input(given, "it needs the library datasets", install, ImportError):
        import datasets
    datasets.disable_progress_bars()
    instead = (
        "write a folder of save_to_disk, a file, or a name on the Hub that this machine can reach"
    )
    # the library raises errors of many other libraries
    with as_bad_input(given, "it cannot be loaded", instead, Exception):
        if any((folder / file).is_file() for file in SAVED):
            return datasets.load_from_disk(path)
        if folder.is_file():
            kind = FILES.get(folder.suffix)
            require(
                kind,
                path,
                f"a file is one of {', '.join(FILES)}",
                "write one of these, or a folder",
            )
            return datasets.load_dataset(kind, data_files=str(folder))
        return datasets.load_dataset(path, name)


def _is_path(text: str) -> bool:
    """Return whether a text means a file or a folder, there or not: the Hub has names, and
    ``owner/name``."""
    path = Path(text)
    names_file = path.suffix in (*FILES, ".txt", ".arrow", ".gz")
    local = path.is_absolute() or text.startswith((".", "~")) or len(path.parts) > 2
    return names_file or local or (len(path.parts) == 2 and path.parent.is_dir())
