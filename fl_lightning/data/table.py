"""Tables: CSV and Parquet files, one example a row.

``N`` rows, ``D`` numbers that the network sees of a row.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fl_lightning.data.arrays import (
    ArrayData,
    Examples,
    Names,
    TaskName,
    check_classes,
    check_test_fraction,
    in_test,
    name_from,
    near_names,
    number_names,
)
from fl_lightning.data.partition import Partition, check_memory
from fl_lightning.errors import InputError, require

if TYPE_CHECKING:
    import pandas as pd  # imported in functions below: it is slow, and most runs need no table

log = logging.getLogger(__name__)

CSV_SUFFIXES, PARQUET_SUFFIXES = (".csv", ".csv.gz", ".tsv"), (".parquet", ".pq")
MAX_CATEGORIES, MIN_REPEATED = 1000, 20
"""Largest number of categories of a column. One with more, or with more than 20 of which most stand in one
row only, is text or a name of the row."""
MAX_SHARE_OF_NUMBERS = 0.9
"""A column of text of which more values than this share, but not all, are numbers has a wrong value."""


class TableData(ArrayData):
    """The rows of a CSV or Parquet file, distributed to clients.

    Numbers are standardised with mean and standard deviation of the training rows; of texts, each category of
    the training rows becomes one number, 1 or 0. The network ``mlp`` takes examples of any shape.

    Args:
        train: a file: ``.csv``, ``.tsv`` or ``.parquet``, with the names of the columns in the first line.
        target: column of what is learnt.
        test: a file with the same columns; null: ``test_fraction`` of the rows of ``train``.
        test_fraction: share of the rows (of classification, of each class) that becomes the test set if there
            is no ``test``, in (0, 1); the same rows in every run.
        task: classification: the target's values in sorted order are the classes; regression: the target is
            a number.
        features: columns that the network sees; null: all but ``target``, ``group`` and ``client``.
        categorical: columns of numbers that are names, such as a postcode, and become categories.
        group: column by which partitions deal the rows out; null: the class.
        client: column that says whose a row is, for the partition Natural; null: the rows say nothing of it.
        standardise_target: whether a regression's target is standardised with the training rows too. Then
            errors are in its standard deviations: ``mse`` is 1 for who always says the mean.
        num_clients: number of clients; 0: as many as the column ``client`` has in the training rows.
        partition: rule that assigns training rows to clients; null: Natural with a column ``client``, else
            Dirichlet with beta 0.1.
        batch_size: rows of one local step.
        val_fraction: share of each client's rows that is held out for validation, in [0, 1).
        public_examples: training rows of the public set; 0: no public set.

    Raises:
        InputError: an argument is out of range.
    """

    examplewise = True

    def __init__(
        self,
        train: str,
        target: str,
        test: str | None = None,
        test_fraction: float = 0.2,
        task: TaskName = "classification",
        features: list[str] | None = None,
        categorical: list[str] | None = None,
        group: str | None = None,
        client: str | None = None,
        standardise_target: bool = True,
        num_clients: int = 0,
        partition: Partition | None = None,
        batch_size: int = 32,
        val_fraction: float = 0.1,
        public_examples: int = 0,
    ) -> None:
        super().__init__(
            dataset=name_from(train),
            num_clients=num_clients,
            partition=partition,
            natural=client is not None,
            batch_size=batch_size,
            val_fraction=val_fraction,
            public_examples=public_examples,
        )
        check_test_fraction(test, test_fraction)
        require(features is None or features, "features=[]", "a network sees one column or more", "name one")
        self.set_task(task)
        for name, column in (("target", target), ("client", client)):
            require(
                column is None or column not in (features or []),
                f"features with {name}={column}",
                f"the network does not see the {name}",
                f"leave {column} out of features",
            )
        self.train_path, self.test_path = Path(train), Path(test) if test else None
        self.test_fraction, self.target = test_fraction, target
        self.features, self.categorical = features, list(categorical or [])
        self.group, self.client_column = group, client
        self.standardise_target = standardise_target
        if task == "regression":
            self.num_classes = 1

    def prepare_data(self) -> None:
        """Check that the files are there.

        Raises:
            InputError: a file is missing, or is no table.
        """
        for path in filter(None, (self.train_path, self.test_path)):
            _check_file(path)

    def read(self) -> tuple[Examples, Examples, Names]:
        """Read the files, split the rows and make numbers of them.

        Raises:
            InputError: a file cannot be read, lacks a column or a value, or has one that is not of its
                column.
        """
        import pandas as pd

        table = read_table(self.train_path)
        self._check_columns(table)
        used = [
            *self._features(table),
            *dict.fromkeys(filter(None, (self.target, self.group, self.client_column))),
        ]
        used = list(dict.fromkeys(used))
        _check_complete(table, used, self.train_path)
        if self.test_path:
            self._check_target(table)
            train, test, test_file = table, read_table(self.test_path), self.test_path
            for name in used:
                if name != self.client_column:
                    _check_column(test, name, test_file)
            _check_complete(test, [name for name in used if name in test], test_file)
        else:
            self._check_target(table)
            labels = table[self.target].astype(str) if self._classifies else pd.Series(np.zeros(len(table)))
            chosen = in_test(labels.to_numpy(), self.test_fraction)
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

    @property
    def _classifies(self) -> bool:
        return self.task.has_classes

    def _check_columns(self, table: pd.DataFrame) -> None:
        for name in dict.fromkeys([self.target, *self.categorical, *(self.features or [])]):
            _check_column(table, name, self.train_path)
        for name in filter(None, (self.group, self.client_column)):
            _check_column(table, name, self.train_path)
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
            mean, std = _moments(values[0]) if self.standardise_target else (0.0, 1.0)
            first, second = (torch.tensor((one - mean) / std, dtype=torch.float32) for one in values)
            return [], (first, second)
        numbers = number_names(train[name].tolist())
        check_classes(list(numbers), f"{self.train_path}, column {name}")
        unknown = ~test[name].isin(list(numbers)).to_numpy()
        if unknown.any():
            value = test[name].iloc[int(unknown.argmax())]
            raise InputError(
                f"{_place(test, int(unknown.argmax()), name, test_file)}",
                f"the class {value} is not among the training rows",
                "remove the row, or give training rows of that class",
            )
        self.num_classes = len(numbers)
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
        return _numbers(train, name, self.train_path), _numbers(test, name, test_file)

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
                mean, std = _moments(values[0])
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
        _check_text(train, name, self.train_path, numbers_are_names=name in self.categorical)
        texts = [some[name].astype(str) for some in (train, test)]
        numbers = number_names(texts[0].tolist())
        require(
            len(numbers) <= min(MAX_CATEGORIES, max(MIN_REPEATED, len(train) // 2)),
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


def read_table(path: Path) -> pd.DataFrame:
    """Return the rows of a file.

    Raises:
        InputError: it cannot be read, has no rows, or has two columns of one name.
    """
    import pandas as pd

    _check_file(path)
    check_memory(f"{path}", path.stat().st_size)
    try:
        if path.name.endswith(PARQUET_SUFFIXES):
            table = pd.read_parquet(path)
        else:
            separator = "\t" if path.name.endswith(".tsv") else ","
            table = pd.read_csv(path, sep=separator, low_memory=False)
            first = pd.read_csv(path, sep=separator, header=None, nrows=1, dtype=str)
            _check_names(first.iloc[0].dropna().tolist(), path)
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"{path}", f"Parquet needs pyarrow ({error})", "pip install pyarrow, or write a .csv file"
        ) from None
    except OSError as error:
        raise InputError(
            f"{path}", f"it cannot be read ({error.strerror or error})", "check the file"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}", f"byte {error.start} is not UTF-8", "convert the file to UTF-8") from None
    except pd.errors.EmptyDataError:
        raise InputError(f"{path}", "the file is empty", "fill it") from None
    except (ValueError, pd.errors.ParserError) as error:  # pyarrow's errors are ValueErrors
        reason = " ".join(str(error).split())
        raise InputError(f"{path}", f"it is no table ({reason})", "check the file") from None
    require(len(table), f"{path}", "the table has no rows", "fill it")
    kinds = table.dtypes
    table = table.astype({name: object for name in table if isinstance(kinds[name], pd.CategoricalDtype)})
    if not isinstance(table.index, pd.RangeIndex):  # of a Parquet file: it may hold a column
        table = table.reset_index() if all(table.index.names) else table.reset_index(drop=True)
    return table


def _check_file(path: Path) -> None:
    require(path.is_file(), f"{path}", "there is no such file", "write the path of a .csv or .parquet file")
    suffixes = CSV_SUFFIXES + PARQUET_SUFFIXES
    require(
        path.name.endswith(suffixes), f"{path}", f"a table's name ends in {', '.join(suffixes)}", "rename it"
    )


def _check_names(names: list[str], path: Path) -> None:
    double = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    require(not double, f"{path}", f"two columns are named {double[:1]}", "rename one of them")


def _check_column(table: pd.DataFrame, name: str, path: Path) -> None:
    instead = near_names(name, table.columns)
    if len(table.columns) == 1 and not path.name.endswith(PARQUET_SUFFIXES):
        instead = "separate the columns by commas (.csv) or tabs (.tsv)"
    require(name in table.columns, f"{path}", f"there is no column {name}", instead)


def _place(table: pd.DataFrame, position: int, name: str, path: Path) -> str:
    """Return where a value stands; rows count from 1, without the names of the columns."""
    return f"{path}, row {int(table.index[position]) + 1}, column {name}"


def _check_complete(table: pd.DataFrame, names: list[str], path: Path) -> None:
    """Refuse values that are missing.

    Raises:
        InputError: one is; the first one is named.
    """
    for name in names:
        missing = table[name].isna().to_numpy()
        if missing.any():
            raise InputError(
                _place(table, int(missing.argmax()), name, path),
                f"the value is missing (empty, NA, NaN or null), one of {int(missing.sum())} of the column",
                "fill it in, remove the rows, or name the features without the column",
            )


def _check_text(table: pd.DataFrame, name: str, path: Path, *, numbers_are_names: bool) -> None:
    """Refuse a column that is neither numbers nor names.

    Raises:
        InputError: it has dates, lists or the like, or numbers among which something else stands.
    """
    import pandas as pd

    column = table[name]
    if pd.api.types.is_numeric_dtype(column):
        return
    plain = column.map(lambda value: isinstance(value, (str, bool, int, float))).to_numpy(bool)
    if not plain.all():
        kind = type(column.iloc[int((~plain).argmax())]).__name__
        raise InputError(
            _place(table, int((~plain).argmax()), name, path),
            f"a value is a number or a text, and this is a {kind}",
            f"name the features without {name}",
        )
    wrong = pd.to_numeric(column, errors="coerce").isna().to_numpy()
    if not numbers_are_names and 0 < wrong.mean() < 1 - MAX_SHARE_OF_NUMBERS:
        position = int(wrong.argmax())
        raise InputError(
            _place(table, position, name, path),
            f"{column.iloc[position]} is no number, and nearly all values of the column are",
            f"correct it, or write categorical: [{name}] if they are names",
        )


def _numbers(table: pd.DataFrame, name: str, path: Path) -> np.ndarray:
    """Return a column as float64 ``[N]``.

    Raises:
        InputError: a value is no finite number.
    """
    import pandas as pd

    values = pd.to_numeric(table[name], errors="coerce").to_numpy(np.float64)
    wrong = ~np.isfinite(values)
    if wrong.any():
        position = int(wrong.argmax())
        raise InputError(
            _place(table, position, name, path),
            f"{table[name].iloc[position]} is no finite number",
            "correct it, or remove the row",
        )
    return values


def _moments(values: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation; 1 in place of a deviation of 0."""
    return float(values.mean()), float(values.std()) or 1.0
