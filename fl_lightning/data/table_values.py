"""Values that are missing from a table, and columns of text, by scikit-learn.

Everything is fitted on the training rows. ``N`` rows, ``W`` words.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from fl_lightning.config.near_names import nearest_or_list, require_choice
from fl_lightning.data.arrays import number_names
from fl_lightning.data.table_file import MAX_NUMBER, MAX_WHOLE, moments, row_of
from fl_lightning.errors import InputError, require

if TYPE_CHECKING:
    import pandas as pd  # imported in functions below: it is slow, and most runs need no table

Missing = Literal["mean", "median", "most_frequent", "drop"]
TextEncoding = Literal["ordinal", "tfidf", "drop"]
MISSING, ENCODINGS = ("mean", "median", "most_frequent", "drop"), ("ordinal", "tfidf", "drop")

MAX_CATEGORIES, MIN_REPEATED = 1000, 20
"""Largest number of categories of a column. One with more, or with more than 20 of which most stand
in one row only, is text or a name of the row."""
MAX_SHARE_OF_NUMBERS = 0.9
"""A column of text of which more values than this share, but not all, are numbers has a wrong
value."""
MAX_WORDS = 1000
"""Largest number of words of a column; the most frequent ones are taken."""
MAX_LISTED = 10
"""Columns that a message names of each kind of problem."""
DECIMAL_COMMA = r"[+-]?\d+,\d+"
DATE_FORMATS = ("ISO8601", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y")
"""How dates are written in text that is taken for dates."""
DATE_SAMPLE = 100
"""Values of a column of text by which dates are known."""

TEXT_PROBLEMS = {
    "text": (
        "columns have too many different values for categories",
        "write --data.text ordinal, tfidf or drop, or name the features without them",
    ),
    "dates": (
        "dates are neither numbers nor categories",
        "make numbers of them, such as days since the first, or write --data.text drop",
    ),
    "numbers": (
        "a value is no number, and nearly all values of its column are",
        "correct it, leave it empty and write --data.missing, or write categorical: [COLUMN]",
    ),
    "commas": (
        "numbers have a decimal point, and these have a comma",
        "write points, as pandas.read_csv(file, decimal=',') and to_csv do",
    ),
    "others": (
        "a value is a number or a text",
        "name the features without the column, or write --data.text drop",
    ),
}
"""Rule and remedy of each kind of problem with a column that is no numbers."""


def check_settings(missing: object, text: object) -> None:
    """Refuse settings that name no strategy.

    Raises:
        InputError: one is none of those that there are.
    """
    if missing is not None:
        require_choice(missing, MISSING, "--data.missing")
    if isinstance(text, Mapping):
        for name, encoding in text.items():
            require_choice(encoding, ENCODINGS, f"--data.text.{name}")
    elif text is not None:
        require_choice(text, ENCODINGS, "--data.text")


def encodings_of(
    train: pd.DataFrame,
    features: Sequence[str],
    categorical: Sequence[str],
    text: TextEncoding | Mapping[str, str] | None,
    run: Mapping[str, Any] | None,
) -> dict[str, TextEncoding | None]:
    """Return how each column is encoded that is neither numbers nor categories; None: nothing says
    how.

    Args:
        train: the training rows.
        features: columns that the network sees.
        categorical: columns of numbers that are names.
        text: the encoding of all such columns, or of columns by name, which need not be such.
        run: of a node's own data what the run knows of each column, which then decides.

    Raises:
        InputError: ``text`` names a column that the network does not see.
    """
    import pandas as pd

    named = cast("Mapping[str, TextEncoding]", text if isinstance(text, Mapping) else {})
    every: TextEncoding | None = None if isinstance(text, Mapping) else text
    found: dict[str, TextEncoding | None] = {}
    if run is None:
        for name in named:
            require(
                name in features,
                f"--data.text.{name}",
                "it is no column that the network sees",
                f"write {nearest_or_list(name, features)}",
            )
        found |= named
    else:
        found |= {name: entry["text"] for name, entry in run.items() if isinstance(entry, Mapping)}
        found |= {name: "drop" for name in features if name not in run and text is not None}
    kinds = dict(zip(train.columns, train.dtypes, strict=True))
    for name in features:
        is_number = pd.api.types.is_numeric_dtype(kinds[name]) and name not in categorical
        if name in found or is_number:
            continue
        values = train[name].dropna()
        if not _is_plain(values).all() or (
            name not in categorical and _wrong_number(values) is not None
        ):
            found[name] = "drop" if every == "drop" else None
        elif run is None and values.nunique() > max_categories(len(train)):
            found[name] = None if every != "drop" and _are_dates(values) else every
    return found


def max_categories(rows: int) -> int:
    """Return the largest number of categories of a column with so many training rows."""
    return min(MAX_CATEGORIES, max(MIN_REPEATED, rows // 2))


def check_values(
    path: Path,
    table: pd.DataFrame,
    features: Sequence[str],
    others: Sequence[str],
    encodings: Mapping[str, TextEncoding | None],
    missing: Missing | None,
    may_be_empty: bool,
) -> None:
    """Refuse the columns of a file that cannot be read as they are, all in one message.

    Args:
        path: the file, for the message.
        table: its rows.
        features: columns that the network sees.
        others: target, group and client, whose values are never filled in.
        encodings: of columns of text, see :func:`encodings_of`.
        missing: what is done about missing values.
        may_be_empty: whether a column may have no value at all, since its fill comes from other
            rows.

    Raises:
        InputError: values are missing, or a column is neither numbers nor categories, and no
            setting says what to do about it.
    """
    lacking = _missing_problems(table, features, others, missing, may_be_empty)
    problems = [*lacking, *_text_problems(table, encodings)]
    if problems:
        raise InputError(
            f"{path}",
            ", and ".join(f"{rule}: {_listed(columns)}" for rule, columns, _ in problems),
            ", and ".join(dict.fromkeys(instead for _, _, instead in problems)),
        )


def _missing_problems(
    table: pd.DataFrame,
    features: Sequence[str],
    others: Sequence[str],
    missing: Missing | None,
    may_be_empty: bool,
) -> list[tuple[str, list[str], str]]:
    """Return rule, columns and remedy of each kind of problem with missing values."""
    counts = table[list(dict.fromkeys([*features, *others]))].isna().sum()
    lacking = {str(name): int(count) for name, count in counts[counts > 0].items()}
    told = {
        name: f"{name} ({count} of {len(table)}, row {row_of(table, table[name].isna().to_numpy())})"
        for name, count in lacking.items()
    }
    empty = [name for name, count in lacking.items() if count == len(table) and not may_be_empty]
    found = []
    if empty:
        found.append(
            ("columns have no value at all", empty, "name the features without the empty columns")
        )
    filled = [told[name] for name in told if name not in (*others, *empty)]
    fixed = [told[name] for name in told if name in others and name not in empty]
    drop = "write --data.missing drop, which leaves out the rows"
    if fixed:
        drop += ", or other words where NA, NaN, None or null are names"
    if missing is None and filled:
        rule = "values are missing (empty, NA, NaN, None or null)"
        some = f"write --data.missing {', '.join(MISSING[:-1])} or drop"
        found.append((rule, filled, drop if fixed else some))
    if missing != "drop" and fixed:
        rule = "target, group and client are never filled in, and values of them are missing"
        found.append((rule, fixed, drop))
    return found


def _text_problems(
    table: pd.DataFrame, encodings: Mapping[str, TextEncoding | None]
) -> list[tuple[str, list[str], str]]:
    """Return rule, columns and remedy of each kind of problem with columns that are no numbers."""
    kinds: dict[str, list[str]] = {kind: [] for kind in TEXT_PROBLEMS}
    for name in (name for name, encoding in encodings.items() if encoding is None):
        values = table[name].dropna()
        wrong = _wrong_number(values)
        if _are_dates(values):
            kinds["dates"].append(f"{name} (as {values.iloc[0]})")
        elif not _is_plain(values).all():
            kinds["others"].append(f"{name} ({type(values[~_is_plain(values)].iloc[0]).__name__})")
        elif values.astype(str).str.fullmatch(DECIMAL_COMMA).all():
            kinds["commas"].append(f"{name} (as {values.iloc[0]})")
        elif wrong is not None:
            kinds["numbers"].append(f"{name} ({values.loc[wrong]} in row {int(wrong) + 1})")
        else:
            kinds["text"].append(f"{name} ({values.nunique()} in {len(table)} rows)")
    return [
        (rule, kinds[kind], instead)
        for kind, (rule, instead) in TEXT_PROBLEMS.items()
        if kinds[kind]
    ]


def _listed(columns: Sequence[str]) -> str:
    rest = len(columns) - MAX_LISTED
    return ", ".join(columns[:MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _is_plain(values: pd.Series) -> pd.Series:
    """Return of each value whether it is a number or a text, and no date, list or the like."""
    return values.map(lambda value: isinstance(value, (str, bool, int, float))).astype(bool)


def _wrong_number(values: pd.Series) -> Any:
    """Return the label of the first value that is no number where nearly all values are; else
    None."""
    import pandas as pd

    if not _is_plain(values).all():
        return None
    wrong = pd.to_numeric(values, errors="coerce").isna()
    return wrong.idxmax() if 0 < wrong.mean() < 1 - MAX_SHARE_OF_NUMBERS else None


def _are_dates(values: pd.Series) -> bool:
    """Return whether a column has dates, or text that is written as dates are."""
    import pandas as pd

    some = values.iloc[:DATE_SAMPLE]
    if some.map(lambda value: isinstance(value, datetime.date)).all():
        return len(some) > 0
    if not some.map(lambda value: isinstance(value, str)).all():
        return False
    return any(
        pd.to_datetime(some, format=form, errors="coerce", utc=True).notna().all()
        for form in DATE_FORMATS
    )


def fills_of(
    train: pd.DataFrame,
    features: Iterable[str],
    categorical: Sequence[str],
    encodings: Mapping[str, TextEncoding | None],
    missing: Missing,
) -> dict[str, Any]:
    """Return what takes the place of a missing value of each column: a number or a text.

    Names have no mean: of categories it is the most frequent one, also with mean and median. Text
    of which words are taken has none where it is missing.

    Args:
        train: the training rows.
        features: columns that the network sees.
        categorical: columns of numbers that are names.
        encodings: of columns of text.
        missing: mean, median or most_frequent.
    """
    import pandas as pd
    from sklearn.impute import SimpleImputer

    words = [name for name in features if encodings.get(name) == "tfidf"]
    rest = [name for name in features if name not in encodings or encodings[name] == "ordinal"]
    numeric = [name for name in rest if pd.api.types.is_numeric_dtype(train[name])]
    named = {*categorical, *encodings}
    numbers, names = [n for n in numeric if n not in named], [n for n in numeric if n in named]
    texts = [name for name in rest if not pd.api.types.is_numeric_dtype(train[name])]
    fills: dict[str, Any] = dict.fromkeys(words, "")
    for columns, strategy in ((numbers, missing), (names, "most_frequent")):
        if columns:
            block = train[columns].astype(np.float64).to_numpy()
            # what is too large is refused later
            block = np.where(np.abs(block) < MAX_NUMBER, block, np.nan)
            found = (
                SimpleImputer(strategy=strategy, keep_empty_features=True).fit(block).statistics_
            )
            fills |= dict(zip(columns, found.tolist(), strict=True))
    for name in texts:
        most_frequent = train[name].dropna().map(str).mode()  # sorted
        fills[name] = most_frequent.iloc[0] if len(most_frequent) else ""
    return fills


def filled(table: pd.DataFrame, fills: Mapping[str, Any]) -> pd.DataFrame:
    """Return rows without missing values.

    Args:
        table: the rows.
        fills: of each column that is filled in, the number or text.
    """
    import pandas as pd

    lacking = [name for name in fills if table[name].isna().any()]
    table = table.copy() if lacking else table
    for name in lacking:
        text = isinstance(fills[name], str)
        column = table[name].astype(object).map(str, na_action="ignore") if text else table[name]
        numeric = not text and pd.api.types.is_numeric_dtype(column)
        table[name] = column.astype(np.float64 if numeric else object).fillna(fills[name])
    return table


def whole_names(tables: Sequence[pd.DataFrame], names: Iterable[str]) -> list[pd.DataFrame]:
    """Return rows in which names that are whole numbers are integers: a column with a missing value
    has none, and 1.0 is not the name 1.

    Args:
        tables: the rows of both splits, or of one.
        names: columns of names, of which a table may lack some.
    """
    import pandas as pd

    def is_whole(column: pd.Series) -> bool:
        if not pd.api.types.is_float_dtype(column):
            return pd.api.types.is_integer_dtype(column)
        return bool(((column == column.round()) & (column.abs() < MAX_WHOLE)).all())

    whole = [
        name
        for name in dict.fromkeys(names)
        if all(is_whole(some[name]) for some in tables if name in some)
    ]
    return [some.astype({name: np.int64 for name in whole if name in some}) for some in tables]


def codes_of(column: pd.Series, numbers: Mapping[Any, int]) -> np.ndarray:
    """Return the number of each value, int64 ``[N]``, -1 for one that has none."""
    return column.map(numbers).fillna(-1).to_numpy(np.int64)


def fit_ordinal(column: pd.Series) -> dict[str, Any]:
    """Return the categories of a column in sorted order, and mean and standard deviation of their
    numbers."""
    texts = column.map(str)
    numbers = number_names(texts)
    codes = codes_of(texts, numbers).astype(np.float64)
    return {"text": "ordinal", "categories": list(numbers), "moments": [*moments(codes)]}


def fit_tfidf(column: pd.Series, place: str) -> dict[str, Any]:
    """Return the most frequent words of a column in sorted order, and the weight of each.

    Raises:
        InputError: there is no word.
    """
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

    texts, counter = column.map(str).tolist(), CountVectorizer()
    try:
        counts = np.asarray(counter.fit_transform(texts).sum(axis=0)).ravel()
    except ValueError as error:  # an empty vocabulary
        raise InputError(
            place, f"it has no words ({error})", "name the features without it"
        ) from None
    # TfidfVectorizer(max_features=...) breaks ties differently on different processors
    chosen = np.sort(np.argsort(-counts, kind="stable")[:MAX_WORDS])
    words = counter.get_feature_names_out()[chosen].tolist()
    weights = TfidfVectorizer(vocabulary=words).fit(texts).idf_.tolist()
    return {"text": "tfidf", "words": words, "idf": weights}


def encoded(column: pd.Series, fit: Mapping[str, Any]) -> tuple[np.ndarray, int]:
    """Return a column of text as numbers, float64 ``[N, 1]`` or ``[N, W]``, and how many rows have
    nothing that the training rows have.

    Args:
        column: the text of some rows.
        fit: what :func:`fit_ordinal` or :func:`fit_tfidf` has found in the training rows.
    """
    texts = column.map(str)
    if fit["text"] == "ordinal":
        numbers = {name: number for number, name in enumerate(fit["categories"])}
        codes = codes_of(texts, numbers)[:, None]
        mean, deviation = fit["moments"]
        return (codes - mean) / deviation, int((codes < 0).sum())
    if not len(texts):
        return np.empty((0, len(fit["words"]))), 0
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(vocabulary=fit["words"])
    vectorizer.idf_ = np.array(fit["idf"])
    weights = vectorizer.transform(texts)
    unknown = np.diff(weights.indptr) == 0
    return weights.toarray(), int((unknown & (texts != "").to_numpy()).sum())
