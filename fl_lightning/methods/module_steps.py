"""How the steps of a user's LightningModule are called, and what ``test_step`` and
``validation_step`` log.

As in Lightning, a number is averaged over the batches, weighted by their sizes, or reduced as
``reduce_fx`` says; a metric of torchmetrics that is logged is computed at the end, over all
examples.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from fl_lightning import rng
from fl_lightning.config.not_called import overridden
from fl_lightning.config.overriding import overrides
from fl_lightning.errors import InputError
from fl_lightning.metrics.states import MetricStates, State, clear, parts_of, state_of, value_of
from fl_lightning.models.recipe import copied

log = logging.getLogger("fl_lightning")

Split = Literal["test", "val"]
STEPS: Mapping[Split, str] = {"test": "test_step", "val": "validation_step"}
"""The step of a module that is called for the test set, and for the clients' validation
examples."""
EPOCH_HOOKS = ("on_test_epoch_end", "on_validation_epoch_end", "on_test_end", "on_validation_end")
"""Hooks of a module that are not called, as no process has seen all batches."""
REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda values, weights: (values * weights).sum() / weights.sum(),
    "sum": lambda values, weights: values.sum(),
    "max": lambda values, weights: values.max(),
    "min": lambda values, weights: values.min(),
}
"""What is made of the numbers of all batches ``[n]`` and their sizes ``[n]``, by ``reduce_fx``."""
SAME = 1e-4
"""Difference, relative or absolute, up to which two means of the same numbers are one."""
ODD = re.compile(r"[^\w\-./: ]", re.ASCII)
"""What names of metrics have no place for."""


def call_step(module: Any, step: str, batch: Any, batch_idx: int) -> Any:
    """Call a step of a module, with the number of the batch if it takes one, whatever its name
    is."""
    function = getattr(module, step)
    parameters = list(signature(function).parameters.values())
    takes_index = len(parameters) > 1 and parameters[1].kind is not Parameter.KEYWORD_ONLY
    return function(*((batch, batch_idx) if takes_index else (batch,)))


class NoTrainer:
    """Stands where a module of the user's looks for its ``lightning.Trainer``: whatever it asks is
    answered with one line."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise InputError(
            f"--model.module {self._name} asks for self.trainer.{attribute}",
            "its steps are taken by FederatedTrainer and it has no lightning.Trainer",
            f"do without it in {self._name}, or write a Method, which knows self.round and self.seed",
        )


def try_steps(module: LightningModule, batch: Any) -> None:
    """Try out the steps that log on a batch. One that fails is left out of the run, and the log
    says why."""
    module.left_out_steps, module.names_left_out = (), set()  # type: ignore[assignment]
    for split, step in STEPS.items():
        if not has_step(module, split):
            continue
        try:
            logs = ModuleLogs(split)
            logs.add(0, copied(module), batch, 1)
            logs.try_metrics(module)
        except InputError as error:
            log.warning("%s.%s is left out: %s", type(module).__name__, step, error)
        except Exception as error:
            name = type(module).__name__
            log.warning("%s.%s is left out: it failed (%s)", name, step, error, exc_info=True)
        else:
            continue
        module.left_out_steps = (*module.left_out_steps, step)  # type: ignore[assignment, misc]
    ended = overridden(module, LightningModule, EPOCH_HOOKS)
    if ended:
        log.info(
            "%s of %s is not called: log in the steps", ", ".join(ended), type(module).__name__
        )


def has_step(network: Any, split: Split) -> bool:
    """Return whether a network is a module with a step of its own for this split."""
    step = STEPS[split]
    is_own = isinstance(network, LightningModule) and overrides(network, LightningModule, step)
    return is_own and step not in getattr(network, "left_out_steps", ())


