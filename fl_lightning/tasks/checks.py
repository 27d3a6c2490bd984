"""A task of a user's own, tried out on a few examples before anything is created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fl_lightning.errors import MisuseError
from fl_lightning.tasks.base import Task


def check_loss(task: Task, outputs: Any, target: Tensor) -> None:
    """Refuse a loss that no local step can descend along.

    Args:
        outputs: of a few examples, without a gradient.
        target: theirs.

    Raises:
        MisuseError: it is no tensor of one number with a gradient.
    """
    marked = tree_map(_with_gradient, outputs)
    loss: Any = task.loss(marked, target)
    is_marked = any(isinstance(one, Tensor) and one.requires_grad for one in tree_leaves(marked))
    if isinstance(loss, Tensor) and loss.numel() == 1 and (loss.requires_grad or not is_marked):
        return
    form = f"{loss!r:.40}"
    if isinstance(loss, Tensor):
        form = f"{[*loss.shape]} {'with' if loss.requires_grad else 'without'} a gradient"
    raise MisuseError(
        f"{type(task).__name__}.loss, which returned {form}",
        "a local step descends along one number, computed of the outputs by torch",
        "return the mean over the examples, without .item() or .detach()",
    )


def check_sums(task: Task, found: Any, examples: int) -> None:
    """Refuse sums of metrics that cannot be added up, or are not those that the task names.

    Args:
        found: what ``evaluate`` made of so many examples.

    Raises:
        MisuseError: they are others.
    """
    name = type(task).__name__
    rule = f"it returns of each metric a sum and a weight of 0 or more, two tensors [{examples}]"
    instead = 'write {"loss": (losses.double(), self.weight(target))}'
    if not isinstance(found, Mapping) or not found:
        raise MisuseError(f"{name}.examplewise, which returned {found!r:.40}", rule, instead)
    for metric, pair in found.items():
        if not _is_pair(pair, examples):
            given = f"{name}.examplewise, which returned {pair!r:.80} as {metric!r}"
            raise MisuseError(given.replace("\n", " "), rule, instead)
    _check_names(task, found)


def _check_names(task: Task, found: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    name = type(task).__name__
    totals = {
        metric: [np.float64(part.sum().item()) for part in pair] for metric, pair in found.items()
    }
    if not any(weight for _, weight in totals.values()):
        raise MisuseError(
            f"{name}.examplewise, whose weights are all 0",
            "a metric is a sum over its weight",
            "return self.weight(target) as weight, which is 1 for each example",
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        made = task.finish({metric: np.asarray(s / w) for metric, (s, w) in totals.items()})
    for part, returned, instead in (
        ("examplewise", found, 'add "loss": (losses.double(), self.weight(target))'),
        ("finish", made, "return the metrics that it was given too: {**means, ...}"),
    ):
        if "loss" not in returned:
            rule = "the loss is a metric of every task, which probes and samplers read"
            raise MisuseError(f"{name}.{part}, which returned no 'loss'", rule, instead)
    known = [*made, *(one.name for one in task.named)]
    for what, wanted in (("primary", (task.primary,)), ("per_client", task.per_client)):
        if missing := [metric for metric in wanted if metric not in known]:
            raise MisuseError(
                f"{name}, whose {what} is {missing[0]!r}",
                f"it is a metric that examplewise or finish returns: {', '.join(known)}",
                f"name one of them, or return {missing[0]!r} too",
            )
    if task.primary not in task.per_client:
        raise MisuseError(
            f"{name}, whose primary {task.primary!r} is not in per_client {task.per_client}",
            "a client's validation has the metric that selects",
            "add it to per_client",
        )


def _with_gradient(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().clone().requires_grad_() if is_float else value


def _is_pair(pair: Any, examples: int) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    if not all(isinstance(part, Tensor) and part.shape == (examples,) for part in pair):
        return False
    return bool((pair[1] >= 0).all())
