"""Clients whose local steps are the same operations on tensors of the same shapes, and the static tensors
that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fl_lightning.engines.attributes import REGISTERED, is_plain
from fl_lightning.methods import Method

Place = tuple[dict[str, Any], str]
Saved = list[tuple[Tensor, Tensor]]
EVERY_ROUND = ("round",)
"""Plain values that a step must not read (a recording sees to that), so that kinds outlive the round."""


class RefusedError(Exception):
    """Steps of this kind cannot be recorded."""


@dataclass
class Recording:
    """One form of batch. ``names``: the loss terms of a step."""

    inputs: Any
    play: Callable[[], None]
    names: list[str]

    def again(self, batch: Any) -> list[str]:
        """Play the recorded step on another batch and return its loss terms' names."""
        for static, leaf in zip(tree_leaves(self.inputs), tree_leaves(batch), strict=True):
            if isinstance(static, Tensor):
                static.copy_(leaf)
        self.play()
        return self.names


class Kind:
    """The static tensors, optimiser and sums of one kind of client.

    Args:
        method: as it is for the first of them.
        optimizer: that one's, fresh.
        resident: tensors that are the module's own, by id; a client's are copied, or the next one's values
            would end up in what the first one keeps.
    """

    def __init__(
        self, method: Method, device: torch.device, optimizer: Optimizer, resident: Mapping[int, Tensor]
    ) -> None:
        self.method, self.device, self.optimizer = method, device, optimizer
        self.modules = list(method.modules())  # held, so that their ids stay theirs
        made: dict[int, Tensor] = {}
        self.static = []
        for held, name in places(method):
            tensor = _at((held, name))
            if id(tensor) not in made:
                stays = id(tensor) in resident or tensor.device != device
                made[id(tensor)] = tensor if stays else _copy_of(tensor)
            self.static.append(made[id(tensor)])
        for group in optimizer.param_groups:
            group["params"] = [made.get(id(p), p) for p in group["params"]]
        self.sums: dict[str, Tensor] = {}
        self.times: Counter[Any] = Counter()
        self.recordings: dict[Any, Recording] = {}
        self.refused = ""
        self.pool: Any = None

    @torch.no_grad()
    def enter(self) -> None:
        """The module gets the static tensors, with the values of its own; optimiser and sums start again."""
        self.places = [
            (place, static)
            for place, static in zip(places(self.method), self.static, strict=True)
            if static.device == self.device
        ]
        self.own: dict[int, tuple[Place, Tensor]] = {}
        self.keep(own=True)
        self.known = self._top()
        zeros = [*self._optimizer_state(), *self.sums.values()]
        for tensor in zeros:
            tensor.zero_()

    @torch.no_grad()
    def keep(self, own: bool = False) -> None:
        """Where a tensor of the module is not the static one, its value goes there and the static one takes
        its place.

        Args:
            own: the tensors found are those that the client will want back.
        """
        for number, (place, static) in enumerate(self.places):
            tensor = _at(place)
            if tensor is not static:
                if (
                    tensor.shape != static.shape
                    or tensor.dtype != static.dtype
                    or tensor.device != static.device
                ):
                    raise RefusedError(f"a step makes {place[1]!r} another tensor")
                static.copy_(tensor)
                place[0][place[1]] = static
                if own:
                    self.own[number] = place, tensor

    def settle(self) -> bool:
        """Follow what happened to the module's own attributes between two steps; return False where
        recordings cannot."""
        now = self._top()
        if now == self.known:
            return True
        registered = len(self.method._parameters) + len(self.method._buffers)
        if len(now) != len(self.known) or now[registered:] != self.known[registered:]:
            return False
        try:
            self.keep(own=True)
        except RefusedError:
            return False
        self.known = self._top()
        return True

    def _top(self) -> list[int]:
        """Return what the method itself holds: parameters, buffers, modules, then all else."""
        mine = vars(self.method)
        held = [id(tensor) for name in REGISTERED for tensor in mine[name].values()]
        return held + [id(mine[name]) for name in sorted(mine) if name not in REGISTERED]

    @torch.no_grad()
    def leave(self) -> None:
        """The module gets its own tensors back, with the values that they have now."""
        for number, ((held, name), tensor) in self.own.items():
            static = self.places[number][1]
            if held.get(name) is static:
                tensor.copy_(static)
                held[name] = tensor
        self.own = {}

    # States: what a step may change

    def elsewhere(self) -> list[tuple[int, int]]:
        """Return which tensors of the module are not on the device, and how often they were written to: a
        replay would not."""
        tensors = map(_at, places(self.method))
        return [(id(tensor), tensor._version) for tensor in tensors if tensor.device != self.device]

    def _tensors(self) -> list[Tensor]:
        static = {id(tensor): tensor for _, tensor in self.places}
        return [*static.values(), *self._optimizer_state(), *self.sums.values()]

    def _optimizer_state(self) -> list[Tensor]:
        return [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]

    @torch.no_grad()
    def save(self) -> Saved:
        return [(tensor, tensor.detach().clone()) for tensor in self._tensors()]

    @torch.no_grad()
    def restore(self, saved: Saved) -> None:
        """Put all tensors back to what they were; those that did not exist then become zero."""
        self.keep()
        values = {id(tensor): value for tensor, value in saved}
        for tensor in self._tensors():
            if id(tensor) in values:
                tensor.copy_(values[id(tensor)])
            else:
                tensor.zero_()


def places(method: nn.Module) -> list[Place]:
    """Return where the module and its children hold a tensor."""
    return [
        (held, name)
        for module in method.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]


def client_form(method: Method, optimizer: Optimizer) -> Any:
    """Return a key that is equal for clients of one kind.

    It holds modules and their modes, tensors but for their values, plain attributes and the optimiser.
    """
    tensors = [_at(place) for place in places(method)]
    first: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        first.setdefault(id(tensor), number)  # tied weights
    groups = tuple(
        (
            tuple(first.get(id(p), -1) for p in group["params"]),
            repr([v for k, v in group.items() if k != "params"]),
        )
        for group in optimizer.param_groups
    )
    return (
        tuple((id(module), module.training) for module in method.modules()),
        tuple(
            (first[id(t)], t.shape, t.dtype, t.stride(), t.device, t.requires_grad, _baked_in(t, method))
            for t in tensors
        ),
        tuple(
            (name, repr(value))
            for name, value in vars(method).items()
            if name not in EVERY_ROUND and is_plain(value)
        ),
        (type(optimizer), groups),
    )


def _baked_in(tensor: Tensor, method: Method) -> float | None:
    """Return the value of a number on the host that a recording on a device would keep for ever."""
    return (
        tensor.item()
        if tensor.ndim == 0 and tensor.device.type == "cpu" and method.device.type != "cpu"
        else None
    )


def strange_value(method: Method, before: Mapping[str, Any]) -> str:
    """Return the name of an attribute that is new since ``before`` and neither registered nor plain; empty
    when there is none."""
    for name, value in vars(method).items():
        if name not in REGISTERED and before.get(name) is not value and not is_plain(value):
            return name
    return ""


def _at(place: Place) -> Tensor:
    return place[0][place[1]]


def _copy_of(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return (
        nn.Parameter(copy, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
    )
