"""What the card of an export says of the network that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import fl_lightning
from fl_lightning.conformance.toy import images, run
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
