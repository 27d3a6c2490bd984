"""Terms that can be added to the local loss of any averaging method, such as the controls of a
comparison.

    L = L_method + sum of terms

A term reads what the method's own loss reads: the trained model's logits, which of a quantised
method are the quantised student's, the target and the task loss. Some also read what the client
received this round: its weights, or what the network that has them makes of the batch, frozen, in
evaluation mode and in full precision. Some read of the client how many examples of each class it
has, or its own model of its last round. A term at its neutral setting is left out, so that the
method computes what it computes without it, bit for bit.

``B`` batch, ``C`` classes, ``d`` features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.config.constraints import Constraint, within
from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import InputError, require
from fl_lightning.methods.losses import distillation, not_true_distillation
from fl_lightning.methods.products import squared_distance
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
        frozen: returns outputs and features of inputs, of the network of this name:
            ``received_network`` or ``previous_network``; it is called without gradient. Features
            are None where no term reads them.
        class_rows: makes rows of logits of classes from outputs and target, as the data's task
            does.
        features: of the model that is trained, ``[B, ..., d]``; None where no term reads them.
        class_counts: float32 ``[C]``; None where no term reads them.
        shift: returns how far the client's earlier rounds have moved these weights, by name.
        of_module: whether the task loss is that of a user's module, of which nobody knows how it
            is made.
    """

    def __init__(
        self,
        inputs: Any,
        target: Tensor,
        task: Tensor,
        logits: Tensor | None,
        trained: Callable[[], Mapping[str, Tensor]],
        received: Callable[[], Mapping[str, Tensor]],
        frozen: Callable[[str, Any], tuple[Tensor, Tensor | None]],
        class_rows: Callable[[Any, Tensor], ClassRows],
        features: Tensor | None = None,
        class_counts: Tensor | None = None,
        shift: Callable[[], Mapping[str, Tensor]] = dict,
        of_module: bool = False,
    ) -> None:
        self.inputs, self.target, self.task = inputs, target, task
        self._logits, self._frozen, self._class_rows = logits, frozen, class_rows
        self._trained, self._received = trained, received
        self._features, self._class_counts, self._shift = features, class_counts, shift
        self._of_module = of_module

    @cached_property
    def rows(self) -> ClassRows:
        """Logits ``[M, C]`` of the model that is trained, one row for each example or labelled
        token."""
        assert self._logits is not None, "a term that reads logits says reads_logits"
        return self._class_rows(self._logits, self.target)

    @property
    def replaced(self) -> Tensor:
        """The cross-entropy that a term puts another one in the place of, a scalar: the task loss,
        or that part of a module's loss which its logits tell."""
        if not self._of_module:
            return self.task
        return self.rows.mean(
            F.cross_entropy(self.rows.logits.float(), self.rows.target, reduction="none")
        )

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
        """Logits ``[M, C]`` of the network as received, without gradient, in the order of ``rows``;
        one pass, however many terms read them or its features."""
        return self._class_rows(self._received_pass[0], self.target).logits

    @property
    def features(self) -> Tensor:
        """What enters the last linear layer of the model that is trained, ``[M, d]``."""
        return self._rows_of(self._features, "features")

    @property
    def received_features(self) -> Tensor:
        """The same of the network as received, without gradient."""
        return self._rows_of(self._received_pass[1], "received_features")

    @cached_property
    def previous_features(self) -> Tensor:
        """The same of the client's own model of its last round that counted, without gradient;
        before the first one, of the network as received."""
        with torch.no_grad():
            _, features = self._frozen("previous_network", self.inputs)
        return self._rows_of(features, "previous_features")

    @property
    def class_counts(self) -> Tensor:
        """How many labels of each class the client trains on in this round, float32 ``[C]``."""
        assert self._class_counts is not None, (
            "a term that reads class counts says reads_class_counts"
        )
        return self._class_counts

    @cached_property
    def shift(self) -> Mapping[str, Tensor]:
        """The sum of this client's updates, weights after minus weights before its local steps,
        over all earlier rounds in which its upload counted; by name, without gradient, zeros before
        the first one."""
        return self._shift()

    @cached_property
    def _received_pass(self) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            return self._frozen("received_network", self.inputs)

    @staticmethod
    def _rows_of(features: Tensor | None, name: str) -> Tensor:
        assert features is not None, f"a term that reads {name} says reads_{name}"
        return features.flatten(0, -2)


