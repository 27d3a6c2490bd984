"""Tables: CSV and Parquet files, one example a row.

``N`` rows, ``D`` numbers that the network sees of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fl_lightning.data.arrays import (
    ArrayData,
    Examples,
    Names,
    check_classes,
    in_test,
    name_from,
    number_names,
)
from fl_lightning.data.form import Form
from fl_lightning.data.partition import check_memory
from fl_lightning.data.table_file import (
    check_column,
    check_complete,
    check_file,
    check_text,
    moments,
    numbers_of,
    place_of,
    read_table,
)
from fl_lightning.errors import InputError, require

if TYPE_CHECKING:
    import pandas as pd  # imported in functions below: it is slow, and most runs need no table

log = logging.getLogger(__name__)

MAX_CATEGORIES, MIN_REPEATED = 1000, 20
"""Largest number of categories of a column. One with more, or with more than 20 of which most stand in one
row only, is text or a name of the row."""


class TableData(ArrayData):
    """The rows of a CSV or Parquet file, distributed to clients.

    Numbers are standardised with mean and standard deviation of the training rows; of texts, each category of
    the training rows becomes one number, 1 or 0. The network ``mlp`` takes examples of any shape.

    Args:
        train: a file: ``.csv``, ``.tsv`` or ``.parquet``, with the names of the columns in the first line.
        target: column of what is learnt.
        test: a file with the same columns; null: ``test_fraction`` of the rows of ``train``.
        features: columns that the network sees; null: all but ``target``, ``group`` and ``client``.
        categorical: columns of numbers that are names, such as a postcode, and become categories.
        group: column by which partitions deal the rows out; null: the class.
        client: column that says whose a row is, for the partition Natural; null: the rows say nothing of it.
        standardise_target: whether a regression's target is standardised with the training rows too. Then
            errors are in its standard deviations: ``mse`` is 1 for who always says the mean.
        settings: those of all data in memory, see :class:`~fl_lightning.data.arrays.ArrayData`.

    Raises:
        InputError: an argument is out of range.
    """

    examplewise = True

    def __init__(
        self,
        train: str,
        target: str,
        test: str | None = None,
        features: list[str] | None = None,
        categorical: list[str] | None = None,
        group: str | None = None,
        client: str | None = None,
        standardise_target: bool = True,
        **settings: Any,
    ) -> None:
        self.dataset, self.natural, self.has_test = name_from(train), client is not None, test is not None
        super().__init__(**settings)
        require(features is None or features, "features=[]", "a network sees one column or more", "name one")
        for name, column in (("target", target), ("client", client)):
            require(
                column is None or column not in (features or []),
                f"features with {name}={column}",
                f"the network does not see the {name}",
                f"leave {column} out of features",
            )
        self.train_path, self.test_path = Path(train), Path(test) if test else None
        self.target = target
        self.features, self.categorical = features, list(categorical or [])
        self.group, self.client_column = group, client
        self.standardise_target = standardise_target
        self._columns: dict[str, list[Any]] = {}
        if not self.task.has_classes:
            self.num_classes = 1

    def prepare_data(self) -> None:
        """Check that the files are there.

        Raises:
            InputError: a file is missing, or is no table.
        """
        for path in filter(None, (self.train_path, self.test_path)):
            check_file(path)

    def read(self) -> tuple[Examples, Examples, Names]:
        """Read the files, split the rows and make numbers of them.

        Raises:
            InputError: a file cannot be read, lacks a column or a value, or has one that is not of its
                column.
        """
        import pandas as pd

        table, self._columns = read_table(self.train_path), {}
        self._check_columns(table)
        used = [
            *self._features(table),
            *dict.fromkeys(filter(None, (self.target, self.group, self.client_column))),
        ]
        used = list(dict.fromkeys(used))
        check_complete(table, used, self.train_path)
        if self.test_path:
            self._check_target(table)
            train, test, test_file = table, read_table(self.test_path), self.test_path
            for name in used:
                if name != self.client_column:
                    check_column(test, name, test_file)
            check_complete(test, [name for name in used if name in test], test_file)
        else:
            self._check_target(table)
            labels = table[self.target].astype(str) if self._classifies else pd.Series(np.zeros(len(table)))
            own = self.run_form is not None
            chosen = np.zeros(len(table), bool) if own else in_test(labels.to_numpy(), self.test_fraction)
            train, test, test_file = table[~chosen], table[chosen], self.train_path
        classes, targets = self._targets(train, test, test_file)
        groups, numbers = self._numbered(self.group, train, test)
        clients, owners = self._numbered(self.client_column, train, None)
        inputs = self._inputs_of(train, test, test_file)
        return (
            Examples(inputs[0], targets[0], numbers[0], owners[0]),
            Examples(inputs[1], targets[1], numbers[1]),
            Names(classes=classes, groups=groups, clients=clients),
        )

    def form(self) -> Form:
        return replace(super().form(), columns=self._columns)

    def _moments(self, name: str, values: np.ndarray) -> tuple[float, float]:
        """Return mean and standard deviation by which a column is standardised: of the run, or of the
        training rows."""
        mean, std = moments(values) if self.run_form is None else self._of_run(name)
        self._columns[name] = [mean, std]
        return mean, std

    def _of_run(self, name: str) -> Sequence[Any]:
        columns = self.run_form.columns if self.run_form else {}
        require(
            name in columns,
            f"{self.train_path}, column {name}",
            f"the run's table has {', '.join(columns)}",
            f"name the features without {name}",
        )
        return columns[name]

    @property
    def _classifies(self) -> bool:
        return self.task.has_classes

    def _check_columns(self, table: pd.DataFrame) -> None:
        for name in dict.fromkeys([self.target, *self.categorical, *(self.features or [])]):
            check_column(table, name, self.train_path)
        for name in filter(None, (self.group, self.client_column)):
            check_column(table, name, self.train_path)
        nameless = [name for name in table.columns if str(name).startswith("Unnamed: ")]
        require(
            self.features is not None or not nameless,
            f"{self.train_path}",
            "a column has no name: it may be the number of the row",
            "write the file without an index, or name the features",
        )

    def _features(self, table: pd.DataFrame) -> list[str]:
        if self.features is not None:
            return list(dict.fromkeys(self.features))
        if self.run_form is not None:  # in the order of the run's
            rest = [name for name in self.run_form.columns if name != self.target]
            for name in rest:
                check_column(table, name, self.train_path)
            return rest
        rest = [name for name in table.columns if name not in (self.target, self.group, self.client_column)]
        require(
            rest,
            f"{self.train_path}",
            "there is no column beside target, group and client",
            "give one that the network sees",
        )
        return rest

    def _targets(
        self, train: pd.DataFrame, test: pd.DataFrame, test_file: Path
    ) -> tuple[list[Any], tuple[torch.Tensor, torch.Tensor]]:
        """Return the names of the classes, and the targets of both splits."""
        name = self.target
        if not self._classifies:
            values = self._numbers_of(name, train, test, test_file)
            mean, std = self._moments(name, values[0]) if self.standardise_target else (0.0, 1.0)
            first, second = (torch.tensor((one - mean) / std, dtype=torch.float32) for one in values)
            return [], (first, second)
        numbers = number_names(train[name].tolist())
        if self.run_form is None:
            check_classes(list(numbers), f"{self.train_path}, column {name}")
        else:
            numbers = self.run_form.numbers(numbers, f"{self.train_path}, column {name}")
        unknown = ~test[name].isin(list(numbers)).to_numpy()
        if unknown.any():
            value = test[name].iloc[int(unknown.argmax())]
            raise InputError(
                f"{place_of(test, int(unknown.argmax()), name, test_file)}",
                f"the class {value} is not among the training rows",
                "remove the row, or give training rows of that class",
            )
        found = [torch.tensor(some[name].map(numbers).to_numpy(np.int64)) for some in (train, test)]
        return list(numbers), (found[0], found[1])

    def _check_target(self, table: pd.DataFrame) -> None:
        """Refuse classes that are numbers to be learnt.

        Raises:
            InputError: they are.
        """
        import pandas as pd

        if not self._classifies:
            return
        column, place = table[self.target], f"{self.train_path}, column {self.target}"
        fractions = pd.api.types.is_float_dtype(column) and not np.all(column == column.round())
        require(
            not fractions,
            place,
            "classes are texts or whole numbers, and these are fractions",
            "write task: regression, or another target",
        )
        classes = column.nunique()
        require(
            classes <= max(2, len(table) // 2),
            place,
            f"it has {classes} classes in {len(table)} rows",
            "write task: regression, or another target",
        )

    def _numbers_of(
        self, name: str, train: pd.DataFrame, test: pd.DataFrame, test_file: Path
    ) -> tuple[np.ndarray, np.ndarray]:
        return numbers_of(train, name, self.train_path), numbers_of(test, name, test_file)

    def _numbered(
        self, name: str | None, train: pd.DataFrame, test: pd.DataFrame | None
    ) -> tuple[list[Any], tuple[np.ndarray | None, np.ndarray | None]]:
        """Return the names in a column, and the number of each row's in both splits."""
        if name is None:
            return [], (None, None)
        values = train[name].tolist() + ([] if test is None else test[name].tolist())
        numbers = number_names(values)
        found = [
            None if some is None else some[name].map(numbers).to_numpy(np.int64, copy=True)
            for some in (train, test)
        ]
        return list(numbers), (found[0], found[1])

    def _inputs_of(
        self, train: pd.DataFrame, test: pd.DataFrame, test_file: Path
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of all features, float32 ``[N, D]`` of both splits."""
        import pandas as pd

        blocks: list[tuple[np.ndarray, np.ndarray]] = []
        width = 0
        for name in self._features(train):
            if name in self.categorical or not pd.api.types.is_numeric_dtype(train[name]):
                block = self._one_hot(name, train, test, test_file)
            else:
                values = self._numbers_of(name, train, test, test_file)
                mean, std = self._moments(name, values[0])
                block = (((values[0] - mean) / std)[:, None], ((values[1] - mean) / std)[:, None])
            width += block[0].shape[1]
            check_memory(
                f"{self.train_path} with {width} numbers a row", 4 * width * (len(train) + len(test))
            )
            blocks.append((block[0].astype(np.float32), block[1].astype(np.float32)))
        both = [np.concatenate(some, axis=1) for some in zip(*blocks, strict=True)]
        return torch.from_numpy(both[0]), torch.from_numpy(both[1])

    def _one_hot(
        self, name: str, train: pd.DataFrame, test: pd.DataFrame, test_file: Path
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return 1 where a row has a category, else 0, for each category of the training rows."""
        check_text(train, name, self.train_path, numbers_are_names=name in self.categorical)
        texts = [some[name].astype(str) for some in (train, test)]
        numbers = number_names(texts[0].tolist())
        if self.run_form is not None:
            numbers = {text: number for number, text in enumerate(self._of_run(name))}
        self._columns[name] = list(numbers)
        require(
            self.run_form or len(numbers) <= min(MAX_CATEGORIES, max(MIN_REPEATED, len(train) // 2)),
            f"{self.train_path}, column {name}",
            f"it has {len(numbers)} categories in {len(train)} training rows",
            f"name the features without {name}",
        )
        unknown = ~texts[1].isin(list(numbers))
        if unknown.any():
            log.warning(
                "%s, column %s: %d of %d test rows have a category that no training row has; they count as "
                "none of them",
                test_file,
                name,
                int(unknown.sum()),
                len(test),
            )
        found = []
        for text in texts:
            place = text.map(numbers).fillna(-1).to_numpy(np.int64)
            found.append(place[:, None] == np.arange(len(numbers)))
        return found[0], found[1]
