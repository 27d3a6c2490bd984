"""Data sets of Hugging Face from disk: saved, as Parquet, with images, and refused in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from page_commands import documented
from PIL import Image

from fl_lightning.__main__ import main
from fl_lightning.data import IID, HuggingFaceData
from fl_lightning.errors import InputError


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The library, whose cache is the test's and which may not reach the network."""
    found = pytest.importorskip("datasets", reason="pip install -e '.[datasets]'")
    monkeypatch.setattr(found.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(found.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return found


def ready(path: Path | str, **settings) -> HuggingFaceData:
    data = HuggingFaceData(str(path), **{"num_clients": 3, "partition": IID(), **settings})
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    return data


def rows(n: int = 40) -> dict[str, list]:
    """Three measures of a species, the first of which tells it."""
    kinds = [i % 3 for i in range(n)]
    return {
        "measures": [[float(kind), 0.1 * i % 1, 0.5] for i, kind in enumerate(kinds)],
        "species": [["setosa", "versicolor", "virginica"][kind] for kind in kinds],
        "garden": [f"garden {i % 4}" for i in range(n)],
    }


def test_saved_splits_with_clients_by_a_column(tmp_path, datasets):
    splits = {
        "train": datasets.Dataset.from_dict(rows()),
        "test": datasets.Dataset.from_dict(rows(12)),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "flowers")
    data = ready(
        tmp_path / "flowers",
        test="test",
        target="species",
        client="garden",
        num_clients=0,
        partition=None,
    )
    assert data.names.classes == ["setosa", "versicolor", "virginica"]
    assert torch.equal(data.inputs("train", torch.arange(40)), torch.tensor(rows()["measures"]))
    assert data.train_target.tolist() == [i % 3 for i in range(40)]
    assert len(data.test_target) == 12
    for id in range(4):
        held = [*data.client(id).train, *data.client(id).val]
        assert len(held) == 10
        assert {i % 4 for i in held} == {id}


def test_a_test_split_need_not_say_whose_a_row_is(tmp_path, datasets):
    """A misspelt column is refused by the training split."""
    both, other = datasets.Dataset.from_dict(rows()), datasets.Dataset.from_dict(rows(12))
    splits = {"train": both, "test": other.remove_columns("garden")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "flowers")
    settings = {"test": "test", "target": "species", "num_clients": 0, "partition": None}
    data = ready(tmp_path / "flowers", client="garden", **settings)
    assert data.num_clients == 4
    assert data.test_owner is None
    assert data.test_target.tolist() == [i % 3 for i in range(12)]
    assert data.inputs("test", torch.arange(12)).shape == (12, 3)
    with pytest.raises(InputError, match="there is no column gardn; write garden"):
        ready(tmp_path / "flowers", client="gardn", **settings)
    with pytest.raises(InputError, match="flowers, test; there is no column garden"):
        ready(tmp_path / "flowers", group="garden", **settings | {"num_clients": 3})


def test_a_class_is_its_name_where_the_test_split_numbers_them_in_another_order(tmp_path, datasets):
    def split(names: list[str], count: int):
        features = datasets.Features(
            {"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=names)}
        )
        kinds = [i % 2 for i in range(count)]
        given = {"x": [float(names[kind] == "dog") for kind in kinds], "label": kinds}
        return datasets.Dataset.from_dict(given, features=features)

    splits = {"train": split(["dog", "cat"], 40), "test": split(["cat", "dog"], 8)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "pets")
    data = ready(tmp_path / "pets", test="test")
    assert data.names.classes == ["cat", "dog"]
    assert data.train_target.tolist() == data.inputs("train", torch.arange(40)).flatten().tolist()
    assert data.test_target.tolist() == data.inputs("test", torch.arange(8)).flatten().tolist()


def test_a_name_of_a_split_that_is_another_one_is_refused(tmp_path, datasets):
    with pytest.raises(InputError, match="train=train, test=train; a test split has other rows"):
        HuggingFaceData("flowers", test="train")
    datasets.Dataset.from_dict(rows(), split="validation").save_to_disk(tmp_path / "one")
    ready(tmp_path / "one", target="species", input="measures")
    ready(tmp_path / "one", target="species", input="measures", train="validation")
    with pytest.raises(
        InputError, match=r"train=nonsense; .* is the split validation; write validation"
    ):
        ready(tmp_path / "one", target="species", input="measures", train="nonsense")


def test_images_and_the_names_of_classes(tmp_path, datasets):
    images = [Image.fromarray(np.full((8, 8, 3), 20 * i, np.uint8)) for i in range(10)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["zebra", "ape"])}
    )
    made = datasets.Dataset.from_dict(
        {"image": images, "label": [i % 2 for i in range(10)]}, features=features
    )
    made.save_to_disk(tmp_path / "animals")
    data = ready(tmp_path / "animals", test_fraction=0.4)
    assert data.example_shape == (3, 8, 8)
    assert data._inputs["train"].dtype == torch.uint8
    assert data.names.classes == ["zebra", "ape"]
    assert len(data.train_target) == 6


def test_parquet(tmp_path, datasets):
    datasets.Dataset.from_dict(rows()).to_parquet(tmp_path / "flowers.parquet")
    data = ready(tmp_path / "flowers.parquet", target="species", input="measures")
    assert data.num_classes == 3
    assert data.dataset == "flowers"
    inputs = data.inputs("train", torch.arange(len(data.train_target)))
    assert torch.equal(inputs[:, 0].long(), data.train_target)


def test_mistakes_are_one_line(tmp_path, datasets):
    made = datasets.Dataset.from_dict(rows())
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "splits")
    (tmp_path / "rows.txt").write_text("1 2")
    kinds = datasets.Features(
        {"x": datasets.Value("float32"), "kind": datasets.ClassLabel(names=["a", "b"])}
    )
    some = {"x": [float(i) for i in range(30)], "kind": [0, 1, -1] * 10}
    datasets.Dataset.from_dict(some, features=kinds).save_to_disk(tmp_path / "unlabelled")
    for path, settings, words in (
        ("one", {}, "there is no column label; write one of measures, species, garden"),
        ("one", {"target": "specie"}, "there is no column specie; write species"),
        ("one", {"target": "species", "input": "height"}, "there is no column height"),
        ("one", {"target": "species", "client": "plot"}, "there is no column plot"),
        ("one", {"target": "species"}, "train, item 0; an input is a tensor, an array, an image or numbers"),
        ("unlabelled", {"target": "kind"}, "labels -1 are none of the 2 classes; leave out rows without"),
        ("one", {"target": "species", "test": "test"}, "has a single split; leave test out"),
        ("splits", {"target": "species", "test": "tests"}, "split tests; .* has no such split; write train|write one of train"),
        ("rows.txt", {}, r"a file is one of \.parquet, \.csv"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words) as error:
            ready(tmp_path / path, **settings)
        assert "\n" not in str(error.value)


def test_a_name_that_cannot_be_reached_is_one_line(datasets, monkeypatch):
    def no_network(*arguments: object, **settings: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(InputError, match=r"it cannot be loaded \(no route to host\)"):
        ready("mnist")


def test_without_the_library_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"fl_lightning\[datasets\]"):
        ready("mnist")


@pytest.mark.slow
@pytest.mark.essential
def test_a_saved_data_set_is_trained_by_the_documented_command(tmp_path, monkeypatch, datasets):
    monkeypatch.chdir(tmp_path)
    splits = {
        "train": datasets.Dataset.from_dict(rows(300)),
        "test": datasets.Dataset.from_dict(rows(60)),
    }
    datasets.DatasetDict(splits).save_to_disk("flowers")
    (command,) = documented("HuggingFaceData")
    assert main([*command, "--trainer.max_rounds", "20", "--trainer.logger", "false"]) == 0
    (found,) = Path("runs").rglob("metadata.json")
    assert json.loads(found.read_text())["final/accuracy"] > 0.8
