"""Missing values and columns of text in tables: known answers, from the training rows alone, and
refusals."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from page_commands import documented
from test_table_data import ready, rows, written

from fl_lightning.__main__ import main
from fl_lightning.data import Natural, TableData
from fl_lightning.data.form import Form
from fl_lightning.errors import InputError
from fl_lightning.export.trained_model import TrainedModel

NOTES = ["slow pulse", "fast pulse", "Pulse normal", "slow slow breath", "unusual", ""]


def with_gaps(n: int = 60) -> pd.DataFrame:
    """Gaps in the age (rows 1, 11, ...) and the colour (rows 3, 13, ...), free text with a name in
    each row."""
    table = rows(n).assign(notes=[f"{NOTES[i % 6]} name{i}" for i in range(n)])
    table.loc[::10, "age"] = np.nan
    table.loc[2::10, "colour"] = None
    return table


def inputs_of(data: TableData) -> tuple[np.ndarray, np.ndarray]:
    return tuple(
        data.inputs(split, torch.arange(len(target))).double().numpy()
        for split, target in (("train", data.train_target), ("test", data.test_target))
    )


def test_an_export_has_the_codes_of_columns_that_are_filled_or_text(tmp_path):
    """As :class:`Form` documents them, and JSON keeps them."""
    data = ready(written(tmp_path, with_gaps()), missing="median", text={"notes": "tfidf"})
    columns = TrainedModel(torch.nn.Identity(), data).preprocessing()["columns"]
    age = columns["age"]
    ages = with_gaps()["age"]
    assert ages.min() <= age["fill"] <= ages.max()
    assert len(age["column"]) == 2
    assert len(columns["notes"]["column"]["words"]) == len(columns["notes"]["column"]["idf"]) > 2
    assert json.loads(json.dumps(columns)) == columns


@pytest.mark.parametrize("strategy", ["mean", "median", "most_frequent"])
def test_gaps_are_filled_from_the_training_rows_alone(tmp_path, strategy):
    """The test rows have other values, so that any use of them would show; the hospital is the
    client."""
    train = with_gaps().drop(columns="notes")
    test = train[:20].assign(age=lambda t: t["age"].where(t["age"].isna(), 1e6), colour=lambda t: t["colour"].where(t["colour"].isna(), "violet"))  # fmt: skip
    data = ready(
        written(tmp_path, train),
        test=str(written(tmp_path, test, "test.csv")),
        missing=strategy,
        client="hospital",
        num_clients=0,
        partition=Natural(),
    )
    first, second = inputs_of(data)
    ages = train["age"].dropna()
    fill = {"mean": ages.mean(), "median": ages.median(), "most_frequent": ages.mode()[0]}[strategy]
    age = train["age"].fillna(fill)
    np.testing.assert_allclose(first[:, 1], (age - age.mean()) / age.std(ddof=0), atol=1e-5)
    np.testing.assert_allclose(second[::10, 1], (fill - age.mean()) / age.std(ddof=0), atol=1e-5)
    colour = train["colour"].value_counts().sort_index().idxmax()
    names = ["blue", "green", "red"]
    assert first[2::10, 2:].argmax(1).tolist() == [names.index(colour)] * 6
    # the gaps alone are of a colour that the training rows have
    assert second[2::10, 2:].sum() == 2
    assert data.names.clients == ["east", "north", "south", "west"]
    assert data.partition_summary()["examples"]["missing"] == {"age": 8, "colour": 8}


def test_rows_with_gaps_are_left_out(tmp_path):
    table = with_gaps().drop(columns="notes")
    table.loc[4, "kind"] = None
    table.loc[5, "hospital"] = None
    data = ready(
        written(tmp_path, table), missing="drop", client="hospital", num_clients=0, partition=None
    )
    assert len(data.train_target) + len(data.test_target) == 60 - 6 - 6 - 2
    examples = data.partition_summary()["examples"]
    assert examples["rows left out"] == 14
    assert examples["missing"] == {"age": 6, "colour": 6, "kind": 1, "hospital": 1}
    whole = ready(written(tmp_path, table.assign(age=np.arange(60.0)), "b.csv"), missing="drop")
    assert len(whole.train_target) + len(whole.test_target) == 60 - 6 - 2


def test_whole_numbers_stay_names_where_some_are_missing(tmp_path):
    """A column with a gap is read as 1.0, 2.0, ..., and one without as 1, 2, ..."""
    table = (
        rows().drop(columns="kind").assign(kind=np.arange(60) % 2, ward=[10115, 20095, 80331] * 20)
    )
    test = str(written(tmp_path, table[:20], "test.csv"))
    gaps = table.astype({"ward": float, "kind": float})
    gaps.loc[0, "ward"] = np.nan
    data = ready(
        written(tmp_path, gaps), test=test, features=["ward"], categorical=["ward"], missing="mean"
    )
    assert data.form().columns == {"ward": {"fill": 20095, "column": ["10115", "20095", "80331"]}}
    assert inputs_of(data)[1].sum() == 20
    gaps.loc[1, "kind"] = np.nan
    dropped = ready(
        written(tmp_path, gaps), test=test, features=["ward"], categorical=["ward"], missing="drop"
    )
    assert dropped.names.classes == [0, 1]
    assert len(dropped.train_target) == 58


def test_text_as_words_and_as_numbers(tmp_path):
    """TF-IDF is that of the textbook: (1 + ln((1 + n) / (1 + df))) * tf, each row of length 1."""
    train = with_gaps().assign(age=1.0, colour="red")
    test = train[:12].assign(notes=["Slow, slow pulse!", "unknown words", *train["notes"][:10]])
    settings = {"test": str(written(tmp_path, test, "test.csv")), "features": ["notes"]}
    data = ready(written(tmp_path, train), text="tfidf", **settings)
    words = sorted({word for note in train["notes"] for word in note.lower().split()})
    expected = np.zeros((60, len(words)))
    for row, note in enumerate(train["notes"]):
        for word in note.lower().split():
            df = sum(word in other.lower().split() for other in train["notes"])
            expected[row, words.index(word)] += 1 + math.log(61 / (1 + df))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    first, second = inputs_of(data)
    np.testing.assert_allclose(first, expected, atol=1e-6)
    np.testing.assert_allclose(second[2:], expected[:10], atol=1e-6)
    assert np.flatnonzero(second[0]).tolist() == [words.index("pulse"), words.index("slow")]
    assert second[1].sum() == 0
    assert data.partition_summary()["examples"]["text"] == {"notes": "tfidf"}

    ordinal = ready(written(tmp_path, train), text={"notes": "ordinal"}, **settings)
    code = np.argsort(np.argsort(train["notes"].to_numpy()))
    first, second = inputs_of(ordinal)
    np.testing.assert_allclose(first[:, 0], (code - code.mean()) / code.std(), atol=1e-6)
    assert second[0, 0] == second[1, 0] == pytest.approx((-1 - code.mean()) / code.std())
    rest = ready(written(tmp_path, train), text="drop", test=settings["test"])
    assert rest.example_shape == (2 + 1 + 4,)  # size and age, the colour, and the hospital


def test_the_most_frequent_words_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("fl_lightning.data.table_values.MAX_WORDS", 3)
    data = ready(
        written(tmp_path, with_gaps()), text="tfidf", missing="mean", features=["notes", "size"]
    )
    assert data.form().columns["notes"]["column"]["words"] == [
        "normal",
        "pulse",
        "slow",
    ]  # of 48 rows, or first


def test_text_and_gaps_are_the_same_for_every_seed_and_partition(tmp_path):
    path, settings = written(tmp_path, with_gaps()), {"missing": "median", "text": "tfidf"}
    one, other = (
        ready(path, **settings),
        ready(path, client="hospital", partition=Natural(), **settings),
    )
    again = ready(path, **settings)
    again.distribute(7, torch.device("cpu"))
    assert one.content_sha256 == again.content_sha256
    hospital = 4  # one column of the first for each hospital
    np.testing.assert_array_equal(inputs_of(one)[0][:, :5], inputs_of(other)[0][:, :5])
    assert one.example_shape[0] == other.example_shape[0] + hospital


def test_a_regression_with_gaps(tmp_path):
    table = with_gaps().drop(columns="kind").assign(price=lambda t: 1000 * t["size"])
    data = ready(
        written(tmp_path, table),
        target="price",
        task="regression",
        missing="median",
        text="ordinal",
    )
    assert float(data.train_target.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert np.isfinite(inputs_of(data)[0]).all()
    table.loc[3, "price"] = np.nan
    with pytest.raises(
        InputError, match=r"never filled in.*price \(1 of 60, row 4\).*missing drop"
    ):
        ready(
            written(tmp_path, table), target="price", task="regression", missing="mean", text="drop"
        )


def test_a_node_takes_over_the_runs_fills_and_words(tmp_path):
    run = ready(written(tmp_path, with_gaps()), missing="mean", text="tfidf")
    own = with_gaps(6).assign(age=np.nan, size=[np.nan, *range(5)], notes=["slow", None, *"bcde"])
    node = TableData(
        str(written(tmp_path, own, "own.csv")), "kind", missing="mean", text="tfidf", num_clients=1
    )
    node.run_form = Form(**json.loads(json.dumps(vars(run.form()))))
    node.setup()
    assert json.dumps(vars(node.form())) == json.dumps(vars(run.form()))
    inputs = node.inputs("train", torch.arange(6)).double()
    columns = run.form().columns
    (mean, std), fill = columns["age"]["column"], columns["age"]["fill"]
    torch.testing.assert_close(
        inputs[:, 1], torch.full((6,), (fill - mean) / std, dtype=torch.float64)
    )
    words = columns["notes"]["column"]["words"]
    assert inputs[0, -len(words) :].argmax() == words.index("slow")
    assert inputs[1, -len(words) :].sum() == 0
    dropping = TableData(
        str(tmp_path / "own.csv"), "kind", missing="mean", text="drop", num_clients=1
    )
    dropped = ready(tmp_path / "train.csv", missing="mean", text="drop")
    dropping.run_form = Form(**json.loads(json.dumps(vars(dropped.form()))))
    dropping.setup()
    assert dropping.example_shape == dropped.example_shape


def test_all_problems_of_a_file_are_one_message(tmp_path):
    table = with_gaps().assign(day=pd.date_range("2024-01-01", periods=60).astype(str))
    table["room"] = ["?", *range(59)]
    table["scan"] = np.nan
    table.loc[9, "kind"] = None
    with pytest.raises(InputError) as error:
        ready(written(tmp_path, table))
    assert str(error.value).partition("; ")[2] == (
        "columns have no value at all: scan, "
        "and values are missing (empty, NA, NaN, None or null): age (6 of 60, row 1), colour (6 of 60, row 3), "
        "and target, group and client are never filled in, and values of them are missing: kind (1 of 60, row 10), "
        "and columns have too many different values for categories: notes (60 in 60 rows), "
        "and dates are neither numbers nor categories: day (as 2024-01-01), "
        "and a value is no number, and nearly all values of its column are: room (? in row 1)"
        "; name the features without the empty columns, "
        "and write --data.missing drop, which leaves out the rows, or other words where NA, NaN, None or null are names, "
        "and write --data.text ordinal, tfidf or drop, or name the features without them, "
        "and make numbers of them, such as days since the first, or write --data.text drop, "
        "and correct it, leave it empty and write --data.missing, or write categorical: [COLUMN]"
    )
    kept = table.drop(columns="scan")
    data = ready(
        written(tmp_path, kept),
        missing="drop",
        text="drop",
        features=["size", "notes", "day", "room"],
    )
    assert data.example_shape == (1,)
    dated = ready(
        written(tmp_path, kept), missing="drop", text={"day": "ordinal"}, features=["size", "day"]
    )
    assert dated.example_shape == (2,)
    many = pd.concat(
        [table, pd.DataFrame({f"x{i}": [None, *range(59)] for i in range(30)})], axis=1
    )
    with pytest.raises(InputError, match=r"x7 \(1 of 60, row 1\) and 22 more"):
        ready(written(tmp_path, many))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"missing": "zero"}, "--data.missing zero; one of mean, median, most_frequent, drop"),
        ({"text": "words"}, "--data.text words; one of ordinal, tfidf, drop"),
        ({"text": {"notes": "bag"}}, "--data.text.notes bag; one of ordinal, tfidf, drop"),
        ({"text": {"note": "tfidf"}}, "--data.text.note; it is no column that the network sees; write notes"),
        ({"text": {"kind": "ordinal"}}, "--data.text.kind; it is no column that the network sees"),
        ({"text": "tfidf", "features": ["age"], "missing": "drop", "test": "empty.csv"}, "every row lacks a value"),
        ({"text": {"colour": "tfidf"}, "features": ["colour"], "missing": "mean", "test": "one.csv"}, "train.csv, column colour; it has no words"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_one_line(tmp_path, monkeypatch, settings, words):
    monkeypatch.chdir(tmp_path)
    table = with_gaps()
    if "colour" in settings.get("features", ()):
        table["colour"] = ["a", "?"] * 30
    written(tmp_path, with_gaps()[:1].assign(age=[np.nan]), "empty.csv")
    written(tmp_path, table[1:2], "one.csv")
    with pytest.raises(InputError, match=words) as error:
        ready(written(tmp_path, table), **settings)
    assert "\n" not in str(error.value)


def test_the_command_line_takes_both_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, with_gaps(), "wards.csv")
    base = "fit --model FedAvg --model.network mlp --data TableData --data.train wards.csv --data.target kind --data.client hospital --trainer.max_rounds 2 --trainer.logger false --trainer.callbacks [] --trainer.participation 1.0"  # fmt: skip
    assert main(base.split()) == 2
    assert "--data.missing mean, median, most_frequent or drop" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    both = ["--data.missing", "median", "--data.text.notes", "tfidf"]
    assert main([*base.split(), *both]) == 0
    (summary,) = (tmp_path / "runs").rglob("partition.json")
    assert json.loads(summary.read_text())["examples"]["text"] == {"notes": "tfidf"}


@pytest.mark.slow
@pytest.mark.essential
def test_the_documented_command_trains_on_a_table_with_gaps_and_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = with_gaps(240).assign(street=[f"street {i}" for i in range(240)])
    table["notes"] = (
        table["kind"].map({"benign": "fine fine fine ", "malignant": "lump lump lump "})
        + table["notes"]
    )
    written(tmp_path, table.drop(columns="size"), "wards.csv")
    (command,) = [words for words in documented("TableData") if "--data.missing" in words]
    assert main([*command, "--trainer.max_rounds", "30", "--trainer.logger", "false"]) == 0
    (found,) = (tmp_path / "runs").rglob("metadata.json")
    assert json.loads(found.read_text())["final/accuracy"] > 0.9  # only the notes tell the kind
