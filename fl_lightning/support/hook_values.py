"""What the hooks of a method leave or return, checked where it is taken: a slip in a hook of one's
own is named there, and not by what fails on it later."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import MisuseError


def check_outputs(method: object, outputs: Any, size: int = 1) -> None:
    """Refuse what ``training_step`` returned for ``size`` clients, if it is no dictionary of
    tensors with a ``loss`` and one value of each other term.

    Raises:
        MisuseError: it is something else.
    """
    right = isinstance(outputs, Mapping) and "loss" in outputs
    if not right or not all(
        isinstance(value, Tensor) and (name == "loss" or value.numel() == size)
        for name, value in outputs.items()
    ):
        entries = [f"{name!r}: {_kind(value)}" for name, value in outputs.items()] if right else []
        raise MisuseError(
            f"{type(method).__name__}.training_step returned {', '.join(entries) or _kind(outputs)}",
            'a method returns a dictionary of tensors of one value with the key "loss"',
            'write return {"loss": loss}, and torch.tensor(...) or a mean for other terms',
        )


def check_returned(method: object, hook: str, value: Any, kind: type, instead: str) -> None:
    """Refuse what a hook returned, if it is nothing of the right kind.

    Args:
        kind: the right one; ``NoneType`` where a hook changes ``self.server`` and returns nothing.
        instead: what to write.

    Raises:
        MisuseError: it is something else.
    """
    if not isinstance(value, kind):
        lost = "it changes self.server, and what it returns is lost"
        rule = lost if kind is NoneType else f"it returns a {kind.__name__}"
        raise MisuseError(f"{type(method).__name__}.{hook} returned {_kind(value)}", rule, instead)


def check_kept(owner: str, entries: Mapping[str, Any]) -> None:
    """Refuse what a server or a client keeps from round to round, if it is not all dense tensors.

    Args:
        owner: whose entries they are, as code names them, such as ``self.server``.

    Raises:
        MisuseError: it is something else.
    """
    for name, value in entries.items():
        if name in ("", "__metadata__"):
            raise MisuseError(
                f"{owner}[{name!r}]", "no file of tensors can hold this name", "write another"
            )
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise MisuseError(
                f"{owner}[{name!r}] is sparse", "what is kept is dense", "write .to_dense()"
            )
        if not isinstance(value, Tensor):
            raise MisuseError(
                f"{owner}[{name!r}] is {_kind(value)}",
                "what is kept from round to round is tensors, as checkpoints and messages hold them",
                "write torch.tensor(...)",
            )


def _kind(value: object) -> str:
    path = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
    shape = f" of shape {[*value.shape]}" if isinstance(value, Tensor) and value.shape else ""
    return "nothing" if value is None else path + shape
