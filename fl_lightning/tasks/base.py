"""The contract of a task.

``B`` examples of a batch. An *example* is what clients hold and partitions deal out: an image, a
row, a sequence of tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import InputError, MisuseError, require
from fl_lightning.metrics.names import words_of

if TYPE_CHECKING:
    from fl_lightning.metrics.named import NamedMetric

Sums = dict[str, tuple[Tensor, Tensor]]
"""What a task has measured: by metric, a sum and the weight that it is divided by, float64. Both
are ``[B]`` where they are of single examples, and scalars where they are of a batch. Sums of parts
add up to those of the whole, so metrics need no outputs but those of one batch."""


class ClassRows(NamedTuple):
    """Logits of classes, one row for each decision: for each example, or for each labelled token.

    Args:
        logits: ``[M, C]``.
        target: int64 ``[M]``; where a stressor has made some, shares of the classes ``[M, C]``.
        weight: of each row, float32 ``[M]``; None where all count the same.
    """

    logits: Tensor
    target: Tensor
    weight: Tensor | None

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of one value of each row ``[M]`` over the rows that count."""
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum().clamp(min=1)


def likeliest(target: Tensor) -> Tensor:
    """Return classes ``[M]``; of shares float ``[M, C]`` that of the largest one."""
    return target.argmax(1) if target.is_floating_point() else target


