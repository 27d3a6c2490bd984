"""What a network must be: a module that its maker returns, and outputs that the task can use."""

from __future__ import annotations

import sys
from inspect import isclass
from typing import Any

import torch
from torch import nn

from fl_lightning.errors import InputError
from fl_lightning.models.recipe import innermost
from fl_lightning.tasks import Task


def check_maker(make: Any, given: object) -> None:
    """Refuse a callable that cannot return a network, before it is called.

    The call could do harm: ``os.system``, ``sys.exit``, a reader of pickles. A class must be a
    subclass of ``nn.Module``. A function must not come from Python's standard library or from
    torch, which have no functions that return networks, unless its annotation says that it returns
    one.
    """
    make = innermost(make)
    if isclass(make):
        good = issubclass(make, nn.Module)
    else:
        module = getattr(make, "__module__", None) or type(make).__module__
        returned = getattr(make, "__annotations__", {}).get("return")
        good = module.partition(".")[0] not in {"torch", *sys.stdlib_module_names} - {"__main__"}
        good = good or (isclass(returned) and issubclass(returned, nn.Module))
    if not (callable(make) and good):
        raise InputError(
            f"network={name_of(given)}",
            "a network is a subclass of torch.nn.Module, or a function of yours, of timm or of "
            "torchvision that returns one",
            "write e.g. torchvision.models.resnet18",
        )


def check_outputs(
    made: nn.Module, given: str, num_outputs: int, inputs: Any, logits: bool, task: Task
) -> None:
    """Refuse a network that does not map inputs of two examples to the outputs that the task needs.

    Args:
        given: how a message names it.
    """
    if getattr(made, "reads_tokens", False) and not task.of_tokens:
        raise InputError(
            f"{given} where the task is {type(task).__name__}",
            "a language model reads examples of tokens",
            "write small_cnn for images, or take data of tokens",
        )
    unreal = [name for name, values in made.named_parameters() if values.is_complex()]
    if unreal:
        raise InputError(
            f"{given} with complex numbers in {unreal[0]}",
            "weights travel as real numbers",
            "hold the real and the imaginary part in two tensors",
        )
    was_training = made.training
    needed = task.outputs_form("B", num_outputs)
    try:
        with torch.no_grad():
            outputs = made.eval()(inputs)
    except InputError:  # the network refuses these inputs itself
        raise
    except Exception as error:
        raise InputError(
            f"{given}: it raised {error_text(error)}",
            f"it has to map {_form_of(inputs)} to {needed}",
            "correct its forward method or its sizes",
        ) from error
    finally:
        made.train(was_training)
    is_batch = isinstance(outputs, torch.Tensor) and outputs.ndim == 2 and len(outputs) == 2
    if not (task.accepts(outputs, num_outputs, 2) if logits else is_batch):
        found = (
            tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        )
        raise InputError(
            f"{given} makes {found} of two examples",
            f"{task.outputs_form('2', num_outputs)} are needed",
            "correct its forward method or its sizes",
        )


def _form_of(inputs: Any) -> str:
    """Return the shape of inputs, or those of a dictionary by name, for a message."""
    if isinstance(inputs, torch.Tensor):
        kind = (
            "examples"
            if inputs.is_floating_point()
            else f"{str(inputs.dtype).removeprefix('torch.')}"
        )
        return f"{kind} [B, {', '.join(map(str, inputs.shape[1:]))}]"
    if isinstance(inputs, dict):
        return (
            "{" + ", ".join(f"{name!r}: {_form_of(value)}" for name, value in inputs.items()) + "}"
        )
    return type(inputs).__name__


def name_of(given: object) -> str:
    """Return the name of a class or callable, for a message."""
    given = innermost(given)
    if isinstance(given, str):
        return repr(given)
    if hasattr(given, "__qualname__"):
        return f"{given.__module__}.{given.__qualname__}"
    return type(given).__qualname__


def error_text(error: Exception) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split())[:300]})"
