"""Where a method is known to go on the quadratic, worked out without it.

Client k of ``counts[k]`` examples minimises |w - c_k|^2 / 2 by plain gradient steps of ``LR``; the deployed
model answers w.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.conformance.references import sharpened
from fl_lightning.conformance.toy import CENTRES, LR, pull
from fl_lightning.conformance.verdicts import NotApplicable, require, show


@dataclass(frozen=True)
class Walk:
    """A method's run on the quadratic.

    Args:
        method: its settings and what it declares, read by name.
        start, end: answers of the deployed model before and after, float32 ``[6]``; of a personalised method
            one for each client.
        counts: examples of each client.
        cohorts: clients of each round.
        epochs: local steps of a client in a round.
        noise: largest deviation that rounding may cause.
    """

    method: Any
    start: Sequence[Tensor]
    end: Sequence[Tensor]
    counts: Sequence[int]
    cohorts: Sequence[Sequence[int]]
    epochs: int
    noise: float

    @property
    def weights(self) -> Sequence[int]:
        """What each client counts for: its examples, or 1 where the method declares that clients count
        alike."""
        return [1] * len(self.counts) if self.method.uniform_clients else self.counts


class Expectation(ABC):
    @abstractmethod
    def settled(self, walk: Walk) -> None:
        """After many rounds of everyone.

        Raises:
            Violation: it is not where it is known to end.
        """

    @abstractmethod
    def stepped(self, walk: Walk) -> None:
        """After one round with one local step.

        Raises:
            Violation: it is not where such a step is known to lead.
        """


class Averages(Expectation):
    """The mean of the clients' weights, n_k each or alike, as declared: the known optimum is where nothing
    pulls.

    Of a method that declares that its server step scales with the federation, one step need only be a share
    of that pull.

    Args:
        least_step: least local step relative to SGD's of the same lr, in (0, 1]; the known bias of a
            two-client optimum follows from it.
    """

    def __init__(self, least_step: float = 1.0) -> None:
        self.least_step = least_step

    def settled(self, walk: Walk) -> None:
        (end,) = walk.end
        if self._rests(end, walk, walk.weights):
            return
        others = walk.counts if walk.method.uniform_clients else [1] * len(walk.counts)
        hint = ""
        if self._rests(end, walk, others):
            hint = (
                (
                    "; there clients weigh n_k, and it declares uniform_clients: take that back, or "
                    "weigh them alike"
                )
                if walk.method.uniform_clients
                else (
                    "; there clients count alike: weigh them by n_k, or declare uniform_clients = True "
                    "if that is meant"
                )
            )
        require(False, f"it ends at {show(end)}{hint}")

    def _rests(self, end: Tensor, walk: Walk, weights: Sequence[int]) -> bool:
        low, high = pull(end, weights, range(len(walk.counts)), self.least_step)
        return bool((low <= walk.noise).all() and (high >= -walk.noise).all())

    def stepped(self, walk: Walk) -> None:
        (start,), (end,) = walk.start, walk.end
        low, high = pull(start, walk.weights, walk.cohorts[0], self.least_step)
        moved = end - start
        if walk.method.scales_with_federation:
            share = float(moved @ high / (high @ high)) / LR
            require(
                0 < share <= 1 + walk.noise,
                f"a step of lr {LR} moved it by {share:.3g} of the clients' mean step",
            )
            low, high = share * low, share * high
        inside = (moved >= LR * low - walk.noise).all() and (moved <= LR * high + walk.noise).all()
        require(
            bool(inside),
            f"a step of lr {LR} moved it by {show(moved)}, outside [{show(LR * low)}, {show(LR * high)}]",
        )


class SoftLabels(Expectation):
    """Soft labels of one public input, n_k each: FedKD as a recursion in R^6, its losses' gradients written
    out.

    w_k <- w_k - lr T (softmax(w_k / T) - p), then w_k <- w_k + lr (c_k - w_k); p = sum_k n_k softmax(w_k / T)
    / sum_k n_k; the student's w <- w - lr T (softmax(w / T) - p).
    """

    def settled(self, walk: Walk) -> None:
        (end,), expected = walk.end, self.walk(walk)
        require(
            bool(((end - expected).abs() <= walk.noise).all()),
            f"its student is at {show(end)} instead of {show(expected)}",
        )

    stepped = settled

    def walk(self, walk: Walk) -> Tensor:
        if walk.method.average_weights:
            raise NotApplicable("weights travel too, and where that leads is not known")
        T, student = walk.method.temperature, walk.start[0].double()
        own: dict[int, Tensor] = {}
        p: Tensor | None = None
        for cohort in walk.cohorts:
            for k in cohort:
                w = own.get(k, walk.start[0].double())
                if p is not None:
                    w = self._towards(p, w, T, walk.method.distill_epochs)
                for _ in range(walk.epochs):
                    w = w + LR * (CENTRES[k] - w)
                own[k] = w
            total = sum(walk.weights[k] for k in cohort)
            p = torch.stack([walk.weights[k] / total * torch.softmax(own[k] / T, 0) for k in cohort]).sum(0)
            p = sharpened(p, walk.method.sharpen)
            student = self._towards(p, student, T, walk.method.server_epochs)
        return student

    @staticmethod
    def _towards(p: Tensor, w: Tensor, T: float, epochs: int) -> Tensor:
        for _ in range(epochs):
            w = w - LR * T * (torch.softmax(w / T, 0) - p)
        return w


class OwnOptimum(Expectation):
    """A model for each client, with an adapter of rank 1: it ends where its own client's loss no longer falls
    along the adapter."""

    def settled(self, walk: Walk) -> None:
        for k, (start, end) in enumerate(zip(walk.start, walk.end, strict=True)):
            moved, left = end - start, CENTRES[k] - end
            length = float(moved.norm())
            require(length > 0.1, f"the model of client {k} stays at {show(end)}")
            slope = float(moved @ left) / length
            require(
                abs(slope) <= walk.noise,
                f"the model of client {k} ends at {show(end)}, where its loss still has slope {slope:.3g}",
            )

    def stepped(self, walk: Walk) -> None:
        raise NotApplicable("each client has a model of its own; 'broadcast' has its 2 of 6")