class ModuleLogs:
    """What the step of a split has logged, batch by batch.

    Args:
        split: ``test`` or ``val``.
        seed: what the randomness of a step follows from.
        round: the round that is evaluated.
        tensors: states that were made elsewhere.

    Attributes:
        states: of each batch; those of other ranks are gathered by whoever asks for
            :meth:`metrics`.
    """

    def __init__(
        self,
        split: Split,
        seed: int = 0,
        round: int = 0,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.split, self.seed, self.round = split, seed, round
        self.states = MetricStates(tensors)
        self._module: Any = None

    def add(self, number: int, network: Any, batch: Any, size: int, batch_idx: int = 0) -> None:
        """Call the step for a batch and keep what it logs; nothing where the network has none.

        Args:
            number: of the batch, among all of all ranks.
            network: in evaluation mode or not; it stays as it is.
            batch: inputs and target.
            size: examples of the batch.
            batch_idx: what the step is told.
        """
        if not has_step(network, self.split):
            return
        self._module = network
        if network._trainer is None:  # a copy has lost it
            network.trainer = NoTrainer(type(network).__name__)
        parts = parts_of(network)
        for part in parts.values():
            clear(part)  # of training, whose logs are dropped
        logged: dict[str, tuple[str, Any]] = {}
        was_training = network.training
        try:
            with (
                torch.no_grad(),
                rng.torch_stream(self.seed, "logged", self.round, number),
                _recording(network, logged, size, parts),
            ):
                call_step(network.eval(), STEPS[self.split], batch, batch_idx)
            for name, (source, value) in logged.items():
                state: State = state_of(parts[source]) if source in parts else value
                self.states.add(number, self.full_name(name), state, source)
        finally:
            network.train(was_training)
            for part in parts.values():
                clear(part)

    def full_name(self, name: str) -> str:
        """Return the name in the run of what is logged under a name: after ``test/`` or ``val/``,
        if it does not begin so."""
        name = ODD.sub("_", name)
        return name if name.startswith(f"{self.split}/") else f"{self.split}/{name}"

    def beside(
        self, measured: dict[str, float], tensors: Mapping[str, Tensor], method: Any
    ) -> dict[str, float]:
        """Return the metrics that the run has measured, and those that were logged under other
        names. Where one of the same name has another value, the log says so once in a run.

        Args:
            measured: the run's metrics of the split, by their full names.
            tensors: the states of all ranks.
            method: the method of whose network the metrics are.
        """
        found, module = self.metrics(tensors, method.network), method.module
        for name in sorted(found.keys() & measured.keys() - module.names_left_out):
            if not np.isclose(found[name], measured[name], rtol=SAME, atol=SAME, equal_nan=True):
                module.names_left_out |= {name}
                log.warning(
                    "%s.%s logs %s as %.6g; the run measures %.6g and keeps that: log it under another name",
                    type(module).__name__,
                    STEPS[self.split],
                    name,
                    found[name],
                    measured[name],
                )
        return found | measured

    def metrics(self, tensors: Mapping[str, Tensor], module: Any) -> dict[str, float]:
        """Return the metrics by their full names.

        Args:
            tensors: the states of all ranks.
            module: what has the metrics that were logged.
        """
        parts = parts_of(module if self._module is None else self._module)
        found: dict[str, float] = {}
        for (source, name), states in MetricStates.of_metrics(tensors).items():
            if source in parts:
                found |= _numbers(name, value_of(parts[source], states))
            else:
                values, weights = (
                    torch.stack([state[key] for state in states]) for key in ("value", "weight")
                )
                found[name] = float(REDUCTIONS[source.removeprefix("=")](values, weights))
        return found

    def try_metrics(self, module: Any) -> None:
        """Compute what was logged of one batch, which may be too few examples for a metric.

        Raises:
            InputError: it is no number.
        """
        try:
            self.metrics(self.states.tensors, module)
        except InputError:
            raise
        except (ValueError, RuntimeError, IndexError):
            log.debug("too few examples", exc_info=True)


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Return the value of a metric as one number, or several where it is a dictionary."""
    if isinstance(value, Mapping):
        return {
            key: number
            for part, one in value.items()
            for key, number in _numbers(f"{name}_{part}", one).items()
        }
    if isinstance(value, Tensor) and value.numel() != 1:
        raise _no_number(name, list(value.shape))
    return {name: float(value)}


def _no_number(name: str, what: Any) -> InputError:
    return InputError(
        f"self.log({name!r}) of {what}", "what is logged is one number", "log its mean"
    )


@contextmanager
def _recording(
    module: Any, logged: dict[str, tuple[str, Any]], size: int, parts: Mapping[str, Metric]
) -> Iterator[None]:
    """Have ``self.log`` and ``self.log_dict`` fill ``logged``: by name, the path of a metric, or
    the reduction of a number (behind ``=``) with its state."""
    paths = {id(part): path for path, part in parts.items()}

    def keep(name: str, value: Any, *_: Any, **settings: Any) -> None:
        if settings.get("on_epoch") is False:
            return
        if isinstance(value, Metric):
            if id(value) not in paths:
                rule = "a metric is an attribute of the module, as in Lightning"
                raise InputError(f"self.log({name!r}) of a metric", rule, "make it in __init__")
            logged[name] = paths[id(value)], None
            return
        number = torch.as_tensor(value).detach().double().cpu()
        if number.numel() != 1:
            raise _no_number(name, list(number.shape))
        given = settings.get("reduce_fx", "mean")
        reduction = getattr(given, "__name__", given)
        if reduction not in REDUCTIONS:
            rule = f"it is one of {', '.join(REDUCTIONS)}"
            raise InputError(
                f"self.log({name!r}, reduce_fx={reduction})", rule, "leave it out for the mean"
            )
        weight = torch.tensor(float(settings.get("batch_size") or size), dtype=torch.float64)
        logged[name] = f"={reduction}", {"value": number.reshape(()), "weight": weight}

    def keep_all(values: Mapping[str, Any] | MetricCollection, *_: Any, **settings: Any) -> None:
        items = (
            values.items(copy_state=False)
            if isinstance(values, MetricCollection)
            else values.items()
        )
        for name, value in items:
            keep(name, value, **settings)

    before = {name: vars(module).get(name) for name in ("log", "log_dict")}
    module.log, module.log_dict = keep, keep_all
    try:
        yield
    finally:
        for name, function in before.items():
            if function is None:
                delattr(module, name)
            else:
                setattr(module, name, function)
