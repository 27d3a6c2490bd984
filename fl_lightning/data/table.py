"""Tables: CSV and Parquet files, one example a row.

``N`` rows, ``D`` numbers that the network sees of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from fl_lightning.config.constraints import Constraint
from fl_lightning.data.arrays import (
    ArrayData,
    Examples,
    Names,
    class_numbers,
    in_test,
    name_from,
    number_names,
    numbers_by_name,
)
from fl_lightning.data.form import Form
from fl_lightning.data.partition import check_memory
from fl_lightning.data.table_file import (
    MAX_WHOLE,
    TABLE_FILE,
    as_names_of,
    block_of,
    check_column,
    check_file,
    check_single,
    check_spellings,
    moments,
    numbers_of,
    place_of,
    read_table,
)
from fl_lightning.data.table_values import (
    Missing,
    TextEncoding,
    check_settings,
    check_values,
    codes_of,
    encoded,
    encodings_of,
    filled,
    fills_of,
    fit_ordinal,
    fit_tfidf,
    max_categories,
    whole_names,
)
from fl_lightning.errors import InputError, require

if TYPE_CHECKING:
    import pandas as pd  # imported in functions below: it is slow, and most runs need no table

    Tables = Sequence[pd.DataFrame]  # the training and the test rows

log = logging.getLogger(__name__)


MAX_NUMBERS = 50
"""Largest number of different numbers in a target of which it is not asked what they are."""
BLOCK_VALUES = 2**22
"""Numbers that are standardised together, in float64."""


class TableData(ArrayData):
    """The rows of a CSV or Parquet file, distributed to clients.

    Numbers are standardised with mean and standard deviation of the training rows; of texts, each
    category of the training rows becomes one number, 1 or 0. The network ``mlp`` takes examples of
    any shape.

    Args:
        train: a file: ``.csv``, ``.tsv`` or ``.parquet``, with the names of the columns in the
            first line.
        target: column of what is learnt. With more than 50 different numbers, other than 0, 1, 2
            ... or 1, 2, 3 ..., it could be meant either way and is refused until ``task`` is
            regression or ``categorical`` names it.
        test: a file with the same columns; null: ``test_fraction`` of the rows of ``train``.
        features: columns that the network sees; null: all but ``target``, ``group`` and ``client``.
        categorical: columns of numbers that are names, such as a postcode, and become categories;
            of the target, classes.
        group: column by which partitions deal the rows out; null: the class.
        client: column that says whose a row is, for the partition Natural; null: the rows say
            nothing of it.
        standardise_target: whether a regression's target is standardised with the training rows
            too. Then errors are in its standard deviations: ``mse`` is 1 for who always says the
            mean.
        missing: what is done where a feature has no value. mean, median and most_frequent: that of
            the training rows takes its place, and of categories always the most frequent one; drop:
            the row is left out, also where target, group or client have no value; null: the file is
            refused.
        text: what becomes of columns of text with too many values for categories. ordinal: the
            number of the text in sorted order; tfidf: the TF-IDF weight of each of the 1000 most
            frequent words; drop: the column is left out; ``{COLUMN: ordinal}``: each column that is
            named, whatever its values; null: the file is refused.
        settings: those of all data in memory, see :class:`~fl_lightning.data.arrays.ArrayData`.
    """

    examplewise = True

    def __init__(
        self,
        train: Annotated[str, TABLE_FILE],
        target: str,
        test: Annotated[str | None, TABLE_FILE] = None,
        features: list[str] | None = None,
        categorical: list[str] | None = None,
        group: str | None = None,
        client: str | None = None,
        standardise_target: bool = True,
        missing: Annotated[
            Missing | None,
            Constraint(given="--data.missing {value}", instead="write --data.missing mean"),
        ] = None,
        text: TextEncoding | dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.dataset = name_from(train)
        self.natural, self.has_test = client is not None, test is not None
        super().__init__(**settings)
        require(
            features is None or features,
            "features=[]",
            "a network sees one column or more",
            "name one",
        )
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
        check_settings(missing, text)
        self.missing, self.text = missing, text
        self._columns: dict[str, Any] = {}
        self._encodings: dict[str, TextEncoding | None] = {}
        self._fills: dict[str, Any] = {}
        self._mended: dict[str, Any] = {}
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
            InputError: a file cannot be read, lacks a column or a value, or has one that is not of
                its column.
        """
        import pandas as pd

        known = self._run_categories.items()
        texts = [
            name for name, some in known if np.isnan(pd.to_numeric(some, errors="coerce")).any()
        ]
        named = self.run_form.classes if self.run_form else ()
        if named and all(isinstance(name, str) for name in named):
            texts.append(self.target)
        table, self._columns, self._mended = read_table(self.train_path, texts), {}, {}
        self._check_columns(table)
        check_single(self.train_path, table, self._others)
        test_table = None
        # "01" beside "0A" is no number, nor is it where it stands alone
        if self.test_path is not None:
            others = table.columns[
                [not pd.api.types.is_numeric_dtype(kind) for kind in table.dtypes]
            ]
            words = [name for name in others if name not in texts and _is_text(table[name])]
            test_table = read_table(self.test_path, [*texts, *words])
            check_single(self.test_path, test_table, self._others)
            names = [name for name in self._others if self._is_name(name)]
            numeric = {*table.columns} - {*others}
            for name in numeric & {*names, *self._categorical} & {*test_table.columns}:
                if _is_text(test_table[name]):
                    test_table[name] = as_names_of(test_table[name], table[name])
        self._check_target(table[table[self.target].notna()])
        for path, some in zip(self._files, (table, test_table), strict=True):
            if some is not None:
                there = [name for name in self._others if self._is_name(name) and name in some]
                check_spellings(path, some, there)
        tables: Tables
        if test_table is not None:
            tables = table, test_table
        else:
            labels = np.zeros(len(table))
            if self.task.has_classes:
                labels = table[self.target].map(str).to_numpy()
            chosen = in_test(labels, self.test_fraction, self.run_form)
            tables = table[~chosen], table[chosen]
        train, run = tables[0], self._run_columns
        self._encodings = encodings_of(
            train, self._features(train), self._categorical, self.text, run
        )
        self._check_values(table, test_table)
        tables = self._complete(tables)
        classes, targets = self._targets(tables)
        groups, numbers = self._numbered(self.group, tables, naming=tables)
        clients, owners = self._numbered(self.client_column, tables, naming=tables[:1])
        parts = zip(self._inputs_of(tables), targets, numbers, owners, strict=True)
        first, second = (Examples(*part) for part in parts)
        return first, second, Names(classes=classes, groups=groups, clients=clients)

    @property
    def _files(self) -> tuple[Path, Path]:
        """The files of the training and of the test rows."""
        return self.train_path, self.test_path or self.train_path

    def form(self) -> Form:
        columns = {
            name: {"fill": self._fills[name], "column": entry} if name in self._fills else entry
            for name, entry in self._columns.items()
        }
        return replace(super().form(), columns=columns)

    def partition_summary(self) -> dict[str, Any]:
        """Return the content of ``partition.json``, with what became of missing values and of
        text."""
        summary = super().partition_summary()
        return summary | {"examples": summary["examples"] | self._mended}

    def _moments(self, name: str, values: np.ndarray) -> tuple[float, float]:
        """Return mean and standard deviation by which a column is standardised: of the run, or of
        the training rows."""
        mean, std = moments(values) if self.run_form is None else self._of_run(name)
        self._columns[name] = [mean, std]
        return mean, std

    def _of_run(self, name: str) -> Any:
        columns = self._run_columns or {}
        require(
            name in columns,
            f"{self.train_path}, column {name}",
            f"the run's table has {', '.join(columns)}",
            f"name the features without {name}",
        )
        return columns[name]

    @property
    def _run_columns(self) -> dict[str, Any] | None:
        """What the run knows of each column, of a node's own data."""
        if self.run_form is None:
            return None
        columns = self.run_form.columns.items()
        return {name: entry["column"] if _has_fill(entry) else entry for name, entry in columns}

    @property
    def _run_categories(self) -> dict[str, list[str]]:
        """The categories of the run's columns that have some, of a node's own data."""
        columns = (self._run_columns or {}).items()
        return {
            name: entry
            for name, entry in columns
            if not isinstance(entry, Mapping) and isinstance(entry[0], str)
        }

    @property
    def _categorical(self) -> list[str]:
        """Columns that are categories even where their values are numbers."""
        return [*self.categorical, *self._run_categories]

    def _check_columns(self, table: pd.DataFrame) -> None:
        for name in dict.fromkeys(
            [self.target, *self.categorical, *(self.features or []), *self._others]
        ):
            check_column(table, name, self.train_path)
        nameless = [name for name in table.columns if str(name).startswith("Unnamed: ")]
        require(
            self.features is not None or not nameless,
            f"{self.train_path}",
            "a column has no name: it may be the number of the row",
            "write the file without an index, or name the features",
        )

    def _check_values(self, table: pd.DataFrame, test_table: pd.DataFrame | None) -> None:
        """Refuse all columns of a file that nothing says how to read, in one message."""
        features, others = self._seen(table), self._others
        own = self.run_form is not None
        check_values(self.train_path, table, features, others, self._encodings, self.missing, own)
        if test_table is None or self.test_path is None:
            return
        others = [name for name in others if name != self.client_column]
        for name in (*features, *others):
            check_column(test_table, name, self.test_path)
        check_values(self.test_path, test_table, features, others, {}, self.missing, True)

    def _complete(self, tables: Tables) -> Tables:
        """Return both splits without missing values."""
        if self.text is not None:
            self._mended["text"] = dict(self._encodings)
        train, test = tables
        names = [*self._categorical, *(name for name in self._others if self._is_name(name))]
        if self.missing is None:
            both = [
                name for name in names if name in test and train[name].dtype != test[name].dtype
            ]
            return whole_names(tables, both)
        features = self._seen(train)
        used = [*features, *self._others]
        gaps = [some[[name for name in used if name in some]].isna() for some in tables]
        counts = gaps[0].sum().add(gaps[1].sum(), fill_value=0)
        self._mended["missing"] = {str(name): int(count) for name, count in counts.items() if count}
        if self.missing == "drop":
            kept = [some[~gap.any(axis=1)] for some, gap in zip(tables, gaps, strict=True)]
            for some, rest, path in zip(tables, kept, self._files, strict=True):
                require(
                    len(rest) or not len(some),
                    f"{path} with missing=drop",
                    "every row lacks a value",
                    "name the features without the columns that lack most, or write --data.missing mean",
                )
            self._mended["rows left out"] = len(train) + len(test) - sum(map(len, kept))
            return whole_names(kept, names)
        if self.run_form is None:
            self._fills = fills_of(train, features, self.categorical, self._encodings, self.missing)
        else:
            columns = self.run_form.columns.items()
            self._fills = {name: entry["fill"] for name, entry in columns if _has_fill(entry)}
        return whole_names([filled(some, self._fills) for some in tables], names)

    @property
    def _others(self) -> list[str]:
        """The columns of target, group and client."""
        return list(dict.fromkeys(filter(None, (self.target, self.group, self.client_column))))

    def _is_name(self, name: str) -> bool:
        """Return whether the values of a column are names: of classes, groups or clients."""
        return self.task.has_classes or name != self.target

    def _seen(self, table: pd.DataFrame) -> list[str]:
        """Return the columns that the network sees, without those that ``text`` drops."""
        return [name for name in self._features(table) if self._encodings.get(name) != "drop"]

    def _features(self, table: pd.DataFrame) -> list[str]:
        order = [*self.run_form.columns] if self.run_form else []
        if self.features is not None:  # those that the run lacks come last, and are refused there
            last = len(order)
            place = {name: number for number, name in enumerate(order)}
            return sorted(dict.fromkeys(self.features), key=lambda name: place.get(name, last))
        if self.run_form is not None:
            rest = [name for name in order if name != self.target]
            for name in rest:
                check_column(table, name, self.train_path)
            return rest
        rest = [name for name in table.columns if name not in self._others]
        require(
            rest,
            f"{self.train_path}",
            "there is no column beside target, group and client",
            "give one that the network sees",
        )
        return rest

    def _targets(self, tables: Tables) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the names of the classes, and the targets of both splits."""
        name, place = self.target, f"{self.train_path}, column {self.target}"
        if not self.task.has_classes:
            values = [
                numbers_of(some, name, path) for some, path in zip(tables, self._files, strict=True)
            ]
            mean, std = self._moments(name, values[0]) if self.standardise_target else (0.0, 1.0)
            return [], [torch.tensor((one - mean) / std, dtype=torch.float32) for one in values]
        numbers = class_numbers(tables[0][name].tolist(), self.run_form, place)
        test = tables[1]
        unknown = ~test[name].isin(list(numbers)).to_numpy()
        if unknown.any():
            position = int(unknown.argmax())
            raise InputError(
                place_of(test, position, name, self._files[1]),
                f"the class {test[name].iloc[position]} is not among the training rows",
                "remove the row, or give training rows of that class",
            )
        return list(numbers), [torch.tensor(codes_of(some[name], numbers)) for some in tables]

    def _check_target(self, table: pd.DataFrame) -> None:
        """Refuse classes that are numbers to be learnt; those of a run are known."""
        import pandas as pd

        if not self.task.has_classes or self.run_form is not None:
            return
        column, place = table[self.target], f"{self.train_path}, column {self.target}"
        # what is left of infinity is NaN
        fractions = pd.api.types.is_float_dtype(column) and not np.all(column % 1 == 0)
        regression = "write --data.task regression, or another target"
        require(
            not fractions,
            place,
            "classes are texts or whole numbers, and here are fractions or infinity",
            regression,
        )
        classes = column.nunique()
        require(
            classes <= max(2, len(table) // 2),
            place,
            f"it has {classes} classes in {len(table)} rows",
            regression,
        )
        require(
            self.continued or self.target in self.categorical or not _may_be_amounts(column),
            place,
            f"it has {classes} different numbers, which may be amounts or names of classes",
            f"write --data.task regression, or --data.categorical [{self.target}] for classification",
        )

    def _numbered(
        self, name: str | None, tables: Tables, naming: Tables
    ) -> tuple[list[Any], list[np.ndarray | None]]:
        """Return the names that a column has in the rows that are ``naming``, and the number of
        each row's name in both splits."""
        if name is None:
            return [], [None, None]
        numbers = number_names(value for some in naming for value in some[name].tolist())
        return list(numbers), [
            numbers_by_name(some[name].tolist() if name in some else None, numbers)
            for some in tables  # a test file need not say whose an example is
        ]

    def _inputs_of(self, tables: Tables) -> list[torch.Tensor]:
        """Return the numbers of all features, float32 ``[N, D]`` of both splits."""
        blocks: list[list[np.ndarray]] = []
        width = 0
        for names, numeric in self._feature_blocks(tables[0]):
            if numeric:
                block = self._standardised(names, tables)
            elif names[0] in self._encodings:
                block = self._of_text(names[0], tables)
            else:
                block = self._one_hot(names[0], tables)
            width += block[0].shape[1]
            check_memory(
                f"{self.train_path} with {width} numbers a row", 4 * width * sum(map(len, tables))
            )
            blocks.append([some.astype(np.float32) for some in block])
        both = [np.concatenate(some, axis=1) for some in zip(*blocks, strict=True)]
        return [torch.from_numpy(some) for some in both]

    def _of_text(self, name: str, tables: Tables) -> list[np.ndarray]:
        """Return a column of text as numbers, as :mod:`fl_lightning.data.table_values` encodes
        it."""
        if self.run_form is not None:
            fit = self._of_run(name)
        elif self._encodings[name] == "tfidf":
            fit = fit_tfidf(tables[0][name], f"{self.train_path}, column {name}")
        else:
            fit = fit_ordinal(tables[0][name])
        self._columns[name] = fit
        found = [encoded(some[name], fit) for some in tables]
        self._warn_of_unknown(name, [unknown for _, unknown in found], tables)
        return [numbers for numbers, _ in found]

    def _warn_of_unknown(self, name: str, counts: Sequence[int], tables: Tables) -> None:
        """Say how many rows have another category than those that are known: of the test rows, or
        of all rows of a node's own data.

        Args:
            counts: of training and of test rows, those that have.
            tables: the training and the test rows.
        """
        rows = [*map(len, tables)]
        path, count, total = self._files[1], counts[1], rows[1]
        what = "test rows have a category that no training row has"
        if self.run_form is not None:
            path, count, total = self.train_path, sum(counts), sum(rows)
            what = "rows have a category that the run does not know"
        if count:
            log.warning(
                "%s, column %s: %d of %d %s; they count as none of them",
                path,
                name,
                count,
                total,
                what,
            )

    def _feature_blocks(self, train: pd.DataFrame) -> Iterator[tuple[list[str], bool]]:
        """Yield the features in their order: numbers that stand side by side together, as far as
        :data:`BLOCK_VALUES` goes, and each column of names by itself."""
        import pandas as pd

        kinds = dict(zip(train.columns, train.dtypes, strict=True))
        most, together = max(1, BLOCK_VALUES // len(train)), list[str]()
        names, own = {*self._categorical, *self._encodings}, self.run_form is not None
        for name in self._seen(train):
            numeric = name not in names and (own or pd.api.types.is_numeric_dtype(kinds[name]))
            if together and (not numeric or len(together) == most):
                yield together, True
                together = []
            if numeric:
                together.append(name)
            else:
                yield [name], False
        if together:
            yield together, True

    def _standardised(self, names: list[str], tables: Tables) -> list[np.ndarray]:
        """Return columns of numbers in standard deviations from their means, float64 ``[N, D]``."""
        values = [
            block_of(some, names, path) for some, path in zip(tables, self._files, strict=True)
        ]
        for name, largest in zip(names, np.abs(values[0]).max(axis=1, initial=0.0), strict=True):
            if largest >= MAX_WHOLE and tables[0][name].dtype.kind in "iu":
                log.warning(
                    "%s, column %s: whole numbers from 2^53 on are rounded; if they are names, "
                    "write --data.categorical [%s], else subtract the least of them",
                    self.train_path,
                    name,
                    name,
                )
        found = [self._moments(name, column) for name, column in zip(names, values[0], strict=True)]
        mean, std = (np.array(some)[:, None] for some in zip(*found, strict=True))
        return [((some - mean) / std).T for some in values]

    def _one_hot(self, name: str, tables: Tables) -> list[np.ndarray]:
        """Return 1 where a row has a category, else 0, for each category of the training rows."""
        texts = [some[name].astype(str) for some in tables]
        numbers = number_names(texts[0].tolist())
        if self.run_form is not None:
            numbers = {text: number for number, text in enumerate(self._of_run(name))}
        self._columns[name] = list(numbers)
        require(
            self.run_form or len(numbers) <= max_categories(len(tables[0])),
            f"{self.train_path}, column {name}",
            f"it has {len(numbers)} categories in {len(tables[0])} training rows",
            f"name the features without {name}",
        )
        codes = [codes_of(text, numbers) for text in texts]
        self._warn_of_unknown(name, [int((some < 0).sum()) for some in codes], tables)
        return [some[:, None] == np.arange(len(numbers)) for some in codes]


def _is_text(column: pd.Series) -> bool:
    """Return whether all values of a column that are there are text."""
    values = column.dropna()
    return len(values) > 0 and bool(values.map(lambda value: isinstance(value, str)).all())


def _has_fill(entry: Any) -> bool:
    """Return whether an entry of a form's columns says what takes the place of a missing value."""
    return isinstance(entry, Mapping) and "fill" in entry


def _may_be_amounts(column: pd.Series) -> bool:
    """Return whether the numbers of a target may be amounts, such as ages, and not names of
    classes.

    Classes that are numbered are 0, 1, 2 ... or 1, 2, 3 ...
    """
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(column) or column.nunique() <= MAX_NUMBERS:
        return False
    first, count = column.min(), column.nunique()
    return not (first in (0, 1) and column.max() == first + count - 1)
