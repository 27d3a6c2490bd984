"""Regression: one or several real numbers for each example."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.tasks.base import Sums, Task


class Regression(Task):
    """Outputs and targets are float32 ``[B]`` or ``[B, D]``; all examples weigh the same.

    Metrics: ``mse`` and ``mae``, the mean squared and the mean absolute error in the unit of the target, both
    over the D numbers of an example; ``loss`` is ``mse``.
    """

    primary = "mse"
    lower_is_better = frozenset({"loss", "mse", "mae"})
    per_client = ("mse", "mae")

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs.reshape(target.shape) - target).square().mean()

    def accepts(self, outputs: Any, num_outputs: int, examples: int) -> bool:
        one = num_outputs == 1 and isinstance(outputs, Tensor) and outputs.shape == (examples,)
        return one or super().accepts(outputs, num_outputs, examples)

    def examplewise(self, outputs: Tensor, target: Tensor) -> Sums:
        error = (outputs.double().reshape(target.shape) - target.double()).reshape(len(target), -1)
        squared, weight = error.square().mean(1), self.weight(target)
        return {"mse": (squared, weight), "mae": (error.abs().mean(1), weight), "loss": (squared, weight)}

    def corrupt(
        self, target: Tensor, where: np.ndarray, rng: np.random.Generator, num_outputs: int
    ) -> Tensor:
        """The targets at ``where`` change places with each other."""
        wrong = target.clone()
        wrong[torch.from_numpy(where).to(target.device)] = target[
            torch.from_numpy(rng.permutation(where)).to(target.device)
        ]
        return wrong