def a_weight(example: float) -> Constraint:
    """Return the constraint of the weight of a loss term."""
    return within("[0, inf)", "a loss term weighs 0 or more", example)


def a_temperature(example: float) -> Constraint:
    """Return the constraint of the temperature of a softmax."""
    return within("(0, inf)", "a temperature is above 0", example)


class Term(Recorded, ABC):
    """A term of the local loss. Settings are plain attributes; a term has no other state.

    Like ``training_step``, a call has no ``.item()`` and no branch on values, so that it runs under
    ``torch.func.vmap``.
    """

    settings_shown = ("{cls}({name}={value})", "{name}: {value}")

    weighs: float = 1.0
    """What the term weighs. At 0 it is left out."""
    name: str = ""
    """The term is logged as ``train/loss_<name>``, as it enters the loss."""
    reads_logits: bool = False
    reads_received_weights: bool = False
    reads_received_logits: bool = False
    reads_class_counts: bool = False
    reads_features: bool = False
    reads_received_features: bool = False
    reads_previous_features: bool = False
    """Each client then keeps its model of its last round."""
    reads_shift: bool = False
    """Each client then keeps the sum of its updates; it needs ``reads_received_weights`` too."""

    @property
    def reads_received(self) -> bool:
        """Whether the term compares with what the client received."""
        return (
            self.reads_received_weights
            or self.reads_received_logits
            or self.reads_received_features
        )

    @property
    def neutral(self) -> bool:
        """Whether the term adds nothing at its settings; it is then left out."""
        return self.weighs == 0

    @abstractmethod
    def __call__(self, step: LocalStep) -> Tensor:
        """Return the term, a scalar, as it enters the loss."""


class ScaledLoss(Term):
    """alpha * L_task: what an extra term does to the size of the step, and nothing else.

    Under plain SGD it is the same as a learning rate 1 + alpha times as large; other terms of the
    method, such as FedMPQ's regulariser, are not scaled.

    Args:
        alpha: 0 or more; the task loss enters 1 + alpha times. 0: the term is left out.
    """

    name = "scaled"

    def __init__(self, alpha: Annotated[float, a_weight(0.5)] = 0.5) -> None:
        self.alpha = self.weighs = alpha

    def __call__(self, step: LocalStep) -> Tensor:
        return self.alpha * step.task


class LabelSmoothing(Term):
    """Label smoothing (Szegedy et al., CVPR 2016): a target that has nothing of a teacher in it.

    eps * (U - L_task), where U is the cross-entropy with the uniform distribution. With a
    cross-entropy as task loss, the sum of both is ``torch.nn.functional.cross_entropy(...,
    label_smoothing=eps)``.

    Args:
        smoothing: eps in [0, 1), the share of the target that is spread over all classes. 0: the
            term is left out.
    """

    name = "smoothing"
    reads_logits = True

    def __init__(
        self,
        smoothing: Annotated[
            float, within("[0, 1)", "the share that is spread over all classes lies in [0, 1)", 0.1)
        ] = 0.1,
    ) -> None:
        self.smoothing = self.weighs = smoothing

    def __call__(self, step: LocalStep) -> Tensor:
        uniform = step.rows.mean(-F.log_softmax(step.rows.logits, dim=1).mean(dim=1))
        return self.smoothing * (uniform - step.replaced)


