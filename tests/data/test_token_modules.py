"""Token ids of a LightningDataModule: the items of its loaders are those of TokenData."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lightning import LightningDataModule
from page_commands import documented, file_of_page
from places import DOCS
from torch.utils.data import DataLoader, Subset

from fl_lightning.__main__ import main
from fl_lightning.data import IID, DataModuleData, DataModuleTokens, TokenData
from fl_lightning.errors import InputError

PAGE = DOCS / "howto" / "token_ids.md"
ITEMS = [
    {"input_ids": [k, k + 1, k + 2], "labels": [-100, k + 1, k + 2], "site": k % 3}
    for k in range(60)
]
FALSE_ITEM = {"input_ids": [1, 2], "labels": [2, -100], "site": 0}


class Sequences(LightningDataModule):
    """Its loaders shuffle, drop and collate, none of which may be seen; it draws its split as it is
    set up."""

    items: ClassVar = ITEMS

    def setup(self, stage: str) -> None:
        order = torch.randperm(len(self.items)).tolist()
        self.parts = {
            "train": Subset(self.items, order[10:]),  # type: ignore[arg-type]
            "val": Subset(self.items, order[:10]),  # type: ignore[arg-type]
        }

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            self.parts["train"], batch_size=7, shuffle=True, drop_last=True, collate_fn=str
        )


class WithVal(Sequences):
    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(self.parts["val"])]


class WithBoth(WithVal):
    def setup(self, stage: str) -> None:
        """One validation item is a training item, and one test item is of each of the other
        splits."""
        self.parts = {
            "train": Subset(self.items, range(40)),  # type: ignore[arg-type]
            "val": Subset(self.items, range(39, 50)),  # type: ignore[arg-type]
        }

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Subset(self.items, [0, 49, *range(50, 60)]))  # type: ignore[arg-type]


class SeveralLoaders(WithBoth):
    def test_dataloader(self) -> list[DataLoader]:  # type: ignore[override]
        return [super().test_dataloader()] * 2


class FalseItem(Sequences):
    items: ClassVar = [*ITEMS[:20], FALSE_ITEM]


def ready(module, **settings) -> DataModuleTokens:
    data = DataModuleTokens(module, client="site", num_clients=0, context=8, **settings)
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    return data


def first_tokens(data: TokenData, indices) -> set[int]:
    return set(data._sequences["train"].input_ids[indices, 0].tolist())


def test_each_loader_is_a_split_and_no_item_is_in_two():
    data = ready(WithBoth)
    clients = [data.client(k) for k in range(3)]
    assert set().union(*(first_tokens(data, one.train) for one in clients)) == set(range(40))
    assert set().union(*(first_tokens(data, one.val) for one in clients)) == set(range(40, 50))
    assert set(data._sequences["test"].input_ids[:, 0].tolist()) == set(range(50, 60))
    for k, one in enumerate(clients):
        assert {token % 3 for token in first_tokens(data, [*one.train, *one.val])} == {k}
    left_out = {"test items left out": 2, "validation items left out": 1}
    assert data.text_summary.items() >= left_out.items()


def test_without_loaders_the_shares_of_token_data_are_taken():
    """The same split in every run, although the module draws it anew in each stage."""
    one, other = ready(WithVal, test_fraction=0.2), ready(WithVal, test_fraction=0.2)
    assert one.content_sha256 == other.content_sha256
    assert (len(one.train_target), len(one.test_target), int(one.val_sizes.sum())) == (50, 10, 10)
    drawn = ready(Sequences, test_fraction=0.2, val_fraction=0.25)
    assert (len(drawn.test_target), int(drawn.val_sizes.sum())) == (10, 10)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (SeveralLoaders, "data.module SeveralLoaders; its test_dataloader gives several loaders; let it return"),
        (LightningDataModule, "its train_dataloader gives no loader with a dataset"),
        (FalseItem, r"data.module FalseItem, (train|test), item \d+, label \[2\] of the token \[1\]"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(module, said):
    with pytest.raises(InputError, match=said):
        ready(module)


def test_the_other_module_of_modules_names_this_one_and_refuses_several_loaders():
    with pytest.raises(InputError, match="DataModuleTokens for a LightningDataModule"):
        DataModuleData(WithBoth, num_clients=1, task="language_modelling")
    with pytest.raises(InputError, match="its test_dataloader gives several loaders"):
        DataModuleData(SeveralLoaders, num_clients=1, partition=IID()).setup()


@pytest.mark.slow
@pytest.mark.essential
def test_the_command_of_the_page_trains_on_a_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_tokens.py", "own_token_module.py"):
        Path(name).write_text(file_of_page(name, PAGE))
    (command,) = documented("own_token_module.CountingModule", PAGE)
    few = ["--trainer.max_rounds", "8", "--trainer.eval_every", "8", "--trainer.logger", "false"]
    assert main([*command, *few]) == 0
    found = json.loads(next(Path("runs").rglob("metadata.json")).read_text())
    assert found["final/perplexity"] < 6
