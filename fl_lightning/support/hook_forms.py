"""The form of what a hook of one's own returns, and labels and uploads of a wrong one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import MisuseError


def form_of(value: object) -> str:
    """Return what a value is, for a message: type and shape of a tensor, and whether all of it is
    finite; of anything else the beginning of how it shows itself."""
    if not isinstance(value, Tensor):
        return f"{value!r:.40}"
    finite = "" if bool(value.isfinite().all()) else " that is not finite"
    return f"{value.dtype} {[*value.shape]}{finite}"


def check_labels(stressor: object, found: Tensor, before: Any, client: Any, data: Any) -> None:
    """Refuse labels that the task of the data cannot train on.

    Args:
        found: what ``change_labels`` returned.
        before: what it was given.
        client: whose they are.
        data: of the run.

    Raises:
        MisuseError: their number, form or range is another one.
    """
    examples, classes = len(client.train), int(data.num_classes)
    form = f"{before.dtype} {[examples, *before.shape[1:]]}, finite"
    right = found.dtype == before.dtype and found.shape == (examples, *before.shape[1:])
    if data.task.has_classes and not data.task.of_tokens:
        is_soft = found.is_floating_point() and found.shape == (examples, classes)
        is_hard = found.dtype == torch.int64 and found.shape == (examples,)
        if before.ndim == 1 or before.is_floating_point():  # one class for each example
            in_range = not is_hard or bool(((found >= 0) & (found < classes)).all())
            right = is_soft or (is_hard and in_range)
            form = f"int64 [{examples}] of 0 to {classes - 1}, or shares [{examples}, {classes}]"
    if not right or not bool(found.isfinite().all()):
        span = f" of {found.min()} to {found.max()}" if found.numel() else ""
        raise MisuseError(
            f"{type(stressor).__name__}.change_labels, which returned {found.dtype} "
            f"{[*found.shape]}{span} for client {client.id}",
            f"each of its {examples} training examples has one: {form}",
            "return a new tensor like the one given",
        )


def wrong_types(method: object, types: set[Any]) -> MisuseError:
    """Return what is wrong with an upload that a method has made.

    Args:
        types: of its entries, but of ``examples``; None of codes.
    """
    names = ", ".join(sorted(map(str, types - {None, torch.float32})))
    return MisuseError(
        f"{type(method).__name__}.upload, which returned entries of {names}",
        "values travel as float32, as the network's own type, or as codes, and others are rejected",
        "write .float(), or fl_lightning.wire.Codes for integers of few bits",
    )