class ProximalTerm(Term):
    """FedProx's term (Li et al., MLSys 2020): mu / 2 * || w - w_t ||^2 over the trained weights.

    Of a quantised method w are the weights before rounding, so that the pull is zero where they are
    those received.

    Args:
        mu: weight of the term, 0 or more; 0.001 to 1 in the paper. Above 1 / lr the local steps
            overshoot. 0: the term is left out.
    """

    name = "prox"
    reads_received_weights = True

    def __init__(self, mu: Annotated[float, a_weight(0.01)] = 0.01) -> None:
        self.mu = self.weighs = mu

    def __call__(self, step: LocalStep) -> Tensor:
        trained, received = step.trained_weights, step.received_weights
        return (
            self.mu
            / 2
            * squared_distance([trained[name] for name in received], [*received.values()])
        )


class DynamicTerm(Term):
    """The clients' half of FedDyn (Acar et al., ICLR 2021): alpha (<H_i, y - x> + 1/2 ||y - x||^2),
    with H_i the sum of the client's own updates y_i - x.

    It holds each client to what it has received and bends its loss against where it went before.
    The server's half, which adds the mean of all H_i to the model, is no term: that is
    :class:`FedDyn`.

    Args:
        alpha: weight of the term, 0 or more; 0.1 and 0.01 in the paper. 0: the term is left out.
    """

    name = "dynamic"
    reads_received_weights = True
    reads_shift = True

    def __init__(self, alpha: Annotated[float, a_weight(0.1)] = 0.1) -> None:
        self.alpha = self.weighs = alpha

    def __call__(self, step: LocalStep) -> Tensor:
        # <H_i, y - x> + 1/2 ||y - x||^2 = 1/2 (||y - (x - H_i)||^2 - ||H_i||^2), in fewer passes
        trained, shift = step.trained_weights, step.shift
        centres = [step.received_weights[name] - shift[name] for name in shift]
        squares = squared_distance([trained[name] for name in shift], centres)
        lengths = torch.stack([each.square().sum() for each in shift.values()]).sum()
        return self.alpha / 2 * (squares - lengths)


class NotTrueTerm(Term):
    """FedNTD's term (Lee et al., NeurIPS 2022): beta * tau^2 * KL(q_g || q) over the classes other
    than the target, q_g of the network as received.

    Args:
        beta: weight of the term, 0 or more; 1 in the paper. 0: the term is left out.
        tau: temperature of both distributions, above 0; 1 in the paper.
    """

    name = "ntd"
    reads_logits = True
    reads_received_logits = True

    def __init__(
        self,
        beta: Annotated[float, a_weight(1)] = 1.0,
        tau: Annotated[float, a_temperature(1)] = 1.0,
    ) -> None:
        self.beta = self.weighs = beta
        self.tau = tau

    def __call__(self, step: LocalStep) -> Tensor:
        return self.beta * not_true_distillation(step.rows, step.received_logits, self.tau)


class DistillationTerm(Term):
    """FedMPQ-KD's term on any method: alpha * T^2 * KL(softmax(z_g / T) || softmax(z / T)), z_g the
    logits of the network as received (Hinton et al., 2015, for T^2).

    Args:
        alpha: weight of the term, 0 or more. 0: the term is left out.
        temperature: T, above 0.
    """

    name = "kd"
    reads_logits = True
    reads_received_logits = True

    def __init__(
        self,
        alpha: Annotated[float, a_weight(0.5)] = 0.5,
        temperature: Annotated[float, a_temperature(2)] = 2.0,
    ) -> None:
        self.alpha = self.weighs = alpha
        self.temperature = temperature

    def __call__(self, step: LocalStep) -> Tensor:
        return self.alpha * distillation(step.rows, step.received_logits, self.temperature)


class _Recalibrated(Term):
    """A cross-entropy of shifted logits in place of the task loss: the term is their difference.

    Two of a kind have one name, since a loss is replaced once.
    """

    name = "calibrated"
    reads_logits = True
    reads_class_counts = True

    def __call__(self, step: LocalStep) -> Tensor:
        logits = step.rows.logits.float()
        # a language model's table may be larger than its tokeniser
        counts = F.pad(step.class_counts, (0, logits.shape[1] - len(step.class_counts)))
        # shares of 0 are multiplied by the logarithm of what is left out, so no -inf here
        shifted = logits + self.shift(counts).clamp_min(torch.finfo(counts.dtype).min)
        losses = F.cross_entropy(shifted, step.rows.target, reduction="none")
        return step.rows.mean(losses) - step.replaced

    @abstractmethod
    def shift(self, counts: Tensor) -> Tensor:
        """Return what is added to the logits of each class, ``[C]``; -inf for one without examples.

        Args:
            counts: of the client's training examples by class, float32 ``[C]``.
        """


