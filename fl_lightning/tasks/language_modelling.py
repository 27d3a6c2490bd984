"""Language modelling: the next token, where it is labelled.

``B`` sequences of ``T`` tokens over a vocabulary of ``V``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.tasks.base import ClassRows, Sums, Task

IGNORED = -100
"""The target where no token is labelled: prompts and padding. It is torch's own ``ignore_index``."""

LARGEST_NATS = 700.0
"""Above it the exponential would not be finite."""


class LanguageModelling(Task):
    """Outputs are logits ``[B, T, V]``, targets int64 ``[B, T]``: the token that follows each position, or
    -100 where none is asked for.

    The loss of a local step is the mean over the labelled tokens of its batch. Metrics, over all labelled
    tokens: ``loss``, the cross-entropy in nats a token; ``perplexity``, its exponential; ``token_accuracy``
    of the likeliest token given the true ones before it.
    """

    primary = "perplexity"
    lower_is_better = frozenset({"loss", "perplexity"})
    shares = frozenset({"token_accuracy"})
    per_client = ("perplexity", "token_accuracy")

    has_classes = True

    def class_rows(self, outputs: Tensor, target: Tensor) -> ClassRows:
        target = target[:, : outputs.shape[1]]  # inputs may be cut where only padding follows
        labelled = target != IGNORED
        return ClassRows(outputs.flatten(0, 1), target.flatten(), labelled.flatten().to(outputs.dtype))

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        rows = self.class_rows(outputs, target)
        return rows.mean(F.cross_entropy(rows.logits, rows.target, reduction="none", ignore_index=IGNORED))

    def weight(self, target: Tensor) -> Tensor:
        return (target != IGNORED).sum(1).double()

    def examplewise(self, outputs: Tensor, target: Tensor) -> Sums:
        rows = self.class_rows(outputs, target)
        nats = F.cross_entropy(rows.logits, rows.target, reduction="none", ignore_index=IGNORED)
        hits = rows.logits.argmax(-1) == rows.target  # never of -100
        weight = self.weight(target)
        return {
            "loss": (nats.view(len(target), -1).double().sum(1), weight),
            "token_accuracy": (hits.view(len(target), -1).sum(1).double(), weight),
        }

    def finish(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**means, "perplexity": np.exp(np.minimum(means["loss"], LARGEST_NATS))}

    def accepts(self, outputs: Any, num_outputs: int, examples: int) -> bool:
        """A vocabulary may be larger than the data's: it is often rounded up."""
        is_sequence = isinstance(outputs, Tensor) and outputs.ndim == 3 and len(outputs) == examples
        return is_sequence and outputs.shape[2] >= num_outputs

    def outputs_form(self, examples: str, num_outputs: int) -> str:
        return f"logits [{examples}, T, {num_outputs}]"

    def corrupt(
        self, target: Tensor, where: np.ndarray, rng: np.random.Generator, num_outputs: int
    ) -> Tensor:
        """Each labelled token of the sequences at ``where`` becomes another one, drawn evenly."""
        wrong, index = target.clone(), torch.from_numpy(where).to(target.device)
        chosen = target[index]
        offset = torch.from_numpy(rng.integers(1, num_outputs, size=tuple(chosen.shape))).to(chosen)
        wrong[index] = torch.where(chosen != IGNORED, (chosen + offset) % num_outputs, chosen)
        return wrong
