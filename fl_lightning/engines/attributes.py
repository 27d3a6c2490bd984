"""Python attributes of a module: which PyTorch keeps books of, which are plain values, and which a
class declares for itself alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fl_lightning.methods import Method

REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes in which ``torch.nn.Module`` keeps its tensors and submodules."""
PLAIN = (bool, int, float, str, type(None))


def attributes_of(method: nn.Module) -> dict[str, Any]:
    """Return what a module and its submodules have beside tensors, submodules and their mode, by
    name: ``network.conv.bits`` is that of a submodule."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in method.named_modules()
        for name, value in vars(module).items()
        if name not in REGISTERED and name != "training"
    }


def held_by(method: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return what a module and its submodules have, each with a copy of its attributes; values of
    tensors are not copied."""
    return [
        (module, {name: dict(v) if name in REGISTERED else v for name, v in vars(module).items()})
        for module in method.modules()
    ]


def put_back(held: Iterable[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Give modules what :func:`held_by` found in them."""
    for module, attributes in held:
        vars(module).clear()
        vars(module).update(attributes)


def is_plain(value: object) -> bool:
    """Return whether a value is a number, a text, None, or a list or tuple of such."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


def is_stackable(method: nn.Module) -> bool:
    """Return what the method's own class declares: what a subclass adds may not be stackable, and
    nobody can tell from outside."""
    return vars(method).get("stackable", vars(type(method)).get("stackable", False))


def has_same_start(method: Method) -> bool:
    """Return what the method's own class declares as ``same_start``, where nothing stays on a
    client and no term reads what differs from client to client."""
    of_client = bool(method.own.size) or method.terms_read(
        "class_counts", "previous_features", "shift"
    )
    of_client = of_client or method.adapters.sends_parts
    return vars(type(method)).get("same_start", False) and not of_client