class CalibratedLogits(_Recalibrated):
    """FedLC's loss (Zhang et al., ICML 2022): the cross-entropy of z_c - tau n_c^(-1/4) in place of
    the task loss, n_c the client's training examples of class c.

    The softmax is over all classes: the paper's denominator, without the true class, makes a loss
    without a lower bound. A class of which the client has no example is left out (-inf), so that
    nothing pushes its logits down.

    Args:
        tau: weight of the shift, 0 or more; 1 in most public code. 0: the term is left out.
    """

    def __init__(self, tau: Annotated[float, a_weight(1)] = 1.0) -> None:
        self.tau = self.weighs = tau

    def shift(self, counts: Tensor) -> Tensor:
        return -self.tau * counts.pow(-0.25)


class BalancedSoftmax(_Recalibrated):
    """The balanced softmax (Ren et al., NeurIPS 2020): the cross-entropy of z_c + gamma log n_c in
    place of the task loss, n_c the client's training examples of class c. One of none is left out
    (-inf).

    Args:
        gamma: weight of the shift, 0 or more; 1 in the paper. 0: the term is left out.
    """

    def __init__(self, gamma: Annotated[float, a_weight(1)] = 1.0) -> None:
        self.gamma = self.weighs = gamma

    def shift(self, counts: Tensor) -> Tensor:
        return self.gamma * counts.log()


class ContrastiveTerm(Term):
    """MOON's term (Li et al., CVPR 2021): features are to be near those of the received model, and
    far from those of the client's own last one.

    mu times the mean of -log softmax([cos(z, z_x), cos(z, z_prev)] / temperature)[0]. z is what
    enters the last linear layer. z_x and z_prev are those of frozen networks in evaluation mode. In
    a client's first round both are the same, and the term has no gradient.

    Args:
        mu: weight of the term, 0 or more; 1, 5 or 10 in the paper. 0: the term is left out.
        temperature: above 0; 0.5 in the paper.
    """

    name = "contrast"
    reads_features = True
    reads_received_features = True
    reads_previous_features = True

    def __init__(
        self,
        mu: Annotated[float, a_weight(1)] = 1.0,
        temperature: Annotated[float, a_temperature(0.5)] = 0.5,
    ) -> None:
        self.mu = self.weighs = mu
        self.temperature = temperature

    def __call__(self, step: LocalStep) -> Tensor:
        z = step.features.float()
        near, far = (
            F.cosine_similarity(z, other.float(), dim=1) / self.temperature
            for other in (step.received_features, step.previous_features)
        )
        return self.mu * (torch.logsumexp(torch.stack([near, far]), dim=0) - near).mean()


def check_terms(terms: Sequence[Term], own: frozenset[str], method: str) -> None:
    """Refuse terms that this method cannot have.

    Args:
        terms: in the order of the configuration.
        own: names of the terms that the method's loss has already.
        method: its class name.

    Raises:
        InputError: something that is no term, or two terms of one name.
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
        seen.add(term.name)


def refuse_readers(terms: Sequence[Term], what: Sequence[str], method: str, why: str) -> None:
    """Refuse terms that read what a method does not keep for them.

    Args:
        terms: in the order of the configuration.
        what: ``features``, ``previous_features``, ...
        method: its class name.
        why: it does not.
    """
    require(
        not any(getattr(term, f"reads_{each}") for term in terms for each in what),
        f"--model.terms that read {' or '.join(what)} with --model {method}",
        why,
        "write ScaledLoss or LabelSmoothing",
    )


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
