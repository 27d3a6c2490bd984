"""Terms that can be added to the local loss of any averaging method, such as the controls of a comparison.

    L = L_method + sum of terms

A term reads what the method's own loss reads: the trained model's logits, which of a quantised method are the
quantised student's, the target and the task loss. Some also read what the client received this round: its
weights, or the logits of the network that has them, frozen, in evaluation mode and in full precision. A term
at its neutral setting is left out, so that the method computes what it computes without it, bit for bit.

``B`` batch, ``C`` classes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.errors import InputError, require
from fl_lightning.methods.losses import distillation, not_true_distillation
from fl_lightning.support.recorded import Recorded
from fl_lightning.tasks import ClassRows


class LocalStep:
    """What a term may read of one local step; what no term asks for is not computed.

    Args:
        inputs: of the batch.
        target: int64 ``[B]``.
        task: the task loss, a scalar.
        logits: outputs of the model that is trained; None where no term reads them.
        trained: returns the weights that the local optimiser moves, by name, before any rounding.
        received: returns what those weights were when the client received them, by name.
        teacher: makes logits of inputs with the received network; it is called without gradient.
        class_rows: makes rows of logits of classes from outputs and target, as the data's task does.
    """

    def __init__(
        self,
        inputs: Any,
        target: Tensor,
        task: Tensor,
        logits: Tensor | None,
        trained: Callable[[], Mapping[str, Tensor]],
        received: Callable[[], Mapping[str, Tensor]],
        teacher: Callable[[Any], Tensor],
        class_rows: Callable[[Any, Tensor], ClassRows],
    ) -> None:
        self.inputs, self.target, self.task = inputs, target, task
        self._logits, self._teacher, self._class_rows = logits, teacher, class_rows
        self._trained, self._received = trained, received

    @cached_property
    def rows(self) -> ClassRows:
        """Logits ``[M, C]`` of the model that is trained, one row for each example or labelled token."""
        assert self._logits is not None, "a term that reads logits says reads_logits"
        return self._class_rows(self._logits, self.target)

    @cached_property
    def trained_weights(self) -> Mapping[str, Tensor]:
        """The weights that the local optimiser moves, by name, before any rounding."""
        return self._trained()

    @cached_property
    def received_weights(self) -> Mapping[str, Tensor]:
        """What ``trained_weights`` were when the client received them, without gradient."""
        return self._received()

    @cached_property
    def received_logits(self) -> Tensor:
        """Logits ``[M, C]`` of the network as received, without gradient, in the order of ``rows``; one pass,
        however many terms read them."""
        with torch.no_grad():
            return self._class_rows(self._teacher(self.inputs), self.target).logits


class Term(Recorded, ABC):
    """A term of the local loss. Settings are plain attributes; a term has no other state.

    Like ``training_step``, a call has no ``.item()`` and no branch on values, so that it runs under
    ``torch.func.vmap``.
    """

    name: str = ""
    """The term is logged as ``train/loss_<name>``, as it enters the loss."""
    reads_logits: bool = False
    reads_received_weights: bool = False
    reads_received_logits: bool = False

    @property
    def neutral(self) -> bool:
        """Whether the term adds nothing at its settings; it is then left out."""
        return False

    @abstractmethod
    def __call__(self, step: LocalStep) -> Tensor:
        """Return the term, a scalar, as it enters the loss."""


class ScaledLoss(Term):
    """alpha * L_task: what an extra term does to the size of the step, and nothing else.

    Under plain SGD it is the same as a learning rate 1 + alpha times as large; other terms of the method,
    such as FedMPQ's regulariser, are not scaled.

    Args:
        alpha: 0 or more; the task loss enters 1 + alpha times. 0: the term is left out.
    """

    name = "scaled"

    def __init__(self, alpha: float = 0.5) -> None:
        self.alpha = _weight("ScaledLoss", "alpha", alpha, 0.5)

    @property
    def neutral(self) -> bool:
        return self.alpha == 0

    def __call__(self, step: LocalStep) -> Tensor:
        return self.alpha * step.task


class LabelSmoothing(Term):
    """Label smoothing (Szegedy et al., CVPR 2016): a target that has nothing of a teacher in it.

    eps * (U - L_task), where U is the cross-entropy with the uniform distribution. With a cross-entropy as
    task loss, the sum of both is ``torch.nn.functional.cross_entropy(..., label_smoothing=eps)``.

    Args:
        smoothing: eps in [0, 1), the share of the target that is spread over all classes. 0: the term is left
            out.
    """

    name = "smoothing"
    reads_logits = True

    def __init__(self, smoothing: float = 0.1) -> None:
        require(
            0 <= smoothing < 1,
            f"LabelSmoothing(smoothing={smoothing})",
            "the share that is spread over all classes lies in [0, 1)",
            "write smoothing: 0.1",
        )
        self.smoothing = smoothing

    @property
    def neutral(self) -> bool:
        return self.smoothing == 0

    def __call__(self, step: LocalStep) -> Tensor:
        uniform = step.rows.mean(-F.log_softmax(step.rows.logits, dim=1).mean(dim=1))
        return self.smoothing * (uniform - step.task)


class ProximalTerm(Term):
    """FedProx's term (Li et al., MLSys 2020): mu / 2 * || w - w_t ||^2 over the trained weights.

    Of a quantised method w are the weights before rounding, so that the pull is zero where they are those
    received.

    Args:
        mu: weight of the term, 0 or more; 0.001 to 1 in the paper. Above 1 / lr the local steps overshoot. 0:
            the term is left out.
    """

    name = "prox"
    reads_received_weights = True

    def __init__(self, mu: float = 0.01) -> None:
        self.mu = _weight("ProximalTerm", "mu", mu, 0.01)

    @property
    def neutral(self) -> bool:
        return self.mu == 0

    def __call__(self, step: LocalStep) -> Tensor:
        trained = step.trained_weights
        squares = [(trained[name] - start).square().sum() for name, start in step.received_weights.items()]
        return self.mu / 2 * torch.stack(squares).sum()


class NotTrueTerm(Term):
    """FedNTD's term (Lee et al., NeurIPS 2022): beta * tau^2 * KL(q_g || q) over the classes other than the
    target, q_g of the network as received.

    Args:
        beta: weight of the term, 0 or more; 1 in the paper. 0: the term is left out.
        tau: temperature of both distributions, above 0; 1 in the paper.
    """

    name = "ntd"
    reads_logits = True
    reads_received_logits = True

    def __init__(self, beta: float = 1.0, tau: float = 1.0) -> None:
        self.beta = _weight("NotTrueTerm", "beta", beta, 1)
        self.tau = _temperature("NotTrueTerm", "tau", tau, 1)

    @property
    def neutral(self) -> bool:
        return self.beta == 0

    def __call__(self, step: LocalStep) -> Tensor:
        return self.beta * not_true_distillation(step.rows, step.received_logits, self.tau)


class DistillationTerm(Term):
    """FedMPQ-KD's term on any method: alpha * T^2 * KL(softmax(z_g / T) || softmax(z / T)), z_g the logits of
    the network as received (Hinton et al., 2015, for T^2).

    Args:
        alpha: weight of the term, 0 or more. 0: the term is left out.
        temperature: T, above 0.
    """

    name = "kd"
    reads_logits = True
    reads_received_logits = True

    def __init__(self, alpha: float = 0.5, temperature: float = 2.0) -> None:
        self.alpha = _weight("DistillationTerm", "alpha", alpha, 0.5)
        self.temperature = _temperature("DistillationTerm", "temperature", temperature, 2)

    @property
    def neutral(self) -> bool:
        return self.alpha == 0

    def __call__(self, step: LocalStep) -> Tensor:
        return self.alpha * distillation(step.rows, step.received_logits, self.temperature)


def check_terms(terms: Sequence[Term], own: frozenset[str], method: str, refused: str) -> None:
    """Refuse terms that this method cannot have.

    Args:
        terms: in the order of the configuration.
        own: names of the terms that the method's loss has already.
        method: its class name.
        refused: why no term can read what its clients receive; empty when it can.

    Raises:
        InputError: something that is no term, two terms of one name, or a term that reads what is not there.
    """
    seen: set[str] = set()
    for term in terms:
        kind = type(term).__name__
        if not isinstance(term, Term):
            raise InputError(
                f"terms with an item of type {kind}",
                "each is a Term",
                "write terms=[LabelSmoothing(0.1)], or class_path and init_args in YAML",
            )
        if term.name in own | {"task"}:
            raise InputError(
                f"--model.terms {kind} with --model {method}",
                f"the loss of {method} has a term of the name loss_{term.name} already",
                f"leave it out and change that of {method}",
            )
        if term.name in seen:
            raise InputError(
                f"--model.terms with two terms of the name loss_{term.name}",
                "each term is logged by its name",
                "leave one of them out",
            )
        if refused and (term.reads_received_weights or term.reads_received_logits):
            raise InputError(
                f"--model.terms {kind} with --model {method}", refused, "write ScaledLoss or LabelSmoothing"
            )
        seen.add(term.name)


def require_terms(terms: Sequence[Term], losses: Iterable[str], method: str) -> None:
    """Refuse a method that has trained without its terms.

    Args:
        terms: those that add something.
        losses: names of the losses of a round in which clients made steps.
        method: its class name.

    Raises:
        TypeError: its ``training_step`` never calls ``with_terms``.
    """
    missing = [type(term).__name__ for term in terms if f"loss_{term.name}" not in losses]
    if missing:
        raise TypeError(
            f"--model.terms {', '.join(missing)} with --model {method}, whose training_step never calls "
            f"with_terms; it would be ignored; end {method}.training_step with self.with_terms(...)"
        )


def _weight(kind: str, name: str, value: float, example: float) -> float:
    require(
        0 <= value < math.inf,
        f"{kind}({name}={value})",
        "a loss term weighs 0 or more",
        f"write {name}: {example}",
    )
    return value


def _temperature(kind: str, name: str, value: float, example: float) -> float:
    require(
        0 < value < math.inf,
        f"{kind}({name}={value})",
        "a temperature is above 0",
        f"write {name}: {example}",
    )
    return value
