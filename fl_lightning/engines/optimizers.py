"""The clients' local optimisers: checked, fused, and known to be elementwise or not."""

from __future__ import annotations

import math
import re

from torch import optim
from torch.optim import LBFGS, Optimizer

from fl_lightning.errors import InputError
from fl_lightning.methods import Method
from fl_lightning.methods.optimizing import check_schedule, round_optimizer

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
"""Optimisers whose step on a stack of parameters is the step of each. Subclasses may do anything and do not
count."""

FUSED = (optim.SGD, optim.Adam, optim.AdamW)
"""One pass over the weights instead of several; 2.5 to 4.6 times as fast on a CPU."""
# weights; below, on a CPU, nothing is gained, and the unfused step is torch's default to the last bit
LARGE = 100_000


def local_optimizer(method: Method) -> Optimizer:
    """Return the method's local optimiser, at the learning rate of this round.

    For a large network, or on a GPU, it is fused, where the class can and the user has not said otherwise.
    """
    optimizer = round_optimizer(method)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    worth_it = sum(p.numel() for p in stepped) >= LARGE or any(p.device.type == "cuda" for p in stepped)
    for group in optimizer.param_groups if worth_it else ():
        said = any(group.get(name) for name in ("fused", "foreach", "differentiable", "capturable"))
        one_pass = type(optimizer) is optim.SGD and group["momentum"] == 0 and group["weight_decay"] == 0
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


def is_elementwise(optimizer: Optimizer) -> bool:
    return type(optimizer) in ELEMENTWISE


def _refused_argument(message: str) -> tuple[str, str]:
    """Return the name and the value of the argument that torch's optimisers say is invalid; empty texts where
    they do not say it.

    >>> _refused_argument("Invalid learning rate: -1.0"), _refused_argument("no such thing")
    (('lr', '-1.0'), ('', ''))
    """
    found = re.match(r"Invalid (learning rate|epsilon|[a-z_]+)(?: value)?: (.+)", message)
    if found is None:
        return "", ""
    return {"learning rate": "lr", "epsilon": "eps"}.get(found[1], found[1]), found[2]


def check_optimizer(method: Method, rounds: int = 1) -> None:
    """Refuse a method whose optimiser cannot make a local step, or whose schedule ends before the run does.

    Raises:
        InputError: it cannot be built, it wants a closure, or the schedule ends too early.
    """
    try:
        optimizer = round_optimizer(method)
        check_schedule(method, rounds)
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        name, value = _refused_argument(str(error))
        if name:
            given = f"--model.optimizer.{name} {value}"
            raise InputError(given, "the optimiser refuses it", "write another value") from error
        raise InputError(
            "--model.optimizer", f"it cannot be built ({error})", "correct that argument"
        ) from error
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    if not all(math.isfinite(rate) for rate in rates):
        raise InputError(
            f"--model.optimizer.lr {rates[0]}", "a learning rate is finite", "write --model.optimizer.lr 0.05"
        )
    if isinstance(optimizer, LBFGS):
        raise InputError(
            "--model.optimizer LBFGS",
            "a local step has one gradient and no closure",
            "write --model.optimizer SGD",
        )
