"""A LightningModule that knows nothing of us trains as a FedAvg client."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from toy import ready, run, sgd

from fl_lightning import rng
from fl_lightning.__main__ import main
from fl_lightning.methods import FedAvg, FedMPQ

PLAIN = """
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

class LitClassifier(LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10)}
"""


class Lit(LightningModule):
    def __init__(self, outputs: int = 10) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, outputs))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return {"loss": loss, "extra": 1}

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.05)]


def seeded(make, *arguments):
    with rng.torch_stream(0, "weights"):
        return make(*arguments)


def test_it_is_fedavg_of_the_same_network(tmp_path):
    wrapped = FedAvg(module=seeded(Lit))
    plain = FedAvg(network=lambda classes: seeded(Lit).net, optimizer=sgd(0.05))
    for method in (wrapped, plain):
        run(method, ready(), tmp_path, max_rounds=3, participation=0.5)
    assert torch.equal(wrapped.server["weights"], plain.server["weights"])


def test_from_the_command_line(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("plain_lit.py").write_text(PLAIN)
    config = str(Path(__file__).parent.parent / "configs" / "fedavg.yaml")
    flags = [
        "--model.module",
        "plain_lit.LitClassifier",
        "--model.module.width",
        "4",
        "--trainer.max_rounds",
        "2",
        "--trainer.logger",
        "false",
    ]
    hashes = []
    for poison in (1, 2):
        torch.manual_seed(poison)
        assert main(["fit", "--config", config, *flags]) == 0
        newest = max(Path("runs/fedavg").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        hashes.append((newest / "metadata.json").read_text().split('"weights_sha256": "')[1][:64])
    assert "learning-rate scheduler is left out" in caplog.text
    assert hashes[0] == hashes[1]  # its initial weights follow from the seed too


def test_what_cannot_work_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"makes \(2, 7\) of two examples; logits \[2, 10\]"):
        run(FedAvg(module=Lit(7)), ready(), tmp_path, max_rounds=1)
    with pytest.raises(ValueError, match="write --model FedMPQ"):
        FedAvg(module=FedMPQ())
