"""Tables from CSV and Parquet: numbers, categories, groups, clients of their own, and one error a
mistake."""

from __future__ import annotations

import csv
import json
import logging
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from page_commands import documented
from sklearn.datasets import load_breast_cancer, load_diabetes

from fl_lightning.__main__ import main
from fl_lightning.data import IID, Natural, Shards, TableData, table_file
from fl_lightning.data import table as table_data
from fl_lightning.data.arrays import in_test
from fl_lightning.errors import InputError
from fl_lightning.models import MLP, build_network


def rows(n: int = 60) -> pd.DataFrame:
    """Two numbers, a category, a hospital, and a class that follows from the first number."""
    rng = np.random.default_rng(0)
    size = rng.normal(50, 10, n)
    return pd.DataFrame(
        {
            "size": size,
            "age": rng.integers(20, 80, n),
            "colour": np.array(["red", "blue", "green"])[np.arange(n) % 3],
            "hospital": np.array(["west", "east", "north", "south"])[np.arange(n) * 4 // n],
            "kind": np.where(size > 50, "malignant", "benign"),
        }
    )


def ready(train: Path, **settings) -> TableData:
    found = TableData(
        str(train), **{"target": "kind", "num_clients": 4, "partition": IID(), **settings}
    )
    found.prepare_data()
    found.setup()
    found.distribute(0, torch.device("cpu"))
    return found


def written(folder: Path, table: pd.DataFrame, name: str = "train.csv") -> Path:
    path = folder / name
    if name.endswith("parquet"):
        table.to_parquet(path)
    else:
        table.to_csv(path, index=False, sep="\t" if name.endswith("tsv") else ",")
    return path


def test_numbers_are_standardised_with_the_training_rows_alone(tmp_path):
    """The test rows lie elsewhere, so that any use of them would show."""
    train, test = rows(), rows(20).assign(size=1e4, age=-5)
    data = ready(written(tmp_path, train), test=str(written(tmp_path, test, "test.csv")))
    inputs, held = (
        data.inputs(split, torch.arange(n)).double() for split, n in (("train", 60), ("test", 20))
    )
    names = ["size", "age", "colour=blue", "colour=green", "colour=red"]
    # the column hospital is a feature here: 4 categories more
    assert data.example_shape == (len(names) + 4,)
    for column, name in enumerate(("size", "age")):
        mean, std = train[name].mean(), train[name].std(ddof=0)
        torch.testing.assert_close(
            inputs[:, column],
            torch.tensor((train[name] - mean).to_numpy() / std),
            rtol=0,
            atol=1e-5,
        )
        torch.testing.assert_close(
            held[:, column],
            torch.tensor((test[name] - mean).to_numpy() / std),
            rtol=1e-5,
            atol=1e-5,
        )
    for column, colour in enumerate(("blue", "green", "red"), 2):
        assert inputs[:, column].tolist() == (train["colour"] == colour).astype(float).tolist()
    assert data.names.classes == ["benign", "malignant"]
    assert data.train_target.tolist() == (train["kind"] == "malignant").astype(int).tolist()


@pytest.mark.slow
@pytest.mark.essential
def test_a_wide_table_is_made_numbers_of_in_blocks_and_each_number_is_that_of_its_column(
    tmp_path, monkeypatch
):
    """3 000 columns are read in tens of operations of pandas, not in thousands: no column is taken
    out by itself, and no name is looked for among all others."""
    rng, columns = np.random.default_rng(0), 3000
    kinds = [
        lambda: rng.normal(5, 3, 40),
        lambda: rng.integers(0, 9, 40),
        lambda: rng.random(40) < 0.5,
    ]
    table = pd.DataFrame(
        {f"c{i}": kinds[i % 3]() for i in range(columns)} | {"kind": np.arange(40) % 2}
    )
    table.insert(1500, "colour", np.array(["red", "blue"])[np.arange(40) % 2])
    path = written(tmp_path, table)
    calls = dict.fromkeys(("to_numeric", "__getitem__", "nearest_or_list"), 0)

    def counting(owner, name):
        plain = getattr(owner, name)

        def counted(*args, **more):
            calls[name] += 1
            return plain(*args, **more)

        monkeypatch.setattr(owner, name, counted)

    counting(pd, "to_numeric")
    counting(pd.DataFrame, "__getitem__")
    counting(table_file, "nearest_or_list")
    monkeypatch.setattr(table_data, "BLOCK_VALUES", 32 * 1000)  # several blocks
    data = TableData(str(path), "kind", test=str(path), num_clients=4)
    train, test, _ = data.read()
    assert calls["__getitem__"] < 100, calls
    assert calls["to_numeric"] < 10, calls
    assert calls["nearest_or_list"] == 0, calls
    monkeypatch.undo()
    for split in (train.inputs, test.inputs):
        assert split.shape == (40, columns + 2)
        for i in range(columns):
            values = table[f"c{i}"].to_numpy(np.float64)
            expected = ((values - values.mean()) / values.std()).astype(np.float32)
            # behind colour and its two
            assert np.array_equal(split[:, i + 2 * (i >= 1500)], expected)
    assert list(data.form().columns) == [name for name in table if name != "kind"]


def test_the_first_wrong_number_of_a_wide_table_is_named(tmp_path):
    table = pd.DataFrame({f"c{i}": np.arange(9.0) for i in range(20)} | {"kind": np.arange(9) % 2})
    right = str(written(tmp_path, table, "test.csv"))
    table.loc[4, "c7"], table.loc[2, "c9"] = 1e31, np.inf
    with pytest.raises(InputError, match=r"row 5, column c7; 1e\+31 is too large"):
        ready(written(tmp_path, table), test=right)
    table.loc[3, "c8"], table.loc[6, "c8"] = np.nan, np.nan
    with pytest.raises(InputError, match=r"values are missing .*: c8 \(2 of 9, row 4\)"):
        ready(written(tmp_path, table), test=right)


def test_a_fraction_of_every_class_is_the_test_in_every_run(tmp_path):
    table = rows(100)
    table["kind"] = ["a"] * 80 + ["b"] * 20
    one, other = (ready(written(tmp_path, table), test_fraction=0.25) for _ in range(2))
    assert torch.bincount(one.test_target).tolist() == [20, 5]
    assert torch.bincount(one.train_target).tolist() == [60, 15]
    assert one.partition_summary()["examples"] == other.partition_summary()["examples"]
    values = one.inputs("train", torch.arange(75))
    assert values[:, :2].mean(0).abs().max() < 1e-5  # of the training rows, not of the file
    changed = ready(written(tmp_path, table.assign(age=table["age"] + table["size"])))
    assert one.partition_summary()["examples"] != changed.partition_summary()["examples"]


@pytest.mark.parametrize("name", ["train.parquet", "train.tsv", "train.csv.gz"])
def test_all_kinds_of_files_are_the_same_data(tmp_path, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    first, second = (ready(written(tmp_path, rows(), kind)) for kind in ("train.csv", name))
    assert first.partition_summary()["examples"] == second.partition_summary()["examples"]


def test_the_natural_partition_separates_the_clients(tmp_path):
    """Every client holds the rows of one hospital and of no other; there are as many clients as
    hospitals."""
    table = rows().sample(frac=1, random_state=1)
    data = ready(
        written(tmp_path, table),
        client="hospital",
        num_clients=0,
        partition=None,
        test_fraction=0.1,
    )
    assert isinstance(data.partition, Natural)
    assert data.num_clients == 4
    assert data.names.clients == ["east", "north", "south", "west"]
    size = data.inputs("train", torch.arange(len(data.train_target)))[:, 0].numpy()
    rank = {value: place for place, value in enumerate(np.sort(size))}
    assert len(rank) == len(size)
    by_size = dict(zip(table["size"].round(9), table["hospital"], strict=True))
    train = table[~np.isin(np.arange(60), _test_rows(data, table))].reset_index(drop=True)
    for id, hospital in enumerate(data.names.clients):
        client = data.client(id)
        held = [*client.train, *client.val]
        assert {by_size[round(train["size"][row], 9)] for row in held} == {hospital}
        assert len(held) == (train["hospital"] == hospital).sum()
        assert len(client.val)
    assert data.example_shape == (5,)  # the network does not see the hospital


def test_numbers_of_clients_are_written_in_one_way(tmp_path):
    """``7`` and ``007`` would be one client."""
    table = rows()
    table["hospital"] = [f"00{row % 4}" for row in range(60)]
    data = ready(written(tmp_path, table), client="hospital", num_clients=0, partition=None)
    assert data.num_clients == 4
    table.loc[9, "hospital"] = "1"
    with pytest.raises(InputError, match="one value is written as 001 and 1; write it in one way"):
        ready(written(tmp_path, table), client="hospital", num_clients=0, partition=None)


@pytest.mark.parametrize(
    "spellings",
    [
        ("1.1", "1.10"),
        ("1e3", "1000"),
        ("9007199254740992", "9007199254740993", ""),
        ("123456789012345678901234567890", "123456789012345678901234567891"),
        ("True", "true"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("column", ["hospital", "kind"])
def test_two_spellings_are_never_read_as_one_name(tmp_path, column, spellings):
    """Neither of clients nor of classes, of which numbers are whole."""
    if column == "kind":
        spellings = ("1", "01") if "1.1" in spellings else spellings
    table = rows()
    table[column] = [
        *spellings[2:],
        *(spellings[row % 2] for row in range(60 - len(spellings[2:]))),
    ]
    said = f"column {column}; one value is written as {' and '.join(sorted(spellings[:2]))}"
    own = {"client": "hospital", "missing": "drop", "num_clients": 0, "partition": None}
    with pytest.raises(InputError, match=re.escape(said)):
        ready(written(tmp_path, table), **own)
    table[column] = [f"no {name}" if name else None for name in table[column]]
    assert ready(written(tmp_path, table), **own).num_clients == (2 if column == "hospital" else 4)


def test_a_test_file_may_write_a_class_as_a_whole_number_or_not(tmp_path):
    """A table with a missing class is written with fractions, and 01 is no second way in one
    file."""
    table = rows().assign(kind=np.arange(60) % 2)
    train = written(tmp_path, table.assign(kind=table["kind"].map("{}.0".format)))
    data = ready(train, test=str(written(tmp_path, table, "test.csv")))
    assert data.test_target.tolist() == table["kind"].tolist()
    table["kind"] = ["01", *table["kind"].map(str)[1:]]
    with pytest.raises(
        InputError, match=r"test\.csv, column kind; one value is written as 01 and 1"
    ):
        ready(train, test=str(written(tmp_path, table, "test.csv")))


def _test_rows(data: TableData, table: pd.DataFrame) -> np.ndarray:
    """Positions of the rows of the file that are in the test set, found by their standardised
    size."""
    train = data.inputs("train", torch.arange(len(data.train_target)))[:, 1:].sum(1).numpy()
    assert len(train) == 54
    return np.flatnonzero(in_test(table["kind"].to_numpy(str), 0.1))


def test_partitions_go_by_a_group(tmp_path):
    data = ready(
        written(tmp_path, rows()), group="hospital", partition=Shards(1), test_fraction=0.1
    )
    counts = data.group_counts()
    assert counts.shape == (4, 4)
    assert ((counts > 0).sum(1) <= 2).all()  # shards are equal, hospitals nearly
    assert counts.sum() == 54
    assert data.num_classes == 2


def test_regression_in_standard_deviations_of_the_training_target(tmp_path):
    table = rows().drop(columns="kind").assign(price=lambda t: 1000 * t["size"])
    data = ready(written(tmp_path, table), target="price", task="regression")
    assert data.num_classes == 1
    assert data.train_target.dtype == torch.float32
    assert float(data.train_target.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.train_target.std(correction=0)) == pytest.approx(1, abs=1e-5)
    plain = ready(
        written(tmp_path, table), target="price", task="regression", standardise_target=False
    )
    assert float(plain.train_target.mean()) == pytest.approx(50_000, rel=0.1)


def test_numbers_that_are_names(tmp_path):
    table = rows().assign(postcode=[10115, 20095, 80331] * 20)
    path = written(tmp_path, table[["size", "postcode", "kind"]])
    assert ready(path).example_shape == (2,)
    data = ready(path, categorical=["postcode"])
    assert data.example_shape == (4,)
    assert data.inputs("train", torch.arange(9))[:, 1:].sum(1).tolist() == [1] * 9


def test_an_unknown_category_is_told(tmp_path, caplog):
    test = rows(20).assign(colour="violet")
    with caplog.at_level(logging.WARNING):
        data = ready(written(tmp_path, rows()), test=str(written(tmp_path, test, "test.csv")))
    assert "20 of 20 test rows have a category that no training row has" in caplog.text
    assert data.inputs("test", torch.arange(20))[:, 2:5].sum() == 0


def test_a_constant_column_is_zero_and_what_differs_from_it_stays_a_number(tmp_path):
    """The deviation of 0.1 in 60 rows is not 0 but 1e-17."""
    train, test = rows().assign(size=0.1), rows(20).assign(size=0.2)
    data = ready(
        written(tmp_path, train), test=str(written(tmp_path, test, "test.csv")), features=["size"]
    )
    assert data.inputs("train", torch.arange(60)).abs().max() < 1e-9
    torch.testing.assert_close(data.inputs("test", torch.arange(20)), torch.full((20, 1), 0.1))


def with_value(column: str, row: int, value: object) -> pd.DataFrame:
    table = rows().astype(object)
    table.loc[row - 1, column] = value
    return table


WRONG_FILES = {
    "missing": (with_value("age", 7, None), {}, r"train\.csv; values are missing .*: age \(1 of 60, row 7\); write --data\.missing mean, median"),
    "missing target": (with_value("kind", 60, None), {}, r"never filled in, and values of them are missing: kind \(1 of 60, row 60\); write --data\.missing drop"),
    "infinite": (with_value("age", 5, "inf"), {}, "row 5, column age; inf is no finite number"),
    "too large": (with_value("size", 5, 1e39), {}, "row 5, column size; 1e.39 is too large"),
    "among numbers": (with_value("age", 9, "?"), {}, r"a value is no number, and nearly all .*: age \(. in row 9\)"),
    "commas": (rows().assign(age=[f"{i},5" for i in range(60)]), {}, r"and these have a comma: age \(as 0,5\); write points"),
    "no such target": (rows(), {"target": "Kind"}, "there is no column Kind; write kind"),
    "no such feature": (rows(), {"features": ["sise"]}, "there is no column sise; write size"),
    "no such client": (rows(), {"client": "clinic"}, "there is no column clinic; write one of size, age"),
    "target as feature": (rows(), {"features": ["size", "kind"]}, "the network does not see the target"),
    "no rows": (rows(0), {}, "the table has no rows"),
    "fractions": (rows(), {"target": "size"}, "classes are texts or whole numbers"),
    "infinite classes": (rows().assign(kind=[[1, 2, "inf"][i % 3] for i in range(60)]), {}, "classes are texts or whole numbers"),
    "many classes": (rows().assign(kind=range(60)), {}, "classes in"),
    "amounts": (
        rows(400).assign(kind=[18 + i % 70 for i in range(400)]),
        {},
        r"it has 70 different numbers, .* write --data.task regression, or --data.categorical \[kind\]",
    ),
    "one class": (rows().assign(kind="a"), {}, "all training examples are of the class a"),
    "text of regression": (rows(), {"task": "regression"}, "row 2, column kind; benign is no finite number"),
    "an identifier": (
        pd.concat([rows(1200), pd.DataFrame({"name": [f"n{i}" for i in range(1200)]})], axis=1),
        {},
        r"too many different values for categories: name \(1200 in 1200 rows\); write --data\.text ordinal, tfidf or drop",
    ),
    "a task": (rows(), {"task": "ranking"}, "one of classification, regression"),
    "no share": (rows(), {"test_fraction": 0.0}, "a share in"),
    "no test": (rows(), {"test_fraction": 0.001}, "0 of them are for the test"),
    "nobody": (rows(), {"num_clients": 0}, "nothing says whose an example is"),
    "too few": (rows(), {"num_clients": 3, "client": "hospital", "partition": None}, "write num_clients: 4"),
    "natural": (rows(), {"partition": Natural()}, "the data do not say whose an example is"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG_FILES)
def test_a_mistake_is_one_line(tmp_path, mistake):
    table, settings, words = WRONG_FILES[mistake]
    path = written(tmp_path, table)
    with pytest.raises(InputError, match=words) as error:
        ready(path, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"a,b,kind\n1,2\xff,x\n", r"b'2\\xff' is not UTF-8"),
        (b"a,b,kind\n1,2,x,4,5\n1,2,3\n1,2,3,4,5,6,7\n", "it is no table"),
        (b"a,b,kind\n1,2,x\n1,2,3,4\n", "line 3 has 4 values, and the lines before it 3"),
        (b"a,b,kind\n9,1,2,x\n8,3,4,y\n", "more values than there are names above them"),
        (b"a,a,kind\n1,2,x\n3,4,y\n", "two columns are named"),
        (b",a,kind\n0,2,x\n1,4,y\n", "a column has no name"),
        (b"a;b;kind\n0;2;x\n1;4;y\n", "separate the columns by commas"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, content, words):
    (tmp_path / "train.csv").write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        ready(tmp_path / "train.csv")
    assert "\n" not in str(error.value)


def test_commas_at_the_end_of_each_row_shift_no_column(tmp_path):
    plain = written(tmp_path, rows())
    first, *others = plain.read_text().splitlines()
    (tmp_path / "commas.csv").write_text("\n".join([first, *(f"{line}," for line in others), ""]))
    one, other = ready(plain), ready(tmp_path / "commas.csv")
    assert torch.equal(
        one.inputs("train", torch.arange(40)), other.inputs("train", torch.arange(40))
    )
    assert torch.equal(one.train_target, other.train_target)


def test_a_column_that_varies_little_beside_its_size_is_scaled(tmp_path):
    large = 1.5e18 + 1000.0 * np.arange(60)
    data = ready(written(tmp_path, rows().assign(size=large)), features=["size"])
    assert 1 < data.inputs("train", torch.arange(40)).abs().max() < 2


@pytest.mark.parametrize(
    ("targets", "settings"),
    [
        ([i % 70 for i in range(400)], {}),
        ([1 + i % 70 for i in range(400)], {}),
        ([18 + i % 50 for i in range(400)], {}),
        ([f"age {i % 70}" for i in range(400)], {}),
        ([18 + i % 70 for i in range(400)], {"categorical": ["kind"]}),
    ],
)
def test_what_can_only_be_classes_is_not_asked_about(tmp_path, targets, settings):
    """Numbers from 0 or 1 on, few numbers, texts, and what is said to be categories."""
    data = ready(written(tmp_path, rows(400).assign(kind=targets)), **settings)
    assert data.num_classes == len(set(targets))


def test_amounts_are_learnt_as_such_when_that_is_said(tmp_path):
    table = rows(400).assign(kind=[18 + i % 70 for i in range(400)])
    assert ready(written(tmp_path, table), task="regression").train_target.dtype == torch.float32


def test_files_that_are_not_there_or_no_tables(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        ready(tmp_path / "train.csv")
    with pytest.raises(
        InputError,
        match=r"it is a folder, and a file is needed; write the path of a \.csv or \.parquet file",
    ):
        ready(tmp_path)
    (tmp_path / "train.xlsx").write_bytes(b"PK")
    with pytest.raises(InputError, match="name ends in"):
        ready(tmp_path / "train.xlsx")
    (tmp_path / "train.parquet").write_bytes(b"PAR1 or not")
    with pytest.raises(InputError, match=r"train\.parquet") as error:
        ready(tmp_path / "train.parquet")
    assert "\n" not in str(error.value)


def test_the_test_file_has_the_columns_and_classes_of_the_training_file(tmp_path):
    path = written(tmp_path, rows())
    for test, words in (
        (rows(9).drop(columns="age"), "test.csv; there is no column age"),
        (
            rows(9).assign(kind="unknown"),
            "test.csv, row 1, column kind; the class unknown is not among",
        ),
        (rows(9).assign(age="old"), "test.csv, row 1, column age; old is no finite number"),
    ):
        with pytest.raises(InputError, match=words):
            ready(path, test=str(written(tmp_path, test, "test.csv")))


def test_dates_are_refused(tmp_path):
    pytest.importorskip("pyarrow")
    table = rows().assign(date=pd.Timestamp("2024-01-01"))
    with pytest.raises(
        InputError,
        match=r"dates are neither numbers nor categories: date \(as 2024-01-01.*make numbers",
    ):
        ready(written(tmp_path, table, "train.parquet"))


def test_mlp_is_a_plain_network():
    torch.manual_seed(3)
    network = build_network("mlp", 3, (4, 5))
    torch.manual_seed(3)
    plain = torch.nn.Sequential(
        torch.nn.Linear(20, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 3),
    )
    x = torch.randn(6, 4, 5)
    torch.testing.assert_close(network(x), plain(x.flatten(1)), rtol=0, atol=0)
    assert build_network(lambda num_classes: MLP(num_classes, (7,), depth=0), 2, (7,))(
        torch.zeros(3, 7)
    ).shape == (3, 2)
    with pytest.raises(InputError, match=r"write --model\.network mlp"):
        build_network("small_cnn", 2, (7,))


def final(folder: Path) -> dict:
    (found,) = folder.rglob("metadata.json")
    return json.loads(found.read_text())


@pytest.mark.slow
@pytest.mark.essential
def test_a_csv_is_trained_by_the_documented_commands(tmp_path, monkeypatch):
    """Classification by a natural partition, and regression, each better than guessing."""
    tumours = load_breast_cancer(as_frame=True).frame
    tumours["hospital"] = np.array(["east", "north", "west"])[np.arange(len(tumours)) % 3]
    tumours.rename(columns={"target": "kind"}).to_csv(tmp_path / "tumours.csv", index=False)
    load_diabetes(as_frame=True).frame.to_csv(tmp_path / "diabetes.csv", index=False)
    monkeypatch.chdir(tmp_path)
    first, second, _ = documented("TableData")
    assert main([*first, "--trainer.max_rounds", "5", "--trainer.logger", "false"]) == 0
    # the larger class is 0.63 of the table
    assert final(tmp_path / "runs")["final/accuracy"] > 0.85
    with next((tmp_path / "runs").rglob("ledger.csv")).open() as file:
        assert {row["client"] for row in csv.DictReader(file)} == {"0", "1", "2"}
    (tmp_path / "runs").rename(tmp_path / "first")
    assert main([*second, "--trainer.max_rounds", "5", "--trainer.logger", "false"]) == 0
    assert final(tmp_path / "runs")["final/mse"] < 0.8  # the mean alone is 1


def test_what_a_configuration_keeps_of_its_federation_is_said(tmp_path, capsys):
    """A small table among the hundred clients of a packaged configuration."""
    file = tmp_path / "own.csv"
    file.write_text("a,kind\n" + "".join(f"{n / 7},{'xy'[n % 2]}\n" for n in range(60)))
    words = ["fit", "--config", "fedmpq", "--data", "TableData", "--data.train", str(file)]
    assert main([*words, "--data.target", "kind", "--trainer.logger", "false"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert (
        "note: kept from the configuration: data.num_clients 100, data.partition Dirichlet"
        in said[-2]
    )
    assert said[-1].endswith(
        "data.num_clients 100 with min_size 1; 48 training examples cannot give each client 1; "
        "write data.num_clients 48 or less, or data.partition.min_size 0"
    )


@pytest.mark.parametrize(
    ("value", "split"), [([1, 2], "train"), ({"a": 1}, "train"), ([1, 2], "test")], ids=str
)
@pytest.mark.parametrize("name", ["kind", "group", "client"])
def test_lists_and_structs_are_no_names(tmp_path, name, value, split):
    """A Parquet file can have them in any column."""
    good = rows().assign(group="g", client="c")
    bad = good.assign(**{name: [value] * 60})
    paths = {
        part: written(tmp_path, bad if part == split else good, f"{part}.parquet")
        for part in ("train", "test")
    }
    settings = {"test": str(paths["test"]), "client": "client", "group": "group"}
    said = rf"{split}\.parquet, row 1, column {name}; .* one number or text, and this is several"
    for task in ("classification", "regression")[: 2 if name == "kind" else 1]:
        with pytest.raises(InputError, match=said):
            ready(paths["train"], task=task, features=["size"], **settings)


def test_an_index_of_the_name_of_a_column_adds_none(tmp_path):
    """pandas keeps one, of which a column was made by ``set_index(..., drop=False)``."""
    table, path = rows(), tmp_path / "train.parquet"
    table.set_index("hospital", drop=False).to_parquet(path)
    plain = ready(written(tmp_path, table), client="hospital")
    found = ready(path, client="hospital")
    assert found.names.clients == plain.names.clients
    assert torch.equal(found.train_target, plain.train_target)
    table.set_index(["hospital", "kind"]).assign(kind=[*table["kind"]]).to_parquet(path)
    assert ready(path, client="hospital").names.clients == plain.names.clients
