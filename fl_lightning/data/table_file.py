"""The files of tables, CSV and Parquet, and the checks of their columns.

``N`` rows.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.config.constraints import path_to
from fl_lightning.config.near_names import nearest_or_list
from fl_lightning.data.partition import check_memory
from fl_lightning.errors import InputError, require

if TYPE_CHECKING:
    import pandas as pd  # imported in functions below: it is slow, and most runs need no table

CSV_SUFFIXES, PARQUET_SUFFIXES = (".csv", ".csv.gz", ".tsv"), (".parquet", ".pq")
MAX_NUMBER = 1e30
"""A larger number would spoil the deviation of its column: its square is more than float32
holds."""
MAX_WHOLE = 2**53
"""From here on float64 does not tell whole numbers apart."""
CONSTANT = 1e-14
"""A column whose deviation is a smaller share of its largest value is a constant, but for
rounding."""
MANY_COLUMNS = 1000
"""A wider table is copied once: the copy has one array for each type, where the parser leaves one
for each column, and a look at all columns takes a hundredth of the time."""


def read_table(path: Path, texts: Iterable[str] = ()) -> pd.DataFrame:
    """Return the rows of a file.

    Args:
        path: the file.
        texts: columns that are text even where all their values are numbers, of a Parquet file
            whole ones or true and false.

    Raises:
        InputError: it cannot be read, has no rows, or has two columns of one name.
    """
    import pandas as pd

    check_file(path)
    check_memory(f"{path}", path.stat().st_size)
    try:
        if path.name.endswith(PARQUET_SUFFIXES):
            table = pd.read_parquet(path)
            for name in table.columns.intersection([*texts]):
                table[name] = _as_texts(table[name])
        else:
            separator = _separator(path)
            with warnings.catch_warnings():  # of rows that are longer than the names above them
                warnings.simplefilter("error", pd.errors.ParserWarning)
                types = dict.fromkeys(texts, str)
                table = pd.read_csv(
                    path, sep=separator, low_memory=False, dtype=types, index_col=False
                )
            first = pd.read_csv(path, sep=separator, header=None, nrows=1, dtype=str)
            _check_names(first.iloc[0].dropna().tolist(), path)
    except InputError:
        raise
    except pd.errors.ParserWarning:
        rule = "its rows have more values than there are names above them"
        instead = "name each column, a first one with the names of rows too"
        raise InputError(f"{path}", rule, instead) from None
    except ImportError as error:
        raise InputError(
            f"{path}",
            f"Parquet needs pyarrow ({error})",
            "pip install pyarrow, or write a .csv file",
        ) from None
    except OSError as error:
        raise InputError(
            f"{path}", f"it cannot be read ({error.strerror or error})", "check the file"
        ) from None
    except UnicodeDecodeError as error:
        # of a cell or a block: no position
        some = error.object[max(0, error.start - 10) : error.start + 10]
        raise InputError(f"{path}", f"{some!r} is not UTF-8", "convert the file to UTF-8") from None
    except pd.errors.EmptyDataError:
        raise InputError(f"{path}", "the file is empty", "fill it") from None
    except (ValueError, pd.errors.ParserError) as error:  # pyarrow's errors are ValueErrors
        reason = " ".join(str(error).split())
        if fields := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", reason):
            reason = "line {1} has {2} values, and the lines before it {0}".format(*fields.groups())
        raise InputError(f"{path}", f"it is no table ({reason})", "check the file") from None
    require(len(table), f"{path}", "the table has no rows", "fill it")
    kinds = table.dtypes
    if categories := [name for name in table if isinstance(kinds[name], pd.CategoricalDtype)]:
        table = table.astype(dict.fromkeys(categories, object))
    for name in (
        name for name in table if kinds[name].kind == "O" and type(table[name].iloc[0]) is int
    ):
        if table[name].map(lambda value: type(value) is int).all():  # some are beyond 64 bits
            table[name] = table[name].map(_as_float)
    if len(table.columns) > MANY_COLUMNS:
        table = table.copy()
    if not isinstance(table.index, pd.RangeIndex):  # of a Parquet file: it may hold a column
        twice = [name for name in table.index.names if name in table.columns]
        table = table.reset_index(twice, drop=True) if twice else table
    if not isinstance(table.index, pd.RangeIndex):
        table = table.reset_index() if all(table.index.names) else table.reset_index(drop=True)
    return table


def as_names_of(texts: pd.Series, column: pd.Series) -> pd.Series:
    """Return texts with the number that a column has in the place of each text that is one of its
    numbers: a file with one text among the numbers of a column has texts alone.

    Args:
        texts: a column of one file.
        column: that of the other file, which has numbers.
    """
    import pandas as pd

    spelled = {str(value): value for value in column.dropna().unique().tolist()}
    known = {} if column.dtype.kind == "b" else {value: value for value in spelled.values()}
    found = {text: pd.to_numeric(text, errors="coerce") for text in texts.dropna().unique()}
    return texts.map({text: spelled.get(text, known.get(n, text)) for text, n in found.items()})


def _as_texts(column: pd.Series) -> pd.Series:
    """Return a column in which whole numbers, true and false are texts, if it has no others."""
    kind, values = column.dtype.kind, column.dropna()
    if kind not in "iufb" or not (values % 1 == 0 if kind == "f" else values.notna()).all():
        return column
    made = str if kind == "b" else lambda number: str(int(number))  # beside a gap they are floats
    return column.astype(object).map(made, na_action="ignore")


def _as_float(number: int) -> float:
    """Return a whole number as a float, infinite where it is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


