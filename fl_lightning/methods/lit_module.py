"""A LightningModule that knows nothing of federations, as a method's network and task loss."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from types import MethodType
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from fl_lightning.aggregation.server import SummingServer
from fl_lightning.config.not_called import overridden, warn_of_ignored
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError, MisuseError, require
from fl_lightning.methods.module_steps import EPOCH_HOOKS, NoTrainer, call_step, try_steps
from fl_lightning.metrics.states import parts_of
from fl_lightning.models.checks import check_outputs
from fl_lightning.models.recipe import copied, innermost
from fl_lightning.models.tensors import constant_buffers, moving_buffers
from fl_lightning.support.appearance import appearance

log = logging.getLogger("fl_lightning")


STEP_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
"""What a LightningModule may override to change a training step, and the engines do not call."""
NOT_CALLED = sorted(
    {"configure_callbacks"}
    | {
        name
        for base in (ModelHooks, DataHooks, CheckpointHooks)
        for name, function in vars(base).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }
    - {*STEP_HOOKS, *EPOCH_HOOKS}
)
"""Its other hooks, which are not called either."""
LIBRARY = {
    *vars(LightningModule()),
    "gave_loss",
    "frozen_norms",
    "log",
    "log_dict",
    "told",
    "train",
}
"""Attributes of a LightningModule that are Lightning's, torch's or set by the project."""
NORM_TOLERANCE = 1e-9
"""Relative, between norms in float64 of the same values on two devices."""


class Host(Protocol):
    """What is read of the method that a module is part of."""

    module: LightningModule | None
    untrained: tuple[LightningModule | None]
    module_optimizes: bool
    network_spec: Any
    optimizer_spec: Any
    adapters: Any


def own_copy(module: LightningModule | None) -> LightningModule | None:
    """Return a copy of what a user gives a method.

    Raises:
        InputError: it is no LightningModule, such as its class.
    """
    if module is not None and not isinstance(module, LightningModule):
        name = getattr(innermost(module), "__name__", type(module).__name__)
        is_built = isinstance(module, nn.Module)
        raise InputError(
            f"module={name}",
            "it is a lightning.pytorch.LightningModule that is built, and each run trains a copy",
            f"let {name} derive from it, uncompiled" if is_built else f"write module={name}(...)",
        )
    return None if module is None else copied(module)


def check_module(method: Host, module: LightningModule) -> None:
    """Refuse what cannot be a module of this method, or what would be ignored beside one.

    Raises:
        ValueError: in three parts.
    """
    name, mine = type(module).__name__, type(method).__name__
    require(
        not isinstance(module, SummingServer),
        f"--model.module {name}",
        "it is a method itself",
        f"write --model {name}",
    )
    constructors = (inspect.signature(cls).parameters for cls in type(method).__mro__)
    if method.network_spec != next(
        each["network"].default for each in constructors if "network" in each
    ):
        raise InputError(
            f"--model.network {method.network_spec} beside --model.module {name}",
            "the module is the network",
            "leave one of them out",
        )
    if not method.module_optimizes and method.optimizer_spec is None:
        raise InputError(
            f"--model.module {name} with --model {mine} and no optimizer",
            f"its clients train other tensors than the module's parameters, so {name}.configure_optimizers "
            "cannot be used",
            "write --model.optimizer SGD --model.optimizer.lr 0.05",
        )
    ignored = overridden(module, LightningModule, STEP_HOOKS)
    if ignored:
        raise InputError(
            f"--model.module {name}, which overrides {', '.join(ignored)}",
            "a client's steps are the engine's, which calls no such hook",
            "leave it out, or do it in training_step or configure_optimizers",
        )
    if not module.automatic_optimization:
        raise InputError(
            f"--model.module {name} with manual optimisation",
            "a client's steps are the engine's",
            "set automatic_optimization and return the loss from training_step",
        )


def adopt(method: Host, module: LightningModule, data: FederatedData) -> LightningModule:
    """Make the module the method's network: its logits and one training step of a copy are tried
    out.

    Raises:
        ValueError: its ``forward`` gives no logits, its ``training_step`` no loss, or it uses
            ``self.trainer``.
    """
    for one in module.modules():
        if isinstance(one, LightningModule):
            one.log = one.log_dict = _logs_nothing  # type: ignore[method-assign, assignment]
    _stay_in_eval(module)
    _say_what_is_ignored(module)
    module.trainer = NoTrainer(type(module).__name__)  # type: ignore[assignment]
    name = type(module).__name__
    inputs = data.example_inputs()
    check_outputs(
        module.eval(),
        f"--model.module {name}",
        data.num_classes,
        inputs,
        logits=True,
        task=data.task,
    )
    client = data.client(int(data.active[0]))
    batch = next(iter(data.train_batches(client, round=1, epochs=1, steps=1)))
    module.gave_loss = False  # type: ignore[assignment]
    batch = tree_map(lambda tensor: tensor.cpu(), batch)
    trial = copied(module).train()
    as_given = method.untrained[0] or module  # its features, say, are of no step
    before = unsaved_of(trial, as_given)
    try:
        loss = module_loss(trial, batch, 0)
        if not loss.requires_grad:
            raise no_descent(method, loss, module)
    except MisuseError as error:
        raise InputError(error.given, error.rule, error.instead) from error
    _say_what_stays(module, trial)
    after = unsaved_of(trial, as_given)
    told = sorted(each for each, seen in before.items() if after[each] != seen)
    module.told = told  # type: ignore[assignment]
    for each in told:
        warn_of_unsaved(name, each, "a step")
    try_steps(module, batch)
    frozen = [
        one for one in module.parameters() if one.is_floating_point() and not one.requires_grad
    ]
    module.frozen_norms = [(one, _norm(one)) for one in frozen]  # type: ignore[assignment]
    if method.optimizer_spec is not None:
        used, unused = f"{name}.configure_optimizers", "--model.optimizer"
        if not method.module_optimizes:
            used, unused = unused, used
        log.info("the local optimiser is that of %s; %s is not used", used, unused)
    return module


def loss_and_logits(
    module: Any,
    batch: Any,
    batch_idx: int,
    weights: Mapping[str, Tensor] | None,
    network: nn.Module | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of the module's ``training_step``, and its network's logits ``[B, C]``; None
    without a network. The logits' pass moves no statistics: the module's own does."""
    logits = None
    if network is not None:
        given = weights or {}
        moving = {
            name: given[name].clone() if name in given else buffer
            for name, buffer in moving_buffers(network).items()
        }
        logits = functional_call(network, {**given, **moving}, (batch[0],))
    return module_loss(module, batch, batch_idx, weights), logits


