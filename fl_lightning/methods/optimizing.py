"""The local optimiser of a round: what ``configure_optimizers`` returns, at the learning rate that
a schedule gives this round, fused where that pays.

A client's optimiser lives for one round, so a schedule cannot be carried along. It is played anew
instead: a fresh scheduler steps round - 1 times. The learning rate is therefore a function of the
round alone, the same after a resume and in every process.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal

from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from fl_lightning.errors import InputError, as_bad_input
from fl_lightning.methods.returned_optimizers import steps_by_rounds, unpack

if TYPE_CHECKING:
    from fl_lightning.methods.base import Method

FUSED = (optim.SGD, optim.Adam, optim.AdamW)
"""One pass over the weights instead of several; 2.5 to 4.6 times as fast on a CPU."""
# weights; below, on a CPU, nothing is gained, and the unfused step is torch's default to the last
# bit
LARGE = 100_000

# values of groups, by round and what they began with; there is more than one where clients have
# different optimisers
MAX_SCHEDULES_KEPT = 64


def round_optimizer(method: Method) -> Optimizer:
    """Return a fresh local optimiser with the learning rates of ``method.round``.

    Raises:
        InputError: ``configure_optimizers`` returns something else than one optimiser, or its
            schedule cannot go by rounds.
    """
    given, where = method.configure_optimizers(), f"configure_optimizers of {_name(method)}"
    optimizer, scheduler, every = (
        (given, None, 1) if isinstance(given, Optimizer) else unpack(given, _name(method))
    )
    for made in (optimizer, *([] if scheduler is None else [scheduler])):
        _require_new(made, where)
    if scheduler is not None and method.scheduler_spec is not None:
        raise InputError(
            f"--model.scheduler beside the {type(scheduler).__name__} of "
            f"{_name(method)}.configure_optimizers",
            "a learning rate has one schedule",
            "leave one of them out",
        )
    if scheduler is None and method.scheduler_spec is None:
        return optimizer
    key = method.round, repr(_values(optimizer))
    if key not in method.scheduled_groups:
        if len(method.scheduled_groups) >= MAX_SCHEDULES_KEPT:
            method.scheduled_groups.clear()
        with warnings.catch_warnings():
            # torch: the optimiser should step first; this one has not yet
            warnings.simplefilter("ignore")
            if scheduler is None:
                assert method.scheduler_spec is not None
                instead = "correct it; in Python write scheduler=partial(StepLR, step_size=10)"
                wrong = NotImplementedError, TypeError, ValueError
                with as_bad_input("--model.scheduler", "it cannot be built", instead, *wrong):
                    scheduler = steps_by_rounds(
                        method.scheduler_spec(optimizer), "--model.scheduler"
                    )
            for _ in range((max(1, method.round) - 1) // every):
                scheduler.step()
        method.scheduled_groups[key] = _values(optimizer)
    for group, values in zip(
        optimizer.param_groups, deepcopy(method.scheduled_groups[key]), strict=True
    ):
        group.update(values)
    return optimizer


def local_optimizer(method: Method) -> Optimizer:
    """Return the method's local optimiser, at the learning rate of this round.

    For a large network, or on a GPU, it is fused, where the class can and the user has not said
    otherwise.
    """
    optimizer = round_optimizer(method)
    stepped = parameters_of(optimizer)
    worth_it = sum(p.numel() for p in stepped) >= LARGE or any(
        p.device.type == "cuda" for p in stepped
    )
    for group in optimizer.param_groups if worth_it else ():
        said = any(group.get(name) for name in ("fused", "foreach", "differentiable", "capturable"))
        one_pass = (
            type(optimizer) is optim.SGD and group["momentum"] == 0 and group["weight_decay"] == 0
        )
        if (
            type(optimizer) in FUSED
            and not one_pass
            and not said
            and group.get("fused") is None
            and group.get("foreach") is None
        ):
            group["fused"] = all(
                p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in group["params"]
            )
    return optimizer


def round_lr(method: Method) -> float:
    """Return the learning rate of ``method.round``, of an optimiser that has one for all
    parameters."""
    return float(round_optimizer(method).param_groups[0]["lr"])


def _require_new(made: Any, where: str) -> None:
    """Refuse an optimiser or a scheduler that was returned before: it would pass what it keeps from
    one client to the next."""
    if "returned_before" in vars(made):
        raise InputError(
            f"{where} returns one {type(made).__name__} twice",
            "each client has its own in each round, so that nothing passes from one to the next",
            "make it inside configure_optimizers",
        )
    made.returned_before = True


def clip_gradients(optimizer: Optimizer, value: float, algorithm: Literal["norm", "value"]) -> None:
    """Clip the gradient of what ``optimizer`` steps on: its L2 norm over all parameters, or each of
    its values, to ``value``."""
    parameters = parameters_of(optimizer)
    if algorithm == "value":
        clip_grad_value_(parameters, value)
    else:
        clip_grad_norm_(parameters, value)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return what an optimiser steps on, of all its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return everything in its groups but the parameters."""
    return [
        deepcopy({name: value for name, value in group.items() if name != "params"})
        for group in optimizer.param_groups
    ]


def _name(method: Method) -> str:
    own = method.module is not None and method.module_optimizes
    return type(method.module if own else method).__name__
