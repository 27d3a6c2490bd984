"""Parameters, buffers and optimiser state of several clients of one kind, each tensor as ``[K,
...]``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.engines.optimizers import is_elementwise
from fl_lightning.methods import Method
from fl_lightning.methods.optimizing import local_optimizer
from fl_lightning.metrics import Mean


class CannotStackError(Exception):
    """Raised where clients of this method, network or optimiser cannot be trained as one stack."""


class NeverStacksError(CannotStackError):
    """Raised where that is so whichever clients they are, and in every round."""


class Stack:
    """The tensors of K clients between two local steps.

    In a step some of them take part, in one group or several (:meth:`part`, :meth:`step`,
    :meth:`put`), and :meth:`end_step` ends it. Whoever takes part in a step took part in all before
    it, so that what an optimiser counts is the same for all of them.

    Args:
        method: as it is for the first of them; its local optimiser steps on the stacks.
        rows: the tensors of each, by name.
        constants: names of tensors that no step changes. One that is the same tensor in all rows is
            in ``shared`` and not in ``tensors``: there is no copy of it for each client.

    Raises:
        CannotStackError: the optimiser is not elementwise, or it or a parameter has hooks.
    """

    def __init__(
        self, method: Method, rows: Sequence[Mapping[str, Tensor]], constants: Collection[str] = ()
    ) -> None:
        self.size = len(rows)
        self.shared = {
            name: rows[0][name]
            for name in constants
            if all(row[name] is rows[0][name] for row in rows)
        }
        self.tensors = {
            name: torch.stack([row[name] for row in rows])
            for name in rows[0]
            if name not in self.shared
        }
        self.optimizer = local_optimizer(method)
        self.clip = method.gradient_clip_val, method.gradient_clip_algorithm
        if not is_elementwise(self.optimizer):
            raise NeverStacksError(
                f"a step of {type(self.optimizer).__name__} on a stack is not known to be the step of each"
            )
        if hooked := hooked_by(method, self.optimizer):
            raise NeverStacksError(f"{hooked} has hooks, which would see a stack or nothing")
        names = {id(parameter): name for name, parameter in method.named_parameters()}
        self.groups = [
            [names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups
        ]
        self.trained = {
            name for name, parameter in method.named_parameters() if parameter.requires_grad
        }
        # some have one before the first step
        state = {names[id(p)]: state for p, state in self.optimizer.state.items()}
        self.state = {
            name: {
                key: value.expand(self.size, *value.shape).clone()
                if _is_row(key, value, rows[0][name])
                else value
                for key, value in values.items()
            }
            for name, values in state.items()
        }
        self.counts: dict[str, dict[str, Any]] = {}

    def part(self, where: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the rows ``where``: leaves to differentiate by, and all others that are not
        shared."""
        rows = {name: self._take(tensor, where) for name, tensor in self.tensors.items()}
        leaves = {
            name: rows.pop(name).detach().requires_grad_()
            for name in self.tensors
            if name in self.trained
        }
        return leaves, rows

    @torch.no_grad()
    def step(self, where: Sequence[int], leaves: Mapping[str, Tensor]) -> None:
        """Make an optimiser step on ``leaves``, the rows ``where``, with each row's gradients
        clipped by themselves."""
        optimizer = self.optimizer
        clip_rows([leaves[name].grad for names in self.groups for name in names], *self.clip)
        optimizer.state.clear()
        for group, names in zip(optimizer.param_groups, self.groups, strict=True):
            group["params"] = [leaves[name] for name in names]
            for name in names:
                if name in self.state:
                    optimizer.state[leaves[name]] = {
                        key: self._take(value, where)
                        if self._is_rows(value, name)
                        else _copy(value)
                        for key, value in self.state[name].items()
                    }
        optimizer.step()
        for name in (name for names in self.groups for name in names):
            for key, value in optimizer.state[leaves[name]].items():
                if isinstance(value, Tensor) and value.shape == leaves[name].shape:
                    kept = self.counts.setdefault(name, {})
                    full = self.state.get(name, {}).get(key, kept.get(key))
                    kept[key] = self._put(
                        torch.empty_like(self.tensors[name]) if full is None else full, where, value
                    )
                else:
                    self.counts.setdefault(name, {})[key] = value

    @torch.no_grad()
    def put(self, where: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Set the rows ``where``."""
        for name, tensor in tensors.items():
            self.tensors[name] = self._put(self.tensors[name], where, tensor)

    def end_step(self) -> None:
        """End a step: all who take part in it have."""
        self.state, self.counts = {**self.state, **self.counts}, {}

    def rows(self) -> list[dict[str, Tensor]]:
        """Return the tensors of each client, by name."""
        columns = [tensor.unbind() for tensor in self.tensors.values()]
        rows = zip(*columns, strict=True)
        return [dict(zip(self.tensors, row, strict=True)) | self.shared for row in rows]

    def _take(self, tensor: Tensor, where: Sequence[int]) -> Tensor:
        return tensor if len(where) == self.size else tensor[list(where)]

    def _put(self, full: Tensor, where: Sequence[int], part: Tensor) -> Tensor:
        if len(where) == self.size:
            return part
        full[list(where)] = part
        return full

    def _is_rows(self, value: object, name: str) -> bool:
        return isinstance(value, Tensor) and value.shape == self.tensors[name].shape


class StackLosses:
    """The sum over examples of each loss term, for each of ``size`` clients, as
    :class:`fl_lightning.engines.base.LossSums` has it for one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sums: dict[str, Tensor] = {}
        self.seen: dict[str, np.ndarray] = {}

    def add(self, outputs: Mapping[str, Tensor], size: int, where: Sequence[int]) -> None:
        """Add terms ``[len(where)]``, each a mean over ``size`` examples, of the clients
        ``where``."""
        for name, value in outputs.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros(self.size, dtype=torch.float64, device=value.device)
                self.seen[name] = np.zeros(self.size, np.int64)
            self.sums[name][list(where)] += value.double() * size
            self.seen[name][list(where)] += size

    def means(self) -> list[dict[str, Mean]]:
        """Return each client's means, by term; a term that a client never had is left out."""
        sums = {name: values.tolist() for name, values in self.sums.items()}
        seen = {name: values.tolist() for name, values in self.seen.items()}
        return [
            {name: Mean(sums[name][at], seen[name][at]) for name in sums if seen[name][at]}
            for at in range(self.size)
        ]


def clip_rows(gradients: Sequence[Tensor | None], value: float | None, algorithm: str) -> None:
    """Clip, in place, what each client would clip by itself, as ``torch.nn.utils`` does.

    Args:
        gradients: of all parameters that are stepped on, each ``[K, ...]``; None where there is
            none.
        value: largest L2 norm of a client's gradient over all of them, or largest absolute value;
            None: nothing is clipped.
        algorithm: ``norm`` or ``value``.
    """
    found = [gradient for gradient in gradients if gradient is not None]
    if value is None or not found:
        return
    if algorithm == "value":
        for gradient in found:
            gradient.clamp_(-value, value)
        return
    norms = torch.stack(
        [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in found]
    )
    factor = (value / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in found:
        gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))


def hooked_by(method: Method, optimizer: Optimizer) -> str:
    """Return what of a client's steps somebody has hooked into, empty where nothing is.

    A step on a stack has other leaves than the parameters, and is one step of the optimiser.
    """
    for name, parameter in method.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"parameter {name}"
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return type(optimizer).__name__ if any(vars(optimizer).get(name) for name in hooks) else ""


def _is_row(key: str, value: object, parameter: Tensor) -> bool:
    return key != "step" and isinstance(value, Tensor) and value.shape == parameter.shape


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