TABLE_FILE = path_to("file", "there is no such file", "write the path of a .csv or .parquet file")


def check_file(path: Path) -> None:
    TABLE_FILE.check(path)
    suffixes = CSV_SUFFIXES + PARQUET_SUFFIXES
    require(
        path.name.endswith(suffixes),
        f"{path}",
        f"a table's name ends in {', '.join(suffixes)}",
        "write the path of a table, or rename it if it is one",
    )


def _check_names(names: list[str], path: Path) -> None:
    double = [name for name, count in Counter(names).items() if count > 1]
    require(not double, f"{path}", f"two columns are named {double[:1]}", "rename one of them")


def check_column(table: pd.DataFrame, name: str, path: Path) -> None:
    if name in table.columns:
        return
    instead = f"write {nearest_or_list(name, table.columns)}"
    if len(table.columns) == 1 and not path.name.endswith(PARQUET_SUFFIXES):
        instead = "separate the columns by commas (.csv) or tabs (.tsv)"
    raise InputError(f"{path}", f"there is no column {name}", instead)


def _separator(path: Path) -> str:
    return "\t" if path.name.endswith(".tsv") else ","


def check_spellings(path: Path, table: pd.DataFrame, names: Iterable[str]) -> None:
    """Refuse values that are no text, by which two classes, groups or clients would be one.

    Raises:
        InputError: a CSV file has, say, both ``7`` and ``007``, ``1.1`` and ``1.10``, or ``True``
            and ``true`` in one of these columns.
    """
    import pandas as pd

    read = [
        name
        for name in dict.fromkeys(names)
        if pd.api.types.infer_dtype(table[name], skipna=True) != "string"
    ]
    if not read or path.name.endswith(PARQUET_SUFFIXES):
        return
    written = pd.read_csv(path, sep=_separator(path), usecols=read, dtype=str, index_col=False)
    for name in read:
        spellings = pd.DataFrame({"text": written[name].str.strip(), "value": table[name]})
        double = spellings.dropna().drop_duplicates().groupby("value")["text"].agg(sorted)
        double = double[double.map(len) > 1]
        if len(double):
            raise InputError(
                f"{path}, column {name}",
                f"one value is written as {' and '.join(double.iloc[0][:2])}",
                "write it in one way, or with a letter if these are two",
            )


def check_single(path: Path, table: pd.DataFrame, names: Iterable[str]) -> None:
    """Refuse lists and structs, which a Parquet file can have, in the columns of these names."""
    for name in names:
        if name not in table or table[name].dtype.kind != "O":
            continue
        wrong = ~table[name].map(lambda value: isinstance(value, Hashable)).to_numpy(bool)
        if wrong.any():
            given = f"{path}, row {row_of(table, wrong)}, column {name}"
            rule = (
                "the value of a target, group or client is one number or text, and this is several"
            )
            raise InputError(given, rule, "write a column with one of them")


def place_of(table: pd.DataFrame, position: int, name: str, path: Path) -> str:
    """Return where a value stands; rows count from 1, without the names of the columns."""
    return f"{path}, row {int(table.index[position]) + 1}, column {name}"


def row_of(table: pd.DataFrame, marked: np.ndarray) -> int:
    """Return the number in the file of the first row that is marked, bool ``[N]``."""
    return int(table.index[int(marked.argmax())]) + 1


def numbers_of(table: pd.DataFrame, name: str, path: Path) -> np.ndarray:
    """Return a column as float64 ``[N]``.

    Raises:
        InputError: a value is no finite number.
    """
    import pandas as pd

    values = pd.to_numeric(table[name], errors="coerce").to_numpy(np.float64)
    wrong = ~(np.abs(values) < MAX_NUMBER)
    if wrong.any():
        position = int(wrong.argmax())
        finite = bool(np.isfinite(values[position]))
        raise InputError(
            place_of(table, position, name, path),
            f"{table[name].iloc[position]} is {'too large' if finite else 'no finite number'}",
            "correct it, or remove the row",
        )
    return values


def block_of(table: pd.DataFrame, names: list[str], path: Path) -> np.ndarray:
    """Return columns of numbers as float64 ``[D, N]``, each what :func:`numbers_of` returns.

    Raises:
        InputError: a value is no finite number; the first column with one is named.
    """
    import pandas as pd

    block = table[names]
    if not all(map(pd.api.types.is_numeric_dtype, block.dtypes)):
        return np.stack([numbers_of(table, name, path) for name in names])
    values = np.ascontiguousarray(block.to_numpy(np.float64).T)
    wrong = ~(np.abs(values) < MAX_NUMBER).all(1)
    if wrong.any():
        numbers_of(table, names[int(wrong.argmax())], path)
    return values


def moments(values: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation; in place of one that is 0 but for rounding, the largest
    distance from the mean, at least 1."""
    mean, deviation = float(values.mean()), float(values.std())
    if deviation > CONSTANT * float(np.abs(values).max()):
        return mean, deviation
    return mean, max(float(np.abs(values - mean).max()), 1.0)
