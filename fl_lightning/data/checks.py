"""Whether data of the user's own class are what methods, partitions and metrics take them for.

``N`` training examples, ``n`` test examples, ``C`` classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.data.base import FederatedData
from fl_lightning.errors import InputError, require
from fl_lightning.tasks import Classification


def check_targets(data: FederatedData) -> None:
    """Refuse targets and groups that a round would stumble over; call it after ``setup``.

    Raises:
        InputError: the constructor or ``setup`` left something out, or a target or a group is out of range.
    """
    name = type(data).__name__
    for attribute in ("num_classes", "example_shape", "train_target", "test_target"):
        where = "setup" if attribute.endswith("target") else "its constructor"
        missing = f"{where} sets {attribute}"
        require(hasattr(data, attribute), f"data {name}, which has no {attribute}", missing, "set it there")
    for attribute in ("train_target", "test_target"):
        target = getattr(data, attribute)
        given = f"data {name}, whose {attribute}"
        if not isinstance(target, Tensor):
            raise InputError(
                f"{given} is {type(target).__module__}.{type(target).__name__}",
                "targets are a tensor, with one entry for each example",
                "write torch.as_tensor(...)",
            )
        if not len(target):
            continue  # such as the test set of a node
        if type(data.task) is Classification:
            _check_classes(target, data.num_classes, given)
        elif target.is_floating_point():
            finite = bool(target.isfinite().all())
            require(
                finite, f"{given} holds NaN or infinity", "targets are finite", "leave those examples out"
            )
    if data.run_form is None:
        has_test = len(data.test_target) > 0
        require(
            has_test, f"data {name} without a test example", "runs are evaluated on them", "set some aside"
        )
    group = data.train_group
    integers = not group.is_floating_point() and len(group) == len(data.train_target)
    require(
        integers and (not len(group) or int(group.min()) >= 0),
        f"data {name}, whose train_group is {group.dtype} {list(group.shape)}",
        f"it has an integer for each of {len(data.train_target)} examples, and groups are 0, 1, ...",
        "number the groups from 0",
    )


def _check_classes(target: Tensor, num_classes: int, given: str) -> None:
    if target.dtype != torch.int64 or target.ndim != 1:
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
    """Refuse inputs of other numbers or another shape than ``example_shape`` says; call it after
    ``distribute``. Two training examples are looked at.

    Raises:
        InputError: they are others.
    """
    index = torch.arange(min(2, len(data.train_target)), device=data.device)
    if not len(index):
        return
    inputs: Any = data.inputs("train", index)
    given = f"data {type(data).__name__}, whose inputs of {len(index)} examples"
    if isinstance(inputs, Tensor):
        form = (len(index), *data.example_shape)
        right = tuple(inputs.shape) == form
        rule = "a batch is [B, *example_shape]"
        require(
            right,
            f"{given} are {list(inputs.shape)} where example_shape={data.example_shape}",
            rule,
            "correct one",
        )
    for tensor in inputs.values() if isinstance(inputs, dict) else [inputs]:
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise InputError(f"{given} are {kind}", "they are tensors", "write torch.as_tensor(...)")
        if tensor.is_floating_point():
            single = tensor.dtype == torch.float32
            require(single, f"{given} are {tensor.dtype}", "weights are float32", "write .float()")
            finite = bool(tensor.isfinite().all())
            require(finite, f"{given} hold NaN or infinity", "they are finite", "leave those examples out")
