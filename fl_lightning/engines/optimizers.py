"""What is asked of a local optimiser before a run: whether it can be used, and on a stack of
clients."""

from __future__ import annotations

import math
import re
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from fl_lightning.errors import InputError, as_bad_input, require
from fl_lightning.methods import Method
from fl_lightning.methods.optimizing import round_optimizer
from fl_lightning.methods.returned_optimizers import unpack
from fl_lightning.models.recipe import innermost

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.Adagrad,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
"""Optimisers whose step on a stack of parameters is the step of each. Subclasses may do anything
and do not count."""


def is_elementwise(optimizer: Optimizer) -> bool:
    return type(optimizer) in ELEMENTWISE


def _refused_argument(message: str) -> tuple[str, str]:
    """Return the name and the value of the argument that torch's optimisers say is invalid; empty
    texts where they do not say it.

    >>> _refused_argument("Invalid learning rate: -1.0"), _refused_argument("no such thing")
    (('lr', '-1.0'), ('', ''))
    """
    found = re.match(r"Invalid (learning rate|epsilon|[a-z_]+)(?: value)?: (.+)", message)
    if found is None:
        return "", ""
    return {"learning rate": "lr", "epsilon": "eps"}.get(found[1], found[1]), found[2]


def check_schedule(method: Method, rounds: int) -> None:
    """Play the schedule once through, so that it is refused now and not in mid-run.

    Raises:
        InputError: it ends before the run does, or gives a learning rate that is negative or not
            finite.
    """
    before, round = method.round, 1
    try:
        for round in range(1, rounds + 1):
            method.round = round
            optimizer = round_optimizer(method)
            if not method.scheduled_groups:
                return
            method.check_rates()
            if round == 1:
                _check_several_rates(method, optimizer)
            lrs = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
            if not all(math.isfinite(lr) and lr >= 0 for lr in lrs):
                raise InputError(
                    f"the learning-rate schedule gives {lrs} in round {round}",
                    "a learning rate is finite, 0 or more",
                    "change the schedule",
                )
    except InputError:
        raise
    except (ValueError, TypeError, ArithmeticError, KeyError) as error:
        if round == 1 and method.scheduler_spec is None:
            raise
        raise InputError(
            "the schedule of configure_optimizers"
            if method.scheduler_spec is None
            else "--model.scheduler",
            f"it cannot be played to round {round} of {rounds} ({error})",
            "correct it; it goes by rounds",
        ) from error
    finally:
        method.round = before
        method.scheduled_groups.clear()


def _check_several_rates(method: Method, scheduled: Optimizer) -> None:
    """Refuse a schedule that sets the rates of all groups, where the method gives one of its own to
    some."""
    if method.scheduler_spec is None:
        return
    own = [group.get("lr") for group in unpack(method.configure_optimizers(), "")[0].param_groups]
    begun = {group.get("initial_lr") for group in scheduled.param_groups}
    require(
        len({*own}) == 1 or len(begun) > 1,
        f"--model.scheduler that sets a rate, with learning rates {own}",
        "it sets one for all parameters, and theirs would be ignored",
        "give it a list of as many, such as max_lr: [0.1, 0.01], or take one that scales rates",
    )


def check_optimizer_settings(method: Method) -> None:
    """Refuse settings that an optimiser says are invalid, before there is a network.

    Raises:
        InputError: it says so of one parameter; what else one that is not torch's may refuse, it is
            asked later.
    """
    if method.optimizer_spec is None:
        return
    try:
        method.optimizer_spec([nn.Parameter(torch.zeros(2, 2))])
    except Exception as error:
        if _is_torchs(innermost(method.optimizer_spec)) or _refused_argument(str(error))[0]:
            raise _refusal(error) from error


def _is_torchs(kind: Any) -> bool:
    return str(kind.__module__).startswith("torch.optim")


def _refusal(error: Exception) -> InputError:
    """Return the refusal of an optimiser whose constructor raised ``error``: of the argument that
    this names, where it does."""
    name, value = _refused_argument(str(error))
    if name:
        given = f"--model.optimizer.{name} {value}"
        return InputError(given, "the optimiser refuses it", "write another value")
    return InputError(
        "--model.optimizer",
        f"it cannot be built ({error})",
        "correct that argument; in Python write optimizer=partial(torch.optim.SGD, lr=0.05)",
    )


def check_optimizer(method: Method, rounds: int = 1) -> None:
    """Refuse a method whose optimiser cannot make a local step, or whose schedule ends before the
    run does.

    Raises:
        InputError: it cannot be built, it wants a closure, it is torch's and cannot make a step, or
            the schedule ends too early.
    """
    try:
        optimizer = round_optimizer(method)
        check_schedule(method, rounds)
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise _refusal(error) from error
    for rate in (group["lr"] for group in optimizer.param_groups if "lr" in group):
        require(
            math.isfinite(rate),
            f"--model.optimizer.lr {rate}",
            "a learning rate is finite",
            "write --model.optimizer.lr 0.05",
        )
    where = "configure_optimizers returns" if method.optimizer_spec is None else "--model.optimizer"
    given, instead = f"{where} {type(optimizer).__name__}", "write --model.optimizer SGD"
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise InputError(given, "a local step has one gradient and no closure", instead)
    sparse = any(getattr(module, "sparse", False) is True for module in method.modules())
    if _is_torchs(type(optimizer)) and not sparse:
        with as_bad_input(given, "it can make no local step", instead, Exception):
            _step_on_zeros(optimizer)


def _step_on_zeros(optimizer: Optimizer) -> None:
    """Make a step of another optimiser of the same class and settings, on one small parameter for
    each group, with a gradient of zeros."""
    groups = [{**group} for group in optimizer.param_groups if group["params"]]
    for group in groups:
        group.pop("param_names", None)
        small = nn.Parameter(group["params"][0].detach().new_zeros(2, 2))
        small.grad = torch.zeros_like(small)
        group["params"] = [small]
    if groups:
        kind: Any = type(optimizer)
        other = kind(groups)
        other.defaults = optimizer.defaults
        other.step()
