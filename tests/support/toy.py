"""The kit's toy federations, under one name, and what only the tests need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fl_lightning.conformance.toy import (
    CENTRES,
    Points,
    Quadratic,
    on_points,
    point_network,
    run,
    sgd,
    trainer_in,
)
from fl_lightning.data import FederatedData, FederatedImages
from fl_lightning.errors import RunStopped
from fl_lightning.methods import Method
from fl_lightning.trainer import FederatedTrainer

__all__ = [
    "CENTRES",
    "Points",
    "Quadratic",
    "on_points",
    "point_network",
    "ready",
    "run",
    "run_for_nothing",
    "sgd",
    "trainer_in",
]


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
