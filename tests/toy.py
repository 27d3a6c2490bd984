"""The kit's toy federations in R^3, and what only the tests need."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.conformance import toy
from fl_lightning.conformance.toy import run, sgd, trainer_in
from fl_lightning.data import FederatedData, FederatedImages
from fl_lightning.errors import RunStopped
from fl_lightning.methods import Method
from fl_lightning.trainer import FederatedTrainer

__all__ = [
    "CENTRES",
    "Points",
    "Quadratic",
    "point_network",
    "pull",
    "ready",
    "run",
    "run_for_nothing",
    "sgd",
]

CENTRES = toy.CENTRES[:, :3]
pull = partial(toy.pull, centres=CENTRES)


class Points(toy.Points):
    """Client k has ``counts[k]`` identical examples: input 1, label k. As many classes as clients."""

    def __init__(self, counts: tuple[int, ...] = (3, 1)) -> None:
        super().__init__(counts)
        self.num_classes = len(counts)


class Quadratic:
    """Mix into a method: client k's loss is ``|w - CENTRES[k]|^2 / 2``."""

    logits = False

    def task_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - CENTRES[target]).square().sum(dim=1).mean() / 2


def point_network(num_classes: int) -> nn.Module:
    """Three weights, returned as they are."""
    return nn.Linear(1, 3, bias=False)


def ready(seed: int = 0, **arguments: object) -> FederatedImages:
    """A small synthetic federation, dealt out on the CPU."""
    defaults = {
        "dataset": "synthetic",
        "num_clients": 10,
        "synthetic_examples": 300,
        "synthetic_test_examples": 40,
    }
    data = FederatedImages(**{**defaults, **arguments})  # type: ignore[arg-type]
    data.prepare_data()
    data.setup()
    data.distribute(seed, torch.device("cpu"))
    return data


def run_for_nothing(
    method: Method, data: FederatedData, folder: Path, **settings: object
) -> FederatedTrainer:
    """Fit where no upload ever counts, which is an error; the trainer."""
    trainer = trainer_in(folder, **settings)
    with pytest.raises(RunStopped, match="was ever counted"):
        trainer.fit(method, data)
    return trainer
