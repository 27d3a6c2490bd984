"""A LightningModule and a LightningDataModule as they are, trained by FedAvg over ten clients.

To run it:

    python examples/lightning_module.py
"""

from __future__ import annotations

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedTrainer
from fl_lightning.data import DataModuleData, Dirichlet
from fl_lightning.methods import FedAvg


class Digits(L.LightningDataModule):
    """Scikit-learn's 1 797 scanned digits of 8 x 8 grey values; every fifth is a test example."""

    def setup(self, stage: str | None = None) -> None:
        pixels, digits = map(torch.as_tensor, load_digits(return_X_y=True))
        examples, held_out = pixels.float() / 16, torch.arange(len(digits)) % 5 == 0
        self.train_set = TensorDataset(examples[~held_out], digits[~held_out])
        self.test_set = TensorDataset(examples[held_out], digits[held_out])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=32, shuffle=True)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test_set, batch_size=32)


class Classifier(L.LightningModule):
    """One hidden layer, trained by SGD."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def main() -> None:
    torch.manual_seed(0)  # the weights that the module begins with
    data = DataModuleData(Digits, num_clients=10, partition=Dirichlet(beta=1.0))
    trainer = FederatedTrainer(max_rounds=20, participation=0.5, experiment="module", logger=False)
    result = trainer.fit(FedAvg(module=Classifier(lr=0.1)), data, seed=0)
    print(f"FedAvg: test accuracy {result['final/accuracy']:.3f}; files in {trainer.run_dir}")


if __name__ == "__main__":
    main()
