"""Metrics of torchmetrics, or of the user's own, that are named by class path."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.errors import InputError, require
from fl_lightning.metrics.states import State, clear, quietly, state_of, value_of
from fl_lightning.support.user_code import is_bug_of_user

NOT_FINITE: State = {"not finite": torch.ones(())}
"""The state of a batch whose outputs are not finite: the metric is NaN then, whatever the others
give."""


class MetricOfClasses(Protocol):
    """A class of metrics; the task fills in how many classes or labels there are."""

    def __call__(self, *, num_classes: int, num_labels: int, task: str) -> Metric:
        """Make the metric."""


# a command line may leave these three arguments out, or give them
MetricFactory = Callable[[], Metric] | MetricOfClasses


class NamedMetric:
    """A metric with the name under which it is logged.

    Args:
        factory: the class, the class with arguments (``functools.partial``), a function that
            returns a metric, or a metric.
        fill: arguments that are given where the class takes them and they are not given yet.

    Attributes:
        name: that of the class in snake case, without Binary, Multiclass or Multilabel.
        path: the class path, for messages.
        form: which form of the task's outputs the metric takes, see :meth:`choose_form`.
        state_forms: type and shape of each tensor of its state after a batch, once the form is
            chosen.

    Raises:
        InputError: the metric cannot be made.
    """

    def __init__(self, factory: Any, fill: Mapping[str, Any]) -> None:
        made = factory if isinstance(factory, Metric) else None
        words = (factory.func, *factory.args) if isinstance(factory, partial) else (factory,)
        cls = next(
            (word for word in words if inspect.isclass(word) and issubclass(word, Metric)), None
        )
        named = type(made) if made is not None else cls
        self.path = getattr(named or factory, "__qualname__", repr(factory))
        try:
            if made is None and cls is not None:
                given = dict(factory.keywords) if isinstance(factory, partial) else {}
                takes = inspect.signature(cls).parameters
                given |= {
                    name: value for name, value in fill.items() if _is_open(name, given, takes)
                }
                made = cls(**given)
            self.metric = deepcopy(made) if made is not None else factory()
        except Exception as error:
            if is_bug_of_user(error):
                raise
            raise InputError(
                f"--data.metrics {self.path}",
                f"it cannot be made ({one_line(error)})",
                "give what it needs, as in --data.metrics.average macro",
            ) from error
        require(
            isinstance(self.metric, Metric),
            f"--data.metrics {self.path}, which makes a {type(self.metric).__name__}",
            "a metric is a torchmetrics.Metric",
            "write --data.metrics+=torchmetrics.classification.MulticlassF1Score",
        )
        self.name = snake_case(type(self.metric) if named is None else named)
        self.form = 0
        self.state_forms: dict[str, tuple[torch.dtype, torch.Size]] = {}
        clear(self.metric)

    @property
    def higher_is_better(self) -> bool:
        """What the metric says of itself; one that says nothing is read as better the higher it
        is."""
        return self.metric.higher_is_better is not False

    def choose_form(self, forms: Sequence[tuple[Any, Tensor]], task: str, words: str) -> None:
        """Find the form of a task's outputs that the metric takes, by trying it out.

        Args:
            forms: what ``task.metric_inputs`` gives for a few examples.
            task: the task's name, for a message.
            words: what the forms are.

        Raises:
            InputError: it takes none, or its value is not one number.
        """
        problem = ""
        for self.form in range(len(forms)):
            try:
                state = self.state(forms)
                self.state_forms = {key: (part.dtype, part.shape) for key, part in state.items()}
                value = value_of(self.metric, [state])
            except Exception as error:
                if is_bug_of_user(error):
                    raise
                problem = problem or one_line(error)
                continue
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            require(
                isinstance(value, (int, float))
                or (isinstance(value, Tensor) and value.numel() == 1),
                f"--data.metrics {self.path}, whose value is {shape}",
                "what is logged is one number",
                "let it average, as in --data.metrics.average macro, or leave it out",
            )
            return
        raise InputError(
            f"--data.metrics {self.path} where the task is {task}",
            f"it does not take {words}: {problem}",
            "leave it out, or write a metric for such outputs",
        )

    def state(self, forms: Sequence[tuple[Any, Tensor]]) -> State:
        """Return the state of the metric after one batch.

        Args:
            forms: what ``task.metric_inputs`` gives for the batch.
        """
        outputs, target = forms[self.form]
        if isinstance(outputs, Tensor) and not torch.isfinite(outputs).all():
            return NOT_FINITE
        clear(self.metric)
        try:
            with quietly(), torch.no_grad():
                self.metric.update(outputs, target)
            return state_of(self.metric)
        finally:
            clear(self.metric)

    def value(self, states: Sequence[State]) -> float:
        """Return the metric over all batches; NaN where outputs are not finite."""
        return float(value_of(self.metric, states)) if _are_finite(states) else math.nan

    def value_if_defined(self, states: Sequence[State]) -> float | None:
        """Return the metric of one client's batches; None where it refuses so few examples, or is
        no number of them."""
        try:
            value = self.value(states)
        except ValueError as error:
            if is_bug_of_user(error):
                raise
            return None
        return None if math.isnan(value) and _are_finite(states) else value


def _are_finite(states: Sequence[State]) -> bool:
    return all(NOT_FINITE.keys() != state.keys() for state in states)


def _is_open(name: str, given: Mapping[str, Any], takes: Mapping[str, inspect.Parameter]) -> bool:
    return name in takes and given.get(name) is None


def one_line(error: Exception) -> str:
    """Return the message of an error in one line without an end mark."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".").replace(";", ",")


def snake_case(cls: type) -> str:
    """Return the name under which a class of metrics is logged.

    >>> from torchmetrics import classification, regression
    >>> snake_case(classification.MulticlassF1Score), snake_case(classification.BinaryAUROC)
    ('f1_score', 'auroc')
    >>> snake_case(classification.MulticlassFBetaScore), snake_case(regression.R2Score)
    ('f_beta_score', 'r2_score')
    """
    name = re.sub(r"^(Binary|Multiclass|Multilabel)(?=.)", "", cls.__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
