"""Whether data of the user's own class are what methods, partitions and metrics take them for.

``N`` training examples, ``n`` test examples, ``C`` classes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.data.base import FederatedData
from fl_lightning.data.partition import Natural
from fl_lightning.errors import InputError, require
from fl_lightning.tasks import Classification, Regression, Task


def check_training_set(data: FederatedData) -> None:
    """Refuse what a partition would stumble over; call it after ``setup``.

    Raises:
        InputError: the constructor or ``setup`` left something out, or a target or a group is out
            of range.
    """
    for attribute in ("num_classes", "example_shape", "train_target"):
        where = "setup" if attribute == "train_target" else "its constructor"
        given = f"data {type(data).__name__}, which has no {attribute}"
        require(hasattr(data, attribute), given, f"{where} sets {attribute}", "set it there")
    if not isinstance(data.task, Task):
        given = f"data {type(data).__name__}, whose task is {data.task!r}"
        raise InputError(given, "it is a fl_lightning.tasks.Task", "write task = Regression()")
    _check_target(data, "train_target")
    if hasattr(data, "test_target"):
        _check_target(data, "test_target")
    _check_groups(data, "train_group", len(data.train_target))
    if isinstance(data.partition, Natural) or data.run_form is not None:  # else nobody reads it
        _check_marks(data, "train_owner", len(data.train_target), "training")
    _check_marks(data, "train_held_out", len(data.train_target), "training")


def check_test_set(data: FederatedData) -> None:
    """Refuse a test set that is empty, or of wrong targets, groups or owners; call it after
    ``distribute``, which may set it."""
    _check_target(data, "test_target")
    _check_groups(data, "test_group", len(data.test_target))
    if data.test_holdings is None:  # they say whose each is
        _check_marks(data, "test_owner", len(data.test_target), "test")
    if data.run_form is None:  # a node of a deployment has none
        given = f"data {type(data).__name__} without a test example"
        require(len(data.test_target), given, "runs are evaluated on them", "set some aside")


def _check_groups(data: FederatedData, attribute: str, count: int) -> None:
    """Refuse groups of examples that nothing can go by."""
    group, given = getattr(data, attribute), f"data {type(data).__name__}, whose {attribute}"
    if not isinstance(group, Tensor):
        kind = f"{type(group).__module__}.{type(group).__name__}"
        raise InputError(f"{given} is {kind}", "groups are a tensor", "write torch.as_tensor(...)")
    integers = not group.is_floating_point() and len(group) == count
    require(
        integers and (not len(group) or int(group.min()) >= 0),
        f"{given} is {group.dtype} {list(group.shape)}",
        f"it has an integer for each of {count} examples, and groups are 0, 1, ...",
        "number the groups from 0",
    )


def _check_marks(data: FederatedData, attribute: str, count: int, split: str) -> None:
    """Refuse an array with another number of entries than the split has examples, or of another
    type; None says nothing of them."""
    found = getattr(data, attribute)
    if found is None:
        return
    kinds, kind = ("b", "bool") if attribute == "train_held_out" else ("iu", "int64")
    array = np.asarray(found)
    require(
        array.dtype.kind in kinds and array.shape == (count,),
        f"data {type(data).__name__}, whose {attribute} is {array.dtype} {list(array.shape)}",
        f"it has one entry for each {split} example, {kind} [{count}]",
        "write an array of that form, or None",
    )


def _check_target(data: FederatedData, attribute: str) -> None:
    target, given = getattr(data, attribute), f"data {type(data).__name__}, whose {attribute}"
    if not isinstance(target, Tensor):
        raise InputError(
            f"{given} is {type(target).__module__}.{type(target).__name__}",
            "targets are a tensor, with one entry for each example",
            "write torch.as_tensor(...)",
        )
    if not len(target):
        return
    if type(data.task) is Classification:
        _check_classes(target, data.num_classes, given)
    elif type(data.task) is Regression:  # a task of one's own may leave NaN out
        given_type, number = f"{given} is {target.dtype}", target.is_floating_point()
        require(number, given_type, "what is regressed on is float32", "write .float()")
        finite = target.isfinite().all()
        require(
            finite,
            f"{given} holds NaN or infinity",
            "targets are finite",
            "leave those examples out",
        )


def _check_classes(target: Tensor, num_classes: int, given: str) -> None:
    if target.dtype not in (torch.int64, torch.uint8) or target.ndim != 1:
        raise InputError(
            f"{given} is {target.dtype} {list(target.shape)}",
            "classes are int64, one for each example",
            "write .long() and .flatten()",
        )
    least, most = (int(value) for value in torch.aminmax(target))
    if least < 0 or most >= num_classes:
        raise InputError(
            f"{given} has classes from {least} to {most}",
            f"with num_classes={num_classes} they are 0 to {num_classes - 1}",
            "number the classes from 0, or set num_classes",
        )


def check_inputs(data: FederatedData) -> None:
    """Refuse inputs that are no tensors or of another shape than ``example_shape`` says; call it
    after ``distribute``. Two training examples are looked at."""
    inputs, given = _two_inputs(data)
    if isinstance(inputs, Tensor):
        form = f"{given} are {list(inputs.shape)} where example_shape={data.example_shape}"
        right = tuple(inputs.shape[1:]) == tuple(data.example_shape)
        require(right, form, "a batch is [B, *example_shape]", "correct one")
    for tensor in inputs.values() if isinstance(inputs, dict) else [inputs]:
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise InputError(
                f"{given} are {kind}", "they are tensors", "write torch.as_tensor(...)"
            )


def check_values(
    data: FederatedData, network: nn.Module, autocast: AbstractContextManager[Any]
) -> None:
    """Refuse inputs of another type than float32, or that are not finite, with which the network
    fails: it may convert them itself. The same two examples are looked at.

    Args:
        data: dealt out.
        network: in its place on the device.
        autocast: what a step is made in.
    """
    inputs, given = _two_inputs(data)
    for tensor in inputs.values() if isinstance(inputs, dict) else [inputs]:
        if tensor.dtype != torch.float32 and (
            tensor.is_floating_point() or not isinstance(inputs, dict)
        ):
            error = InputError(
                f"{given} are {tensor.dtype}", "weights are float32", "write .float()"
            )
        elif tensor.is_floating_point() and not tensor.isfinite().all():
            error = InputError(
                f"{given} hold NaN or infinity", "they are finite", "leave those examples out"
            )
        else:
            continue
        training = network.training
        try:
            with torch.no_grad(), autocast:
                outputs = network.eval()(inputs)
        except Exception as cause:
            raise error from cause
        finally:
            network.train(training)
        if isinstance(outputs, Tensor) and not outputs.isfinite().all():
            raise error


def _two_inputs(data: FederatedData) -> tuple[Any, str]:
    """Return the inputs of two training examples, if there are two, and how a message names
    them."""
    index = torch.arange(min(2, len(data.train_target)), device=data.device)
    inputs = data.inputs("train", index) if len(index) else {}
    return inputs, f"data {type(data).__name__}, whose inputs of {len(index)} examples"
