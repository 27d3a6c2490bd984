"""A value is the same name, or the same number, in the training file, in the test file and in that of
a node."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from test_table_data import ready, written

from fl_lightning.data import TableData
from fl_lightning.data.form import Form
from fl_lightning.errors import InputError


def of(names, count: int = 60) -> pd.DataFrame:
    """Rows with a number, a column of names, and a class."""
    place = np.arange(count)
    return pd.DataFrame(
        {"x": place / count, "z": np.array(names)[place % len(names)], "kind": place % 2}
    )


@pytest.mark.parametrize(
    ("train", "test", "settings"),
    [
        # the test file alone would have the numbers 1 and 2
        (["01", "02", "0A"], ["01", "02"], {}),
        ([1, 2, 3], [1.0, 2.0], {"categorical": ["z"]}),  # as pandas writes numbers beside a gap
    ],
)
def test_a_category_is_known_again(train, test, settings, tmp_path, caplog):
    data = ready(
        written(tmp_path, of(train)),
        test=str(written(tmp_path, of(test, 20), "test.csv")),
        **settings,
    )
    (inputs, _), *_ = data.test_batches()
    assert (inputs[:, 1:].sum(1) == 1).all()
    assert inputs[:, 1:].argmax(1).tolist() == [n % 2 for n in range(20)]
    assert "category that no training row has" not in caplog.text


def test_a_class_is_known_again(tmp_path):
    train, test = of(["01", "02", "0A"]), of(["01", "02"], 20)
    path = written(tmp_path, train), str(written(tmp_path, test, "test.csv"))
    data = ready(path[0], test=path[1], target="z")
    assert data.test_target.tolist() == [n % 2 for n in range(20)]


def test_numbers_beyond_64_bits(tmp_path, caplog):
    large = of([0]).assign(z=[2**70 + n * 2**60 for n in range(60)])
    (inputs, _), *_ = ready(written(tmp_path, large)).test_batches()
    assert inputs[:, 1].unique().numel() > 2
    with pytest.raises(InputError, match=r"column z; \w+ is no finite number"):
        ready(written(tmp_path, of([0]).assign(z=[10**400 + n for n in range(60)])))
    ready(written(tmp_path, of([0]).assign(z=[2**60 + n for n in range(60)])))
    assert "column z: whole numbers from 2^53 on are rounded" in caplog.text


def classified(classes, count: int = 180) -> pd.DataFrame:
    """Rows of these classes in turn."""
    return of([1], count).assign(kind=[classes[n % len(classes)] for n in range(count)])


def node_of(run: TableData, folder, table: pd.DataFrame, **settings) -> TableData:
    """A node's own table, of the form of a run's as it travels."""
    node = TableData(str(written(folder, table, "node.csv")), num_clients=1, **settings)
    node.run_form = Form(**json.loads(json.dumps(vars(run.form()))))
    node.setup()
    return node


@pytest.mark.parametrize("classes", [[*range(20)], ["a", "b", "c", "d"]])
def test_a_node_has_few_rows_of_many_classes(classes, tmp_path):
    """It is the run that says what the classes are."""
    run = ready(written(tmp_path, classified(classes)), target="kind")
    held = [classes[0], classes[2], classes[-1]]
    node = node_of(run, tmp_path, classified(held, 3), target="kind")
    assert node.train_target.tolist() == [0, 2, len(classes) - 1]
    assert node.num_classes == len(classes)


def test_a_node_lacks_one_of_many_numbered_classes(tmp_path):
    table = classified([*range(1, 61)])
    run = ready(written(tmp_path, table), target="kind")
    node = node_of(run, tmp_path, table[table["kind"] != 7], target="kind")
    assert sorted(set(node.train_target.tolist())) == [n for n in range(60) if n != 6]


@pytest.mark.parametrize("wrong", [61, 1.5, "inf"])
def test_a_class_of_a_node_that_is_none_of_the_runs_is_refused(wrong, tmp_path):
    run = ready(written(tmp_path, classified([*range(1, 61)])), target="kind")
    with pytest.raises(InputError, match=f"its class {wrong} is none of the run's: 1, 2, "):
        node_of(run, tmp_path, classified([1, 2, wrong], 3), target="kind")


@pytest.mark.parametrize(
    ("classes", "held"),
    [
        (["1", "2", "0A"], ["1", "2"]),
        (["01", "02", "0A"], ["01", "02"]),
        (["True", "False", "maybe"], ["True"]),
    ],
)
def test_a_node_has_none_of_the_classes_that_are_no_numbers(classes, held, tmp_path):
    """Its file alone would have numbers, or true and false."""
    run = ready(written(tmp_path, of(classes)), target="z")
    node = node_of(run, tmp_path, of(held, 8), target="z")
    assert run.names.classes == sorted(classes) == node.names.classes
    expected = [sorted(classes).index(held[n % len(held)]) for n in range(8)]
    assert node.train_target.tolist() == expected


@pytest.mark.parametrize(
    ("train", "test", "expected"),
    [
        ([7, 8, 9], ["7", "8", "guest"], [0, 1, -1]),
        (["007", "008", "009"], ["008", "guest", "7"], [1, -1, 0]),
        ([0.5, 1.5], ["guest", "1.50"], [-1, 1]),
        ([True, False], ["True", "maybe"], [1, -1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["test.csv", "test.parquet"])
def test_a_text_in_the_test_file_hides_no_client_or_group(train, test, expected, name, tmp_path):
    """The column has numbers in the training file, and texts in the other one."""
    paths = written(tmp_path, of(train)), str(written(tmp_path, of(test, 18), name))
    settings, expected = {"test": paths[1], "features": ["x"]}, (expected * 18)[:18]
    data = ready(paths[0], client="z", num_clients=0, partition=None, **settings)
    assert data.test_owner.tolist() == expected
    grouped = ready(paths[0], group="z", **settings)
    assert grouped.num_groups == len(train) + 1
    known = {*grouped.train_group.tolist()}
    found = [group in known for group in grouped.test_group.tolist()]
    assert found == [at >= 0 for at in expected]
    (inputs, _), *_ = ready(paths[0], test=paths[1], categorical=["z"]).test_batches()
    found = [row.argmax().item() if row.any() else -1 for row in inputs[:, 1:]]
    assert found == expected


@pytest.mark.parametrize("held", [[1, 2], [1.0, 2.0], [1.0, None, 2.0], [True, False]], ids=str)
def test_whole_numbers_of_a_parquet_file_are_classes_that_are_texts(held, tmp_path):
    """The run's classes are texts, as those of a CSV file with one text among them."""
    classes = ["1", "2", "0A", "True", "False"]
    run = ready(written(tmp_path, of(classes)), target="z")
    path = written(tmp_path, of(held, 9), "node.parquet")
    node = TableData(str(path), num_clients=1, target="z", missing="drop")
    node.run_form = Form(**json.loads(json.dumps(vars(run.form()))))
    node.setup()
    known = [str(name if held[-1] is False else int(name)) for name in held if name is not None]
    expected = [sorted(classes).index(name) for name in known]
    assert node.train_target.tolist() == (expected * 9)[: len(node.train_target)]


def test_a_node_that_names_its_features_in_another_order_has_the_runs(tmp_path):
    table = of([3, 1, 2]).assign(colour=["red", "blue"] * 30)
    run = ready(written(tmp_path, table))
    names = ["colour", "z", "x"]
    node = node_of(run, tmp_path, table, target="kind", features=names)
    plain = node_of(run, tmp_path, table, target="kind")
    assert torch.equal(node._inputs["train"], plain._inputs["train"])
    assert list(node.form().columns) == list(run.form().columns)
    more = table.assign(size=1)
    with pytest.raises(InputError, match="column size; the run's table has x, z, colour"):
        node_of(run, tmp_path, more, target="kind", features=["size", *names])
