"""What the card of an export says of the network that was trained, and of what its outputs are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import fl_lightning
from fl_lightning.conformance.toy import images, run
from fl_lightning.data import TableData
from fl_lightning.methods import FedAvg


class Lit(LightningModule):
    def __init__(self, width: int, noted: bool) -> None:
        super().__init__()
        if noted:
            self.save_hyperparameters("width")
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(768, width), nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, _: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("noted", [True, False])
def test_the_base_of_a_module_is_the_module(noted: bool, tmp_path: Path):
    trainer = run(FedAvg(module=Lit(5, noted)), images(), tmp_path, max_rounds=1, workers=1)
    folder = fl_lightning.export_model(trainer, tmp_path / "home")
    path, base = f"{Lit.__module__}.Lit", json.loads((folder / "export.json").read_text())["base"]
    assert f"**Base.** `{path}`." in (folder / "README.md").read_text()
    if noted:
        assert (base["class_path"], base["init_args"]["width"]) == (path, 5)
    else:
        assert base == path


@pytest.mark.parametrize("standardised", [True, False])
def test_outputs_of_a_regression_become_values_of_its_target(standardised: bool, tmp_path: Path):
    """As export.json says; the target is none of the columns that the network sees."""
    x = np.random.default_rng(0).normal(size=60)
    price = 3 + 2 * x
    pd.DataFrame({"x": x, "price": price}).to_csv(tmp_path / "t.csv", index=False)
    data = TableData(
        str(tmp_path / "t.csv"),
        target="price",
        task="regression",
        num_clients=2,
        batch_size=8,
        standardise_target=standardised,
    )
    trainer = run(FedAvg(network="mlp"), data, tmp_path / "runs", max_rounds=1, workers=1)
    folder = fl_lightning.export_model(trainer, tmp_path / "home")
    about, card = json.loads((folder / "export.json").read_text()), folder / "README.md"
    assert [*about["columns"]] == ["x"]
    target = about["target"]
    assert f"the column `price` is an output times {target['std']}, plus {target['mean']}" in (
        card.read_text()
    )
    assert (target["std"] == 1) != standardised
    values = data.test_target * target["std"] + target["mean"]
    assert all(float((torch.tensor(price) - value).abs().min()) < 1e-5 for value in values)
