"""Classification: one of C classes for each example."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.tasks.base import ClassRows, Sums, Task


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
        return {
            "accuracy": ((outputs.argmax(1) == target).double(), weight),
            "loss": (F.cross_entropy(outputs.double(), target, reduction="none"), weight),
        }

    def outputs_form(self, examples: str, num_outputs: int) -> str:
        return f"logits [{examples}, {num_outputs}]"

    def corrupt(
        self, target: Tensor, where: np.ndarray, rng: np.random.Generator, num_outputs: int
    ) -> Tensor:
        offset = rng.integers(1, num_outputs, size=len(where))  # 1 .. C - 1: never the same class
        index = torch.from_numpy(where).to(target.device)
        wrong = target.clone()
        wrong[index] = (target[index] + torch.from_numpy(offset).to(target)) % num_outputs
        return wrong
