"""Classification: one of C classes for each example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.tasks.base import ClassRows, Sums, Task, likeliest


class Classification(Task):
    """Outputs are logits ``[B, C]``, targets classes int64 ``[B]``; all examples weigh the same.

    Metrics: ``accuracy`` in [0, 1] and ``loss``, the cross-entropy in nats.
    """

    primary = "accuracy"
    shares = hits = frozenset({"accuracy"})
    per_client = ("accuracy",)

    has_classes = True

    def class_rows(self, outputs: Tensor, target: Tensor) -> ClassRows:
        return ClassRows(outputs, target, None)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(outputs, target)

    def examplewise(self, outputs: Tensor, target: Tensor) -> Sums:
        weight = self.weight(target)
        # the likeliest class of outputs that are not numbers would be class 0
        right = (outputs.argmax(1) == likeliest(target)) & outputs.isfinite().all(1)
        return {
            "accuracy": (right.double(), weight),
            "loss": (F.cross_entropy(outputs.double(), target, reduction="none"), weight),
        }

    metric_form = "probabilities [n, C] and classes [n]"

    def metric_inputs(self, outputs: Tensor, target: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Probabilities float32 ``[B, C]`` and classes ``[B]``; of two classes also those of class
        1, ``[B]``, for binary metrics."""
        probs, classes = outputs.softmax(1).cpu(), likeliest(target).cpu()
        return [(probs, classes), *([(probs[:, 1], classes)] if probs.shape[1] == 2 else [])]

    def metric_arguments(self, num_outputs: int) -> dict[str, Any]:
        return {**super().metric_arguments(num_outputs), "task": "multiclass"}

    def constant_guess(self, target: Tensor) -> float | None:
        has_classes = target.ndim == 1 and not target.is_floating_point()
        if self.primary != "accuracy" or not has_classes or not len(target):
            return None
        return float(np.unique(target.cpu().numpy(), return_counts=True)[1].max() / len(target))

    def outputs_form(self, examples: str, num_outputs: int) -> str:
        return f"logits [{examples}, {num_outputs}]"

    def corrupt(
        self, target: Tensor, where: np.ndarray, rng: np.random.Generator, num_outputs: int
    ) -> Tensor:
        offset = rng.integers(1, num_outputs, size=len(where))  # 1 .. C - 1: never the same class
        index, wrong = torch.from_numpy(where).to(target.device), target.clone()
        if target.is_floating_point():  # shares of the classes, as a stressor made them
            moved = torch.arange(num_outputs) - torch.from_numpy(offset).unsqueeze(1)
            wrong[index] = target[index].gather(1, (moved % num_outputs).to(target.device))
            return wrong
        wrong[index] = (target[index] + torch.from_numpy(offset).to(target)) % num_outputs
        return wrong
