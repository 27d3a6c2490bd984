"""A run that a script has trained is tested and exported from the command line."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch

from fl_lightning.__main__ import main
from fl_lightning.conformance.toy import trainer_in
from fl_lightning.data import IID, DataModuleData, FederatedImages
from fl_lightning.methods import FedAvg

OWN = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def examples(count):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()))


class Points(LightningDataModule):
    def __init__(self, size: int = 60):
        super().__init__()
        self.size = size

    def train_dataloader(self):
        return examples(self.size)

    def test_dataloader(self):
        return examples(30)


class Net(LightningModule):
    def __init__(self, backbone: bool = False):
        super().__init__()
        self.save_hyperparameters()
        self.backbone, self.layer = nn.Linear(6, 6).requires_grad_(not backbone), nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(self.backbone(x))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train in an empty folder, and return the name of the run's directory."""
    (tmp_path / "points_of_a_script.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    own = importlib.import_module("points_of_a_script")

    def run(built: bool, backbone: bool) -> str:
        torch.manual_seed(1)
        trainer = trainer_in("runs", max_rounds=1)
        points = own.Points() if built else own.Points
        trainer.fit(FedAvg(module=own.Net(backbone)), DataModuleData(points, num_clients=3), seed=0)
        torch.manual_seed(2)
        return str(trainer.run_dir)

    return run


def test_the_class_of_a_data_module_is_itself_with_its_defaults(train, capsys):
    run = train(False, False)
    assert main(["test", run, "--probes", "clean"]) == 0
    assert main(["export", run, "--to", "out"]) == 0
    capsys.readouterr()
    assert main(["test", run, "--probes", "clean", "--data.module.size", "50"]) == 2
    assert "data.init_args.module.init_args.size: 60 -> 50" in capsys.readouterr().err


def test_an_optimizer_is_itself_by_either_path_and_with_its_defaults(tmp_path, monkeypatch, capsys):
    """A script's is ``torch.optim.sgd.SGD`` and what it was given, the command line's
    ``torch.optim.SGD`` and all that it takes."""
    monkeypatch.chdir(tmp_path)
    trainer, optimizer = trainer_in("runs", max_rounds=1), partial(torch.optim.SGD, lr=0.1)
    data = FederatedImages("digits", num_clients=3, partition=IID(), batch_size=32)
    trainer.fit(FedAvg(network="mlp", optimizer=optimizer), data, seed=0)
    run = str(trainer.run_dir)
    assert main(["test", run, "--probes", "clean"]) == 0
    assert main(["export", run, "--to", "out"]) == 0
    capsys.readouterr()
    assert main(["test", run, "--probes", "clean", "--model.optimizer.momentum", "0.5"]) == 2
    assert "model.init_args.optimizer.init_args.momentum: 0 -> 0.5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("built", "backbone", "says"),
    [
        (True, False, "its module was an object whose arguments are not known (points_of_a_script"),
        (False, True, "give the data, the files and the network of then"),
    ],
)
def test_what_the_run_does_not_know_is_said(built, backbone, says, train, capsys):
    assert main(["export", train(built, backbone), "--to", "out"]) == 2
    assert says in capsys.readouterr().err