def module_loss(
    module: Any, batch: Any, batch_idx: int, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return the loss of the module's ``training_step``.

    Args:
        weights: by parameter name, what is computed with in place of the module's own.

    Raises:
        MisuseError: there is none.
    """
    module.gave_loss = True
    if module._trainer is None:  # a copy has lost it
        module.trainer = NoTrainer(type(module).__name__)
    if weights is None:
        outputs = call_step(module, "training_step", batch, batch_idx)
    else:
        outputs = functional_call(
            _Stepper(module),
            {f"module.{name}": w for name, w in weights.items()},
            (batch, batch_idx),
        )
    loss: Any = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor):
        raise MisuseError(
            f"{type(module).__name__}.training_step returned {type(loss).__name__} as loss",
            "a local step needs a loss, and no batch is skipped",
            "return one for each batch",
        )
    if loss.numel() != 1:
        raise MisuseError(
            f"{type(module).__name__}.training_step returned a loss of shape {tuple(loss.shape)}",
            "a local step descends along one number",
            "return its mean",
        )
    return loss.reshape(())


def no_descent(method: Any, loss: Tensor, module: Any = None) -> MisuseError:
    """Return what is wrong with a loss that no step descends along: it is no number, or has no
    gradient."""
    module, task = module or method.module, getattr(method, "task", None)
    name = type(method if module is None else module).__name__
    by = f" with {type(task).__name__}.loss" if module is None and task is not None else ""
    what = "without a gradient" if loss.numel() == 1 else f"of shape {tuple(loss.shape)}"
    rule = "a local step descends along one number"
    instead = "compute it with trained weights" if loss.numel() == 1 else "return its mean"
    return MisuseError(f"{name}.training_step{by} returned a loss {what}", rule, instead)


def end_steps(method: Host) -> None:
    """Refuse what the steps of a method's module have shown.

    Raises:
        TypeError: the method's ``training_step`` never asked the module for its loss.
        MisuseError: a parameter of the module that required no gradient has changed.
    """
    module, mine = method.module, type(method).__name__
    if module is None:
        return
    name = type(module).__name__
    if not getattr(module, "gave_loss", False):
        raise TypeError(
            f"--model.module {name} with --model {mine}, whose training_step never asks {name} for a "
            "loss; it would be ignored; call super().training_step there, or give the reason in "
            f"{mine}.refuses['module']"
        )
    if not method.adapters.moves_base:
        _require_frozen(module, name)


def unsaved_of(module: LightningModule, as_given: nn.Module) -> dict[str, str]:
    """Return how what no checkpoint has of a module looks, by its name: the attributes that its
    parts had as they were given, and whether a parameter is trained. What a step leaves behind,
    such as features, is made anew in the next; metrics are cleared before each client."""
    given, metrics = dict(as_given.named_modules()), parts_of(module)
    found: dict[str, str] = {}
    for path, part in module.named_modules():
        if path in metrics or path not in given:
            continue
        first, prefix = vars(given[path]), f"{path}." if path else ""
        names = {name for name in vars(part) if first.get(name) is not None} - LIBRARY
        found |= {f"{prefix}{name}": appearance(vars(part)[name]) for name in names}
    return found | {
        f"{name}.requires_grad": str(parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }


def warn_of_unsaved(owner: str, name: str, when: str) -> None:
    """Say that an attribute of a module has changed."""
    log.warning(
        "%s.%s has changed in %s and is in no checkpoint: a continued run lacks it, and each client "
        "has it from the one before; make it a buffer by register_buffer, or let it follow from the "
        "arguments",
        owner,
        name,
        when,
    )


def _require_frozen(module: Any, name: str) -> None:
    # a method's experts rename some
    names = {one: tensor for tensor, one in module.named_parameters()}
    for one, norm in module.frozen_norms:
        if one in names and not math.isclose(_norm(one), norm, rel_tol=NORM_TOLERANCE):
            raise MisuseError(
                f"--model.module {name}, whose {names[one]} did not require a gradient when the run began, "
                "and has changed",
                "it is in no message and no checkpoint, and would pass from one client to the next",
                "make it a buffer by register_buffer, which travels and is averaged, or let it require a "
                "gradient in __init__",
            )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _stay_in_eval(module: LightningModule) -> None:
    """Have parts that are in evaluation mode stay so, as Lightning does from 2.2 on: it is how a
    backbone's BatchNorm and dropout are frozen."""
    still = [one for one in module.modules() if not one.training]
    for one in still:
        one.train = MethodType(_unchanged, one)  # type: ignore[method-assign]
    if still:
        log.info("%d parts of %s are in eval mode and stay so", len(still), type(module).__name__)


def _unchanged(self: nn.Module, mode: bool = True) -> nn.Module:
    return self


def _say_what_is_ignored(module: LightningModule) -> None:
    steps = (
        "not called; steps are the engine's: use __init__, training_step or configure_optimizers"
    )
    warn_of_ignored(overridden(module, LightningModule, NOT_CALLED), module, steps)


def _is_same(values: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(values.nan_to_num(), other.nan_to_num())


def _say_what_stays(module: LightningModule, trial: LightningModule) -> None:
    """Say which buffers no client passes on, given a copy that has made a step."""
    constants, moved = constant_buffers(module), dict(trial.named_buffers())
    counted = {
        f"{name}.num_batches_tracked"
        for name, part in module.named_modules()
        if getattr(part, "momentum", None) is not None  # else its averages go by the count
    }
    left = [
        name
        for name, values in module.named_buffers()
        if (
            (name in constants and not _is_same(values, moved.get(name)))
            or not (values.is_floating_point() or name in constants or name in counted)
        )
    ]
    start = (
        "persistent buffers of floating point travel, others do not, and each client begins each "
        "round with those of __init__"
    )
    warn_of_ignored(left, module, start)


class _Stepper(nn.Module):
    """``functional_call`` calls ``forward``; this one calls ``training_step``."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, batch_idx: int) -> Any:
        return call_step(self.module, "training_step", batch, batch_idx)


def _logs_nothing(*args: Any, **settings: Any) -> None:
    """Do nothing: in training it replaces ``LightningModule.log``, which needs a
    ``lightning.Trainer``."""
