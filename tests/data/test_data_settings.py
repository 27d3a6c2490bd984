"""Settings that several data classes share are written once, and every class still has the same
ones: they are flags, and the hash of a run covers them."""

from __future__ import annotations

from functools import partial

import pytest
from torchvision.datasets import FakeData

from fl_lightning import data
from fl_lightning.__main__ import main
from fl_lightning.cli.types import settings_of
from fl_lightning.config.recorded import describe
from fl_lightning.config.settings import flatten, settings_hash
from fl_lightning.data import DatasetData, FederatedImages, TableData, TextFiles
from fl_lightning.data.text.prompts import PLAIN

IN_MEMORY = {
    "test_fraction": 0.2,
    "task": "classification",
    "num_clients": 0,
    "partition": None,
    "batch_size": 32,
    "val_fraction": 0.1,
    "public_examples": 0,
}
ITEMS = {**IN_MEMORY, "input": None, "target": None, "group": None, "client": None}
IMAGES = {
    "partition": None,
    "batch_size": 64,
    "crop": "none",
    "crop_padding": 4,
    "crop_size": 28,
    "flip": False,
    "public_examples": 0,
}
TEXT = {
    "partition": None,
    "batch_size": 16,
    "val_fraction": 0.1,
    "public_examples": 0,
    "tokenizer": None,
}
SETTINGS = {
    "TableData": {
        **IN_MEMORY,
        **dict.fromkeys(("train", "target", "test", "features", "categorical", "group", "client")),
        "standardise_target": True,
    },
    "DatasetData": {**ITEMS, "train": None, "test": None},
    "DataModuleData": {**ITEMS, "module": None},
    "LeafData": {**IN_MEMORY, "train": None, "test": None, "images": False},
    "HuggingFaceData": {
        **ITEMS,
        "path": None,
        "name": None,
        "train": "train",
        "test": None,
        "target": "label",
    },
    "LabelledText": {
        **{key: value for key, value in ITEMS.items() if key != "input"},
        **dict.fromkeys(("path", "tokenizer", "name", "test")),
        "text": "text",
        "target": "label",
        "max_length": 128,
        "train": "train",
    },
    "ImageFolder": {
        **IMAGES,
        "train": None,
        "test": None,
        "test_fraction": 0.2,
        "client_folders": False,
        "size": 32,
        "num_clients": 0,
        "val_fraction": 0.1,
    },
    "FederatedImages": {
        **IMAGES,
        "dataset": "digits",
        "root": "data",
        "download": False,
        "num_clients": 100,
        "val_fraction": 0.05,
        "public_dataset": None,
        "synthetic_examples": 5000,
        "synthetic_test_examples": 1000,
        "synthetic_size": 32,
        "synthetic_classes": 10,
        "synthetic_seed": 0,
    },
    "InstructionData": {
        **TEXT,
        "num_clients": 8,
        "examples_per_client": 400,
        "house": 0.25,
        "tests_per_task": 24,
        "context": 72,
        "generate": True,
        "primary": "perplexity",
        "text_seed": 0,
    },
    "TextFiles": {
        **TEXT,
        "train": None,
        "test": None,
        "test_fraction": 0.1,
        "client": None,
        "group": "task_name",
        "num_clients": 0,
        "context": 128,
        "too_long": "refuse",
    },
    "NaturalInstructions": {
        **TEXT,
        **dict.fromkeys(("path", "name", "test", "categories", "max_examples", "batch_tokens")),
        **dict.fromkeys(("columns", "constants")),
        "train": "train",
        "test_fraction": 0.1,
        "num_clients": 8,
        "context": 512,
        "too_long": "cut",
        "generate": True,
        "primary": "perplexity",
    },
    "CorpusData": {
        **TEXT,
        "corpus": "packages",
        "packages": ("numpy", "pandas", "scipy", "sklearn"),
        "max_characters": 100_000,
        "min_characters": 0,
        "num_clients": 0,
        "test_fraction": 0.1,
        "context": 128,
        "batch_tokens": None,
        "primary": "perplexity",
    },
    "TwoClients": {"examples": 64, "noise": 0.3, "batch_size": 8, "val_fraction": 0.5},
}
OF_IMAGES = {
    "feature_skew": None,
    "local_test_fraction": 0.0,
    "moments": None,
    "metrics": None,
    "primary": None,
}
LATER = {
    name: {"metrics": None} if "primary" in had else {"metrics": None, "primary": None}
    for name, had in SETTINGS.items()
    if name != "TwoClients"
} | {
    "InstructionData": {"batch_tokens": None, "metrics": None},
    "TextFiles": {
        "batch_tokens": None,
        "generate": False,
        "primary": "perplexity",
        "metrics": None,
        "columns": None,
        "constants": None,
        "template": PLAIN,
    },
    "NaturalInstructions": {"metrics": None, "template": PLAIN},
    "TableData": {"missing": None, "text": None, "metrics": None, "primary": None},
    "ImageFolder": OF_IMAGES,
    "FederatedImages": {"channels": 3, **OF_IMAGES},
}
"""Settings that a class has got since; at these values they are in no hash."""


@pytest.mark.parametrize("name", SETTINGS)
def test_a_data_class_has_the_settings_that_it_had_and_explains_each(name, capsys):
    found = {key: action.default for key, action in settings_of(getattr(data, name)).items()}
    assert found == SETTINGS[name] | LATER.get(name, {})
    main(["fit", "--data.help", name])
    lines = capsys.readouterr().out.splitlines()
    for key in found:
        (at,) = [
            number for number, line in enumerate(lines) if line.startswith(f"  --data.{key}  ")
        ]
        assert lines[at + 1].startswith("      "), f"{key} is not explained"


def test_a_run_made_in_python_records_the_same_arguments_and_no_others():
    made = {
        "TableData": TableData("a.csv", "y", client="c", batch_size=4),
        "DatasetData": DatasetData(partial(FakeData, size=10), num_clients=2, task="regression"),
        "FederatedImages": FederatedImages("digits", flip=True),
        "TextFiles": TextFiles("text", num_clients=2, context=30),
    }
    for name, one in made.items():
        assert set(describe(one)["init_args"]) == {*SETTINGS[name], *LATER.get(name, {})}


@pytest.mark.parametrize("name", LATER)
def test_later_settings_are_in_no_hash_while_they_are_neutral(name):
    before = flatten(
        {"data": {"class_path": f"fl_lightning.data.{name}", "init_args": {"train": "x"}}}
    )
    later = {f"data.init_args.{key}": value for key, value in LATER[name].items()}
    assert settings_hash(before) == settings_hash(before | later)
    for key in later:
        assert settings_hash(before | later | {key: "other"}) != settings_hash(before)
    always = {"data.class_path": "fl_lightning.data.InstructionData"}
    assert settings_hash(always) != settings_hash(always | {"data.init_args.generate": False})
