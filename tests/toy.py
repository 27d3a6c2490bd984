"""Federations small enough to be solved by hand."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning.data import FederatedData, FederatedImages, Partition
from fl_lightning.trainer import FederatedTrainer

CENTRES = torch.tensor(
    [[1.0, -2.0, 0.5], [-1.0, 4.0, 0.0], [3.0, 0.0, -1.0], [0.0, 2.0, 2.0], [5.0, 1.0, 1.0], [-3.0, -1.0, 0.0]]
)


class ByLabel(Partition):
    """Client k holds the examples labelled k."""

    def __call__(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        return [np.flatnonzero(labels == k) for k in range(num_clients)]


class Points(FederatedData):
    """Client k has ``counts[k]`` identical examples: input 1, label k."""

    example_shape = (1,)

    def __init__(self, counts: tuple[int, ...] = (3, 1)) -> None:
        super().__init__(dataset="points", num_clients=len(counts), partition=ByLabel(), batch_size=64, val_fraction=0.0)
        self.counts, self.num_classes = counts, len(counts)

    def setup(self, stage: str | None = None) -> None:
        self.train_target = torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts))
        self.test_target = torch.zeros(1, dtype=torch.int64)

    def inputs(self, split, index: Tensor, draws: Tensor | None = None) -> Tensor:
        return torch.ones(len(index), 1)


class Quadratic:
    """Mix into a method: client k's loss is ``|w - CENTRES[k]|^2 / 2``."""

    def task_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - CENTRES[target]).square().sum(dim=1).mean() / 2


def point_network(num_classes: int) -> nn.Module:
    """Three weights, returned as they are."""
    return nn.Linear(1, 3, bias=False)


def pull(weights: Tensor, counts: tuple[int, ...], cohort: list[int], least: float) -> tuple[Tensor, Tensor]:
    """Bounds of ``sum_k p_k a_k (c_k - w)``, a_k in [least, 1]: the pull on a method whose step is between ``least`` and 1 times SGD's."""
    share = torch.tensor([float(counts[k]) for k in cohort])
    full = (share / share.sum()).unsqueeze(1) * (CENTRES[cohort] - weights)
    return torch.minimum(full, least * full).sum(0), torch.maximum(full, least * full).sum(0)


def sgd(lr: float = 0.1, **settings):
    return partial(SGD, lr=lr, **settings)


def run(method, data, tmp_path, *, seed: int = 0, ckpt_path: str | None = None, **settings) -> FederatedTrainer:
    """Fit and return the trainer."""
    settings = {"participation": 1.0, "local_epochs": 2, "logger": False, "accelerator": "cpu", **settings}
    trainer = FederatedTrainer(default_root_dir=str(tmp_path), **settings)
    trainer.fit(method, data, seed=seed, ckpt_path=ckpt_path)
    return trainer


def ready(seed: int = 0, **arguments: object) -> FederatedImages:
    """A small synthetic federation, dealt out on the CPU."""
    defaults = {"dataset": "synthetic", "num_clients": 10, "synthetic_examples": 300, "synthetic_test_examples": 40}
    data = FederatedImages(**{**defaults, **arguments})  # type: ignore[arg-type]
    data.prepare_data()
    data.setup()
    data.distribute(seed, torch.device("cpu"))
    return data
