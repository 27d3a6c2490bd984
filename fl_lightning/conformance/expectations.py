"""The points to which a method is known to move on the quadratic, computed without the method.

Client k of ``counts[k]`` examples minimises |w - c_k|^2 / 2 by plain gradient steps of ``LR``; the
deployed model answers w.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.conformance.declarations import declared
from fl_lightning.conformance.references import sharpened
from fl_lightning.conformance.toy import CENTRES, LR, pull
from fl_lightning.conformance.verdicts import NotApplicable, expect, not_finite, show


@dataclass(frozen=True)
class QuadraticRun:
    """A finished run of a method on the quadratic.

    Args:
        method: the method; its settings and declarations are read by name.
        start: answers of the deployed model before the run, float32 ``[6]``: one, or one for each
            client if the method is personalised.
        end: answers after the run, in the form of ``start``.
        counts: number of examples of each client.
        cohorts: client ids of each round.
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
        """Weights of the clients in the mean: n_k, or 1 if the method declares
        ``uniform_clients``."""
        return [1] * len(self.counts) if declared(self.method).uniform_clients else self.counts


class Expectation(ABC):
    """What is known of the path of a method on the quadratic."""

    @abstractmethod
    def expect_limit(self, run: QuadraticRun) -> None:
        """Check the end of a run of many rounds with all clients.

        Raises:
            Violation: the method does not end at the known point.
        """

    @abstractmethod
    def expect_one_step(self, run: QuadraticRun) -> None:
        """Check the end of a run of one round with one local step.

        Raises:
            Violation: the step does not lead to the known point.
        """


class WeightAverage(Expectation):
    """The method averages the clients' weights, by n_k or uniformly as it declares.

    It ends where the pulls of the clients cancel. If the method declares that its server step
    scales with the federation, one step need only be a share of the mean pull.

    Args:
        least_step: smallest local step relative to a step of SGD with the same lr, in (0, 1]. The
            known bias of the optimum of two clients follows from it.
    """

    def __init__(self, least_step: float = 1.0) -> None:
        self.least_step = least_step

    def expect_limit(self, run: QuadraticRun) -> None:
        (end,) = run.end
        if self._rests(end, run, run.weights):
            return
        alike = (
            "equal weights"
            if declared(run.method).uniform_clients
            else f"weights n_k of {show_counts(run)}"
        )
        about = "about " if self.least_step < 1 else ""
        expected = f"{about}{show(optimum(run.weights))}, the optimum of the clients with {alike}"
        expect(False, f"it ends at {show(end)}", expected, likely_cause(run))

    def _rests(self, end: Tensor, run: QuadraticRun, weights: Sequence[int]) -> bool:
        """Return whether the pulls of all clients with these weights cancel at ``end``."""
        low, high = pull(end, weights, range(len(run.counts)), self.least_step)
        return bool((low <= run.noise).all() and (high >= -run.noise).all())

    def expect_one_step(self, run: QuadraticRun) -> None:
        (start,), (end,) = run.start, run.end
        low, high = pull(start, run.weights, run.cohorts[0], self.least_step)
        moved = end - start
        if declared(run.method).scales_with_federation:
            share = float(moved @ high / (high @ high)) / LR
            expect(
                0 < share <= 1 + run.noise,
                f"a step of lr {LR} moved it by {share:.3g} of the clients' mean step",
                "a share above 0, at most 1",
                "the wrong sign" if share <= 0 else f"the server's step is too long{UNLESS_FEDDYN}",
            )
            low, high = share * low, share * high
        inside = (moved >= LR * low - run.noise).all() and (moved <= LR * high + run.noise).all()
        first, second = show(LR * low), show(LR * high)
        expect(
            bool(inside),
            f"a step of lr {LR} moved it by {show(moved)}",
            first if first == second else f"between {first} and {second}",
            _cause_of_step(run, moved),
        )


def optimum(weights: Sequence[float]) -> Tensor:
    """Return the point where the pulls of the clients cancel, ``[6]``, if they make the same
    steps."""
    share = torch.tensor([float(weight) for weight in weights])
    return (share / share.sum()) @ CENTRES[: len(weights)]


def show_counts(run: QuadraticRun) -> str:
    """Return the examples of the clients in words, such as ``3 and 1 examples``."""
    return f"{' and '.join(map(str, run.counts))} example{'s' * (sum(run.counts) > 1)}"


NEAR = 0.05
"""Share of a distance below which a point counts as reached, when a cause is guessed."""


UNLESS_FEDDYN = (
    "; if it is FedDyn, declare dynamic_regularisation = True, and the kit follows its formula"
)
"""What is added to causes that are none of a method whose server adds H, so that its steps are
longer."""