class Task(Recorded):
    """What is learnt: the loss, the weight of an example, the metrics and which of them selects a
    model.

    A task belongs to the data, and has no state.
    """

    primary: str
    """The metric that selects: the best checkpoint, ``final/*``, tables, ``tune`` and criteria
    follow it."""

    lower_is_better: frozenset[str] = frozenset({"loss"})
    """The metrics of which less is better; of all others more is."""

    shares: frozenset[str] = frozenset()
    """The metrics that are shares in [0, 1] and shown in percent."""

    hits: frozenset[str] = frozenset()
    """The metrics of which an example is right or wrong, 1 or 0, with the weight 1."""

    outputs_per_example: int = 1
    """Rows of the outputs that an example has: the first ones of all examples, then the second."""

    per_client: tuple[str, ...] = ()
    """The metrics of which the validation reports mean and spread over clients; the primary one is
    among them."""

    of_tokens: bool = False
    """Whether outputs are logits of the next token, so that the network is one of language."""

    has_classes: bool = False
    """Whether outputs are logits of classes, so that they can be distilled: :meth:`class_rows`."""

    named: tuple[NamedMetric, ...] = ()
    """Metrics that the user named by class path, in ``data.metrics``."""

    metric_form: str = "outputs and targets"
    """What :meth:`metric_inputs` gives, for a message."""

    def metric_inputs(self, outputs: Any, target: Tensor) -> Sequence[tuple[Any, Tensor]]:
        """Return outputs and targets of a batch as metrics of torchmetrics take them, in each form
        that there is; a metric gets the first one that it takes. Tensors are on the CPU.

        Args:
            outputs: what the network makes of a batch.
            target: ``[B, ...]``.
        """
        return [(outputs.cpu() if isinstance(outputs, Tensor) else outputs, target.cpu())]

    def metric_arguments(self, num_outputs: int) -> dict[str, Any]:
        """Return the arguments that are filled in where a metric takes them and they are not
        given."""
        return {"num_classes": num_outputs, "num_labels": num_outputs}

    def measuring(self, metrics: Sequence[Any], primary: str | None, num_outputs: int) -> Task:
        """Return this task with metrics of the user's.

        Args:
            metrics: factories, see :class:`fl_lightning.metrics.named.NamedMetric`.
            primary: the metric that selects; None: the task's own.
            num_outputs: of the data, such as the number of classes.

        Raises:
            InputError: one cannot be made, two have one name, or no metric has the name
                ``primary``.
        """
        from fl_lightning.metrics.named import NamedMetric

        task = copy(self)
        taken = {*self.per_client, *self.lower_is_better, *self.shares, "ece", "brier"}
        for metric in metrics:
            named = NamedMetric(metric, self.metric_arguments(num_outputs))
            require(
                named.name not in taken,
                f"--data.metrics {named.path}, which is logged as {named.name}",
                "there is another metric of this name",
                f"leave it out, or name a subclass, such as class Other{named.path}({named.path})",
            )
            taken.add(named.name)
            task.named = (*task.named, named)
            task.per_client = (*task.per_client, named.name)
            if not named.higher_is_better:
                task.lower_is_better = task.lower_is_better | {named.name}
        require(
            primary is None or primary in task.per_client,
            f"--data.primary {primary}",
            f"the metric that selects is one of {', '.join(task.per_client)}",
            f"write --data.primary {self.primary}",
        )
        task.primary = primary or self.primary
        return task

    @property
    def higher_is_better(self) -> bool:
        """Whether more of the primary metric is better."""
        return self.primary not in self.lower_is_better

    def scale(self, metric: str) -> float:
        """Return the factor from a metric to what is shown: shares are shown in percent."""
        return 100.0 if metric in self.shares else 1.0

    def title(self, metric: str) -> str:
        """Return a metric's name with its unit, for an axis or a heading."""
        return words_of(metric) + (" (%)" if metric in self.shares else "")

    def shown(self, metric: str, value: float) -> str:
        """Return a value with its unit, for a line of text."""
        return f"{100 * value:.1f} %" if metric in self.shares else f"{value:.4g}"

    def is_better(self, value: float, other: float | None) -> bool:
        """Return whether a value of the primary metric is better than another, or than none; NaN
        never is."""
        if math.isnan(value) or other is None:
            return not math.isnan(value)
        return value > other if self.higher_is_better else value < other

    @abstractmethod
    def loss(self, outputs: Any, target: Tensor) -> Tensor:
        """Return the scalar that a local step minimises: the mean over what has weight.

        It has no ``.item()`` and no branch on values, so that it runs under ``torch.func.vmap``.

        Args:
            outputs: what the network makes of a batch.
            target: ``[B, ...]``.
        """

    @abstractmethod
    def examplewise(self, outputs: Any, target: Tensor) -> Sums:
        """Return sum and weight of each metric for each example, float64 ``[B]``."""

    def class_rows(self, outputs: Any, target: Tensor) -> ClassRows:
        """Return the logits of classes that the outputs are, row by row, where ``has_classes``."""
        raise MisuseError(
            f"class_rows of {type(self).__name__}",
            "a task whose has_classes is True returns its logits there",
            "override class_rows, or leave has_classes at False",
        )

    def weight(self, target: Tensor) -> Tensor:
        """Return how much each example counts, float64 ``[B]``: 1, or its labelled tokens."""
        return torch.ones(len(target), dtype=torch.float64, device=target.device)

    def sums(self, outputs: Any, target: Tensor) -> Sums:
        """Return sum and weight of each metric over a batch, float64 scalars."""
        return {
            name: (total.sum(), weight.sum())
            for name, (total, weight) in self.examplewise(outputs, target).items()
        }

    def evaluate(self, network: nn.Module, inputs: Any, target: Tensor) -> tuple[Any, Sums]:
        """Return the network's outputs for a batch, and :meth:`examplewise` of them.

        Override it where a metric needs more than one forward pass, as text that is generated does.
        """
        outputs = in_float32(network(inputs))
        return outputs, self.examplewise(outputs, target)

    def finish(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the metrics, given the means: here follows what is a function of a mean, as the
        perplexity is of the loss.

        Args:
            means: by metric, of everything a scalar, of each client ``[K]``.
        """
        return dict(means)

    def constant_guess(self, target: Tensor) -> float | None:
        """Return the best value of the primary metric that one answer to all examples has on these
        targets, such as the share of the most frequent class; None where it is not known.

        A report says of no model that it has learnt anything unless it is better than this.

        Args:
            target: of the test set ``[N, ...]``.
        """
        return None

    def accepts(self, outputs: Any, num_outputs: int, examples: int) -> bool:
        """Return whether outputs for so many examples have the form that :meth:`outputs_form`
        names."""
        return isinstance(outputs, Tensor) and outputs.shape == (examples, num_outputs)

    def outputs_form(self, examples: str, num_outputs: int) -> str:
        """Return what outputs are and their shape, for a message."""
        return f"outputs [{examples}, {num_outputs}]"

    def corrupt(
        self, target: Tensor, where: np.ndarray, rng: np.random.Generator, num_outputs: int
    ) -> Tensor:
        """Return the targets with wrong ones at some positions, as label noise makes them.

        Args:
            target: of a client's training examples ``[n, ...]``; it is not changed.
            where: positions of the examples that get a wrong one, int64 ``[m]``.
            rng: what it is drawn from.
            num_outputs: of the data, such as the number of classes.

        Raises:
            InputError: this task knows no wrong targets.
        """
        raise InputError(
            f"label noise on {type(self).__name__}",
            "it has no labels that could be wrong",
            "leave it out",
        )


def in_float32(outputs: Any) -> Any:
    """Return outputs whose floating-point tensors are float32: under autocast they are not."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.is_floating_point() else outputs
    if isinstance(outputs, Mapping):
        return {name: in_float32(value) for name, value in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return tuple(in_float32(value) for value in outputs)
    return outputs
