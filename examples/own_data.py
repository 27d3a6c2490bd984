"""Arrays of one's own as a federated data set: a table of tumours, 30 numbers each, benign or
malignant.

    python examples/own_data.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from fl_lightning import FederatedData, FederatedTrainer
from fl_lightning.data import Dirichlet, Partition
from fl_lightning.methods import FedAvg


class Tumours(FederatedData):
    """569 tumours (scikit-learn's breast cancer table), every fifth of them in the test set."""

    num_classes = 2
    example_shape = (30,)

    def __init__(self, num_clients: int = 10, partition: Partition | None = None) -> None:
        super().__init__(
            dataset="tumours",
            num_clients=num_clients,
            partition=partition or Dirichlet(beta=0.5, min_size=4),
            batch_size=32,
            val_fraction=0.1,
        )

    def setup(self, stage: str | None = None) -> None:
        """Read the arrays; here a file of one's own would be read."""
        values, labels = load_breast_cancer(return_X_y=True)
        features = torch.as_tensor(values, dtype=torch.float32)
        target = torch.as_tensor(labels, dtype=torch.int64)
        in_test = torch.arange(len(target)) % 5 == 0
        mean, std = features[~in_test].mean(0), features[~in_test].std(0)
        features = (features - mean) / std
        self.features = {"train": features[~in_test], "test": features[in_test]}
        self.train_target, self.test_target = target[~in_test], target[in_test]

    def move(self, device: torch.device) -> None:
        super().move(device)
        self.features = {split: values.to(device) for split, values in self.features.items()}

    def inputs(self, split: str, index: Tensor, draws: Tensor | None = None) -> Tensor:
        """float32 ``[B, 30]``."""
        return self.features[split][index]


def network(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, num_classes))


def main() -> None:
    trainer = FederatedTrainer(
        max_rounds=10, participation=0.5, experiment="own_data", logger=False
    )
    result = trainer.fit(FedAvg(network=network), Tumours(), seed=0)
    print(f"FedAvg: test accuracy {result['final/accuracy']:.3f}")
    print(
        f"clients hold {trainer.data.sizes.tolist()} tumours to train on; files in {trainer.run_dir}"
    )


if __name__ == "__main__":
    main()