def likely_cause(run: QuadraticRun) -> str:
    """Return why an average of weights probably does not end at its optimum."""
    (start,), (end,) = run.start, run.end
    expected = optimum(run.weights)
    if not end.isfinite().all():
        return f"{not_finite(server=run.method.server) or 'its answers'}: a division by 0, or it diverges"
    others = optimum(run.counts if declared(run.method).uniform_clients else [1] * len(run.counts))
    if _is_near(end, others, expected):
        if declared(run.method).uniform_clients:
            return (
                "this is the optimum for weights n_k, but it declares uniform_clients: remove that "
                "declaration, or weigh clients alike"
            )
        return (
            "this is the optimum for equal weights: weigh clients by n_k, or declare uniform_clients = True "
            "if that is meant"
        )
    if _is_near(end, start, expected):
        return "it has not moved: aggregate does not change the state that deploy reads"
    for k in range(len(run.counts)):
        if len(run.counts) > 1 and _is_near(end, CENTRES[k], expected):
            return f"this is the optimum of client {k} alone: the others' uploads are not used"
    share = float((end - start) @ (expected - start) / (expected - start).square().sum())
    if _is_near(end, start + share * (expected - start), start):
        if 0 < share < 0.995:  # more is 100 %
            return (
                f"it has gone {share:.0%} of the way: a step of the server is too short, or shrinks"
            )
        if abs(share - 1) <= NEAR:
            off = float((end - expected).abs().max())
            return (
                f"it is off by {off:.1e}: it nears the optimum more slowly than "
                f"FedAvg, or swings about it{UNLESS_FEDDYN}; if that is rounding, give its size by --noise"
            )
        return f"it has gone {share:.0%} of the way: a step of the server is too long, or has the wrong sign"
    return "clients are pulled to other points than their optima: a term of the loss or a correction is left"


def _is_near(point: Tensor, place: Tensor, other: Tensor) -> bool:
    """Return whether a point is at a place, by the measure of that place's distance from another
    one."""
    return float((point - place).norm()) <= NEAR * float((place - other).norm())


def _cause_of_step(run: QuadraticRun, moved: Tensor) -> str:
    """Return why a step with a part of the clients is probably not their mean step; empty where
    nothing fits."""
    if not moved.isfinite().all():
        return f"{not_finite(server=run.method.server) or 'its answers'}: a division by 0, or it diverges"
    cohort = run.cohorts[0]
    (start,) = run.start
    for weights, cause in (
        ([1] * len(run.counts), "clients count alike: weigh them by n_k"),
        (run.counts, "clients count by n_k, but it declares uniform_clients"),
    ):
        full = LR * pull(start, weights, cohort)[1]
        everyone = sum(weights[k] for k in cohort) / sum(weights)
        if float((moved - full).norm()) <= run.noise and weights != run.weights:
            return cause
        if float((moved - everyone * full).norm()) <= run.noise:
            return "it divides by the examples of all clients, and not of the round's"
    if float(moved.norm()) <= run.noise:
        return "it has not moved: aggregate does not change the state that deploy reads"
    return ""


class SoftLabels(Expectation):
    """FedKD with soft labels of one public input, written out as a recursion in R^6.

        w_k <- w_k - lr T (softmax(w_k / T) - p), then
        w_k <- w_k + lr (c_k - w_k)
        p = sum_k n_k softmax(w_k / T) / sum_k n_k
        w <- w - lr T (softmax(w / T) - p)

    w without an index is the student's. A method with ``sharpen`` takes softmax(p / sharpen) for p.
    """

    def expect_limit(self, run: QuadraticRun) -> None:
        (end,), expected = run.end, self.solve(run)
        expect(
            bool(((end - expected).abs() <= run.noise).all()),
            f"its student is at {show(end)}",
            show(expected),
        )

    expect_one_step = expect_limit

    def solve(self, run: QuadraticRun) -> Tensor:
        """Return the weights of the student after the run, float64 ``[6]``.

        Raises:
            NotApplicable: the method averages weights as well.
        """
        if run.method.average_weights:
            raise NotApplicable("it averages weights as well, and where that leads is not known")
        T, student = run.method.temperature, run.start[0].double()
        own: dict[int, Tensor] = {}
        p: Tensor | None = None
        for cohort in run.cohorts:
            for k in cohort:
                w = own.get(k, run.start[0].double())
                if p is not None:
                    w = self._towards(p, w, T, run.method.distill_epochs)
                for _ in range(run.epochs):
                    w = w + LR * (CENTRES[k] - w)
                own[k] = w
            total = sum(run.weights[k] for k in cohort)
            p = torch.stack(
                [run.weights[k] / total * torch.softmax(own[k] / T, 0) for k in cohort]
            ).sum(0)
            p = sharpened(p, run.method.sharpen)
            student = self._towards(p, student, T, run.method.server_epochs)
        return student

    @staticmethod
    def _towards(p: Tensor, w: Tensor, T: float, epochs: int) -> Tensor:
        """Return ``w`` after ``epochs`` distillation steps towards the soft labels ``p``."""
        for _ in range(epochs):
            w = w - LR * T * (torch.softmax(w / T, 0) - p)
        return w


class OwnOptimum(Expectation):
    """Each client has a model of its own with an adapter of rank 1.

    The model ends where the loss of its client no longer falls along the direction of the adapter.
    """

    def expect_limit(self, run: QuadraticRun) -> None:
        for k, (start, end) in enumerate(zip(run.start, run.end, strict=True)):
            moved, left = end - start, CENTRES[k] - end
            length = float(moved.norm())
            expect(
                length > 0.1,
                f"the model of client {k} stays at {show(end)}",
                f"a point nearer to the optimum of its client, {show(CENTRES[k])}",
                "its adapter is not trained, or deploy does not use it",
            )
            slope = float(moved @ left) / length
            expect(
                abs(slope) <= run.noise,
                f"the model of client {k} ends at {show(end)}, where its loss still has slope {slope:.3g}",
            )

    def expect_one_step(self, run: QuadraticRun) -> None:
        raise NotApplicable(
            "each client has a model of its own; the check 'broadcast' covers 2 of 6 clients"
        )
