"""Regression: one or several real numbers for each example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.tasks.base import Sums, Task


class Regression(Task):
    """Outputs and targets are float32 ``[B]`` or ``[B, D]``; all examples weigh the same.

    Metrics: ``mse`` and ``mae``, the mean squared and the mean absolute error in the unit of the
    target, both over the D numbers of an example; ``loss`` is ``mse``.
    """

    primary = "mse"
    lower_is_better = frozenset({"loss", "mse", "mae"})
    per_client = ("mse", "mae")

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs.reshape(target.shape) - target).square().mean()

    def constant_guess(self, target: Tensor) -> float | None:
        if not len(target) or self.primary not in ("mse", "mae", "loss"):
            return None
        each = target.cpu().double().reshape(len(target), -1)
        if self.primary == "mae":
            return float((each - each.median(0).values).abs().mean())
        return float((each - each.mean(0)).square().mean())

    def accepts(self, outputs: Any, num_outputs: int, examples: int) -> bool:
        one = num_outputs == 1 and isinstance(outputs, Tensor) and outputs.shape == (examples,)
        return one or super().accepts(outputs, num_outputs, examples)

    def examplewise(self, outputs: Tensor, target: Tensor) -> Sums:
        from torchmetrics.functional.regression import mean_absolute_error, mean_squared_error

        B, weight = len(target), self.weight(target)
        # an example is an output of several, so that each gets a mean of its own
        y, true = (part.double().reshape(B, -1).T for part in (outputs, target))
        squared = mean_squared_error(y, true, num_outputs=B).reshape(B)
        absolute = mean_absolute_error(y, true, num_outputs=B).reshape(B)
        return {"mse": (squared, weight), "mae": (absolute, weight), "loss": (squared, weight)}

    metric_form = "predictions and targets [n], or [n, D]"

    def metric_inputs(self, outputs: Tensor, target: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Predictions and targets float64 ``[B]``, or ``[B, D]`` where there are several numbers: a
        mean that is large beside the spread leaves R2 no digits in float32."""
        shape = target.shape[:1] if target[:1].numel() == 1 else target.shape
        y, true = (part.reshape(shape).cpu().double() for part in (outputs, target))
        return [(y, true)]

    def corrupt(
        self, target: Tensor, where: np.ndarray, rng: np.random.Generator, num_outputs: int
    ) -> Tensor:
        """The targets at ``where`` change places with each other, and none keeps its own; a single
        one becomes that of another example of the client."""
        to = torch.from_numpy(rng.permutation(where)).to(target.device)
        source, wrong = to.roll(1), target.clone()
        if len(where) == 1 and len(target) > 1:
            source = (to + int(rng.integers(1, len(target)))) % len(target)
        wrong[to] = target[source]
        return wrong
