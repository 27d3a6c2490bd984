"""Federations small enough to be solved by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning.data import FederatedData, FederatedImages, Partition
from fl_lightning.methods import Method
from fl_lightning.models import SmallCNN
from fl_lightning.trainer import FederatedTrainer

CENTRES = torch.tensor(
    [
        [1.0, -2.0, 0.5, 0.0, 1.5, -0.5],
        [-1.0, 4.0, 0.0, 2.0, -1.5, 0.5],
        [3.0, 0.0, -1.0, 1.0, 0.0, 1.0],
        [0.0, 2.0, 2.0, -1.0, 1.0, -2.0],
        [5.0, 1.0, 1.0, 0.5, -1.0, 0.0],
        [-3.0, -1.0, 0.0, 3.0, 2.0, 1.0],
    ]
)
"""The optimum of each of six clients, in R^6."""

LR = 0.1
"""Learning rate of the local steps on points."""


class Sizes(Partition):
    """Client k holds ``sizes[k]`` examples, the last one what is left."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __call__(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        return np.split(np.arange(len(labels)), np.cumsum(self.sizes))


class Points(FederatedData):
    """At most six clients, where client k has ``counts[k]`` identical examples: input 1, label
    ``labels[k]``.

    The public set holds the input 1.

    Args:
        counts: number of examples of each client.
        labels: row of each client in ``CENTRES``; None: its own id.
        public: number of public examples.
        batch_size: examples of a local step.
    """

    example_shape = (1,)
    num_classes = len(CENTRES)

    def __init__(
        self,
        counts: tuple[int, ...] = (3, 1),
        labels: tuple[int, ...] | None = None,
        public: int = 0,
        batch_size: int = 64,
    ) -> None:
        parts = Sizes(*counts[:-1])
        super().__init__(
            dataset="points",
            num_clients=len(counts),
            partition=parts,
            batch_size=batch_size,
            val_fraction=0.0,
        )
        self.counts, self.client_labels = counts, labels or tuple(range(len(counts)))
        self.public_size = public

    def setup(self, stage: str | None = None) -> None:
        self.train_target = torch.repeat_interleave(
            torch.tensor(self.client_labels), torch.tensor(self.counts)
        )
        self.test_target = torch.zeros(1, dtype=torch.int64)

    def distribute(self, seed: int, device: torch.device) -> None:
        super().distribute(seed, device)
        self.public = np.arange(self.public_size)

    def inputs(self, split: str, index: Tensor, draws: Tensor | None = None) -> Tensor:
        return torch.ones(len(index), 1)

    def public_inputs(self, position: Tensor) -> Tensor:
        return torch.ones(len(position), 1)


def images(**settings: Any) -> FederatedImages:
    """Return a data set of six clients with a few small images each, and a public set."""
    defaults = {
        "dataset": "synthetic",
        "num_clients": 6,
        "partition": Sizes(30, 20, 40, 1, 25),
        "batch_size": 16,
        "public_examples": 16,
        "synthetic_examples": 180,
        "synthetic_test_examples": 40,
        "synthetic_size": 16,
        "synthetic_classes": 4,
    }
    return FederatedImages(**{**defaults, **settings})


def point_network(num_classes: int) -> nn.Module:
    """Return a network whose output for the input 1 is its weights."""
    return nn.Linear(1, num_classes, bias=False)


def small_network(num_classes: int) -> nn.Module:
    """Return a small CNN with BatchNorm."""
    return SmallCNN(num_classes, norm="batch", width=4)


def small_group_network(num_classes: int) -> nn.Module:
    """Return a small CNN whose normalisation keeps no statistics."""
    return SmallCNN(num_classes, width=4)


class Quadratic:
    """The loss ``|w - CENTRES[label]|^2 / 2``, mean over the batch, in place of ``task_loss``.

    ``calls`` counts how often it was computed.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return (outputs - CENTRES[target]).square().sum(dim=1).mean() / 2


def on_points(method: Method) -> Method:
    """Set up the method for the quadratic: ``task_loss`` of client k becomes ``|w - c_k|^2 /
    2``."""
    method.network_spec = point_network
    method.optimizer_spec = sgd(LR)
    method.task_loss = Quadratic()  # type: ignore[method-assign]
    return method


def on_images(method: Method) -> Method:
    method.network_spec = small_network
    method.optimizer_spec = sgd(0.05)
    return method


def pull(
    weights: Tensor, counts: Sequence[int], cohort: Sequence[int], least: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the bounds of ``sum_k p_k a_k (c_k - w)`` for a_k in [least, 1], each ``[6]``.

    This is the pull on a method whose local step is between ``least`` and 1 times a step of SGD.
    """
    share = torch.tensor([float(counts[k]) for k in cohort])
    full = (share / share.sum()).unsqueeze(1) * (CENTRES[list(cohort)] - weights)
    return torch.minimum(full, least * full).sum(0), torch.maximum(full, least * full).sum(0)


def sgd(lr: float = 0.1, **settings: Any) -> Callable[[Any], SGD]:
    return partial(SGD, lr=lr, **settings)


def trainer_in(folder: Path | str, **settings: Any) -> FederatedTrainer:
    """Return a trainer without a tracking store that writes to ``folder`` and samples every
    client."""
    settings = {
        "participation": 1.0,
        "local_epochs": 2,
        "logger": False,
        "accelerator": "cpu",
        **settings,
    }
    return FederatedTrainer(default_root_dir=str(folder), **settings)


def run(
    method: Method,
    data: FederatedData,
    folder: Path | str,
    *,
    seed: int = 0,
    ckpt_path: str | None = None,
    **settings: Any,
) -> FederatedTrainer:
    """Fit without a tracking store and return the trainer."""
    trainer = trainer_in(folder, **settings)
    trainer.fit(method, data, seed=seed, ckpt_path=ckpt_path)
    return trainer
