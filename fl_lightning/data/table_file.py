"""The files of tables, CSV and Parquet, and the checks of their columns.

``N`` rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.data.arrays import near_names
from fl_lightning.data.partition import check_memory
from fl_lightning.errors import InputError, require

if TYPE_CHECKING:
    import pandas as pd  # imported in functions below: it is slow, and most runs need no table

CSV_SUFFIXES, PARQUET_SUFFIXES = (".csv", ".csv.gz", ".tsv"), (".parquet", ".pq")
MAX_NUMBER = 1e30
"""A larger number would spoil the deviation of its column: its square is more than float32 holds."""
CONSTANT = 1e-12
"""A column whose deviation is a smaller share of its largest value is a constant, but for rounding."""
MAX_SHARE_OF_NUMBERS = 0.9
"""A column of text of which more values than this share, but not all, are numbers has a wrong value."""


def read_table(path: Path) -> pd.DataFrame:
    """Return the rows of a file.

    Raises:
        InputError: it cannot be read, has no rows, or has two columns of one name.
    """
    import pandas as pd

    check_file(path)
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
        some = error.object[max(0, error.start - 10) : error.start + 10]  # of a cell or a block: no position
        raise InputError(f"{path}", f"{some!r} is not UTF-8", "convert the file to UTF-8") from None
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


def check_file(path: Path) -> None:
    require(path.is_file(), f"{path}", "there is no such file", "write the path of a .csv or .parquet file")
    suffixes = CSV_SUFFIXES + PARQUET_SUFFIXES
    require(
        path.name.endswith(suffixes), f"{path}", f"a table's name ends in {', '.join(suffixes)}", "rename it"
    )


def _check_names(names: list[str], path: Path) -> None:
    double = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    require(not double, f"{path}", f"two columns are named {double[:1]}", "rename one of them")


def check_column(table: pd.DataFrame, name: str, path: Path) -> None:
    instead = near_names(name, table.columns)
    if len(table.columns) == 1 and not path.name.endswith(PARQUET_SUFFIXES):
        instead = "separate the columns by commas (.csv) or tabs (.tsv)"
    require(name in table.columns, f"{path}", f"there is no column {name}", instead)


def place_of(table: pd.DataFrame, position: int, name: str, path: Path) -> str:
    """Return where a value stands; rows count from 1, without the names of the columns."""
    return f"{path}, row {int(table.index[position]) + 1}, column {name}"


def check_complete(table: pd.DataFrame, names: list[str], path: Path) -> None:
    """Refuse values that are missing.

    Raises:
        InputError: one is; the first one is named.
    """
    for name in names:
        missing = table[name].isna().to_numpy()
        if missing.any():
            raise InputError(
                place_of(table, int(missing.argmax()), name, path),
                f"the value is missing (empty, NA, NaN or null), one of {int(missing.sum())} of the column",
                "fill it in, remove the rows, or name the features without the column",
            )


def check_text(table: pd.DataFrame, name: str, path: Path, *, numbers_are_names: bool) -> None:
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
            place_of(table, int((~plain).argmax()), name, path),
            f"a value is a number or a text, and this is a {kind}",
            f"name the features without {name}",
        )
    wrong = pd.to_numeric(column, errors="coerce").isna().to_numpy()
    if not numbers_are_names and 0 < wrong.mean() < 1 - MAX_SHARE_OF_NUMBERS:
        position = int(wrong.argmax())
        raise InputError(
            place_of(table, position, name, path),
            f"{column.iloc[position]} is no number, and nearly all values of the column are",
            f"correct it, or write categorical: [{name}] if they are names",
        )


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


def moments(values: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation; 1 in place of one that is 0 but for rounding."""
    mean, deviation = float(values.mean()), float(values.std())
    return mean, deviation if deviation > CONSTANT * float(np.abs(values).max()) else 1.0
