"""The state of the resident module in which a client's training starts, as ``Method.receive`` made
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.engines.attributes import REGISTERED, attributes_of, is_plain
from fl_lightning.engines.stacked.stack import CannotStackError
from fl_lightning.methods import Method
from fl_lightning.models.tensors import modules_of, tensors_of


@dataclass
class StartState:
    """A copy of what a module is at one moment.

    Args:
        tensors: values of its parameters and buffers, by name.
        attributes: of the module and its submodules, by name.
        registered: its own tensors and submodules, by where it keeps them and by name.
        modes: which of its modules are in training mode.
        trainable: which of its tensors are trained.
    """

    tensors: dict[str, Tensor]
    attributes: dict[str, Any]
    registered: dict[str, dict[str, Any]]
    modes: tuple[bool, ...]
    trainable: tuple[bool, ...]

    @classmethod
    def of(cls, method: Method, known: Mapping[str, Tensor] | None = None) -> StartState:
        """Copy the module, but for those tensors that equal the one of this name in ``known``,
        which the state then shares."""
        tensors, known = tensors_of(method), known or {}
        return cls(
            {
                name: known[name]
                if name in known and torch.equal(known[name], tensor)
                else tensor.detach().clone()
                for name, tensor in tensors.items()
            },
            attributes_of(method),
            {name: dict(vars(method)[name]) for name in REGISTERED},
            modes=tuple(module.training for module in modules_of(method)),
            trainable=tuple(tensor.requires_grad for tensor in tensors.values()),
        )

    def stack_key(self, names: Sequence[str], owner: str) -> Any:
        """Return what the clients of one stack have in common: submodules, shapes, and the plain
        values ``names`` that ``receive`` sets.

        Raises:
            CannotStackError: one of them is something else.
        """
        for name in names:
            if not is_plain(self.attributes.get(name)):
                raise CannotStackError(
                    f"{owner}.receive sets {name!r}, which is neither a parameter, a buffer nor a "
                    "plain value; register it as a buffer"
                )
        modules = tuple(map(id, self.registered["_modules"].values()))
        shapes = tuple((name, tensor.shape) for name, tensor in self.tensors.items())
        return (
            modules,
            shapes,
            self.modes,
            self.trainable,
            tuple(repr(self.attributes.get(name)) for name in names),
        )

    def restore(self, method: Method, names: Sequence[str]) -> None:
        """Make the module what it was, with the attributes ``names``, but for the values of its
        tensors."""
        for name in REGISTERED:
            vars(method)[name].clear()
            vars(method)[name].update(self.registered[name])
        modules = dict(method.named_modules()) if names else {}
        for path, _, own in (name.rpartition(".") for name in names):
            if path in modules:
                modules[path].__dict__[own] = self.attributes.get(f"{path}.{own}" if path else own)
        for module, training in zip(modules_of(method), self.modes, strict=True):
            if module.training != training:
                module.training = training
        for tensor, trainable in zip(tensors_of(method).values(), self.trainable, strict=True):
            if tensor.requires_grad != trainable:
                tensor.requires_grad_(trainable)
