"""Preferences: direct preference optimisation (DPO) of pairs of answers to one prompt.

    loss = - mean over pairs of log sigmoid( beta (h_chosen - h_rejected) )
    h    = log p(answer | prompt) - log p_ref(answer | prompt),     summed over the answer's tokens

p_ref is the network before training, of adapters the frozen base. Source: Rafailov et al., NeurIPS
2023, arXiv 2305.18290.

``B`` pairs, ``T`` positions, ``V`` tokens. A network of language sees the 2 B sequences of a batch,
first the B first answers, then the B second ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.config.constraints import within
from fl_lightning.metrics.text import IGNORED
from fl_lightning.tasks.base import Sums, Task

PreferencePrimary = Literal["preference_accuracy", "reward_margin", "loss"]

NAT_UNITS = 2**20
"""Log-probabilities of the reference are integers in targets, in units of 2^-20 nats: 1e-6."""
TIE = 2**-16
"""Nats, 1.5e-5, within which two answers tie: sums of float32 round below it."""


class PairTarget(NamedTuple):
    """What is asked of a batch of pairs.

    Args:
        labels: the tokens of both answers, int64 ``[2, B, T]``, and -100 elsewhere.
        reference: log p_ref of both answers in nats, float32 ``[2, B]``.
        sign: 1 where the first answer is preferred, else -1, float32 ``[B]``.
    """

    labels: Tensor
    reference: Tensor
    sign: Tensor

    @classmethod
    def of(cls, target: Tensor) -> PairTarget:
        """Return the parts of a target int64 ``[B, 2 T + 3]``."""
        length = (target.shape[1] - 3) // 2
        labels = torch.stack([target[:, :length], target[:, length : 2 * length]])
        reference = target[:, 2 * length : 2 * length + 2].T.float() / NAT_UNITS
        return cls(labels, reference, 2.0 * target[:, -1] - 1)

    @staticmethod
    def joined(labels: Tensor, reference: Tensor, first_is_preferred: Tensor) -> Tensor:
        """Return the target int64 ``[B, 2 T + 3]`` of its parts."""
        units = (reference.double() * NAT_UNITS).round().to(torch.int64).T
        return torch.cat(
            [labels[0], labels[1], units, first_is_preferred.to(torch.int64)[:, None]], 1
        )


class Preference(Task):
    """Which of two answers is preferred. Outputs are logits ``[2 B, T', V]``, targets int64
    ``[B, 2 T + 3]``.

    Metrics: ``loss``; ``preference_accuracy``, the share of pairs whose preferred answer has the
    larger h, those within 1.5e-5 nats counting half; ``reward_margin``, the mean of beta (h_chosen
    - h_rejected).

    Args:
        beta: how much a nat counts, above 0; 0.1 in the paper.
        primary: the metric that selects.
    """

    shares = frozenset({"preference_accuracy"})
    of_tokens, outputs_per_example = True, 2

    def __init__(
        self,
        beta: Annotated[float, within("(0, inf)", "a nat counts for more than 0", 0.1)] = 0.1,
        primary: PreferencePrimary = "preference_accuracy",
    ) -> None:
        self.beta, self.primary = beta, primary
        self.per_client = ("preference_accuracy", "reward_margin", "loss")

    def margins(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return beta (h_chosen - h_rejected) of each pair, ``[B]``."""
        asked = PairTarget.of(target)
        first, second = outputs.chunk(2)
        reached = [
            answer_log_probability(*pair)
            for pair in zip((first, second), asked.labels, strict=True)
        ]
        return (
            self.beta
            * asked.sign
            * ((reached[0] - asked.reference[0]) - (reached[1] - asked.reference[1]))
        )

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return -F.logsigmoid(self.margins(outputs, target)).mean()

    def examplewise(self, outputs: Tensor, target: Tensor) -> Sums:
        margins = self.margins(outputs, target).double()
        one = torch.ones_like(margins)
        tied = margins.abs() <= self.beta * TIE
        right = torch.where(tied, 0.5, (margins > 0).double())
        found = {
            "loss": -F.logsigmoid(margins),
            "preference_accuracy": right,
            "reward_margin": margins,
        }
        return {name: (values, one) for name, values in found.items()}

    def constant_guess(self, target: Tensor) -> float | None:
        return 0.5 if self.primary == "preference_accuracy" else None

    def accepts(self, outputs: Any, num_outputs: int, examples: int) -> bool:
        is_pairs = (
            isinstance(outputs, Tensor) and outputs.ndim == 3 and len(outputs) == 2 * examples
        )
        return is_pairs and outputs.shape[2] >= num_outputs

    def outputs_form(self, examples: str, num_outputs: int) -> str:
        return f"logits [2 {examples}, T, {num_outputs}]"

    def metric_inputs(self, outputs: Tensor, target: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """p(chosen) ``[B]``, and 1 for each of them: what a metric of binary decisions takes."""
        # not margins: torchmetrics takes a batch of values in [0, 1] for probabilities
        chosen = self.margins(outputs, target).double().sigmoid()
        return [(chosen.cpu(), torch.ones(len(chosen), dtype=torch.int64))]

    def metric_arguments(self, num_outputs: int) -> dict[str, Any]:
        return {"task": "binary"}

    def corrupt(
        self, target: Tensor, where: np.ndarray, rng: np.random.Generator, num_outputs: int
    ) -> Tensor:
        """At the positions ``where`` the other answer is preferred."""
        wrong = target.clone()
        index = torch.from_numpy(where).to(target.device)
        wrong[index, -1] = 1 - wrong[index, -1]
        return wrong


def answer_log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of log p over the labelled tokens of each sequence, ``[B]``.

    Args:
        logits: ``[B, T', V]``.
        labels: int64 ``[B, T]``, T at least T'; where T' ends, nothing is labelled.
    """
    labels = labels[:, : logits.shape[1]]
    logits = logits.float()  # in half precision the sum of an answer's nats is off by one
    nats = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
    return -nats.sum(1)
