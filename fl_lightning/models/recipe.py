"""The call that made a network: what a program without this package repeats to make it again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from inspect import getclosurevars, isbuiltin, isfunction, ismethod
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from fl_lightning.errors import InputError, require

Network = TypeVar("Network", bound=nn.Module)
_RECIPES: WeakKeyDictionary[nn.Module, Recipe] = WeakKeyDictionary()
"""The recipe of each network. It is no attribute, since those are compared and copied."""


@dataclass(frozen=True)
class Recipe:
    """A call that makes a network with new weights.

    Args:
        function: the class or function that is called.
        arguments: its positional arguments.
        named: its arguments by name.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any] = ()
    named: Mapping[str, Any] = field(default_factory=dict)


def made_by(make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call ``make``, and remember the call if it returns a network."""
    made = make(*arguments, **named)
    if isinstance(made, nn.Module):
        inner = _unwrapped(make)
        _RECIPES[made] = Recipe(
            inner.function, (*inner.arguments, *arguments), {**inner.named, **named}
        )
    return made


def recipe_of(network: nn.Module) -> Recipe | None:
    """Return the call that made a network; None where it was not made by :func:`made_by`."""
    return _RECIPES.get(network)


def copied(network: Network, shared: dict[int, Any] | None = None) -> Network:
    """Return a deep copy of a network, made by the same call.

    Functions in its attributes and hooks that refer to the network or a part of it refer to the
    copy's, and its parameters have the attributes that were set on them, as ``deepcopy`` alone
    would not have it.

    Args:
        network: what is copied.
        shared: what the copy has in common with it, by ``id``.

    Raises:
        InputError: it cannot be copied, a parameter has a hook, which a copy would lack, or a
            function of it goes on using the original.
    """
    for name, parameter in network.named_parameters():
        require(
            not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks),
            f"{type(network).__name__} with a hook of its parameter {name}",
            "a copy is trained, and hooks of tensors cannot be copied",
            "write what it does into forward or training_step, or hook a layer",
        )
    memo = dict(shared or {})
    try:
        another = deepcopy(network, memo)
    except (RuntimeError, TypeError) as error:  # such as a tensor with a history, a lock or a file
        raise InputError(
            f"{type(network).__name__}, which cannot be copied",
            str(error).partition("\n")[0],
            "compute tensors in forward, and take weight_norm of torch.nn.utils.parametrizations",
        ) from error
    for old, new in zip(network.parameters(), another.parameters(), strict=True):
        if new is not old:
            vars(new).update(deepcopy(vars(old), memo))
    for part in another.modules():
        _rebind(vars(part), memo)
        for held in vars(part).values():
            if isinstance(held, dict):
                _rebind(held, memo)
    require(
        not _holds(another, network, shared or {}),
        f"{type(network).__name__} with a function, such as a hook, that uses parts of it",
        "a copy is trained, and the function of the copy would go on using these",
        "reach them through self in a method, or make a new network each time",
    )
    recipe = recipe_of(network)
    if recipe is not None:
        _RECIPES[another] = recipe
    return another


def _rebind(held: dict[Any, Any], memo: dict[int, Any]) -> None:
    for key, value in held.items():
        if (made := _rebound(value, memo)) is not value:
            held[key] = made


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """Return a function, or a list, tuple or partial with functions, that refers to copies of what
    it refers to; anything else as it is."""
    if id(value) in memo:
        return memo[id(value)]
    if type(value) in (list, tuple):
        parts = [_rebound(each, memo) for each in value]
        same = all(new is old for new, old in zip(parts, value, strict=True))
        return value if same else type(value)(parts)
    if type(value) is partial:
        inner = _rebound(value.func, memo)
        return value if inner is value.func else partial(inner, *value.args, **value.keywords)
    if ismethod(value):
        owner = memo.get(id(value.__self__), value.__self__)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if not isfunction(value):
        return value
    held, defaults = value.__closure__ or (), value.__defaults__ or ()
    cells = tuple(CellType() for _ in held)
    made = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
    memo[id(value)] = made  # it may refer to itself
    made.__defaults__ = tuple(_rebound(each, memo) for each in defaults)
    made.__kwdefaults__ = value.__kwdefaults__
    made.__dict__.update({name: _rebound(each, memo) for name, each in vars(value).items()})
    both = [*zip(made.__defaults__, defaults, strict=True)]
    both += zip(vars(made).values(), vars(value).values(), strict=True)
    is_other = any(new is not old for new, old in both)
    for new, old in zip(cells, held, strict=True):
        with suppress(ValueError):  # one is not set yet
            new.cell_contents = _rebound(old.cell_contents, memo)
            is_other |= new.cell_contents is not old.cell_contents
    if not is_other:
        memo[id(value)] = value
    return memo[id(value)]


def _holds(copy: nn.Module, parts_of: nn.Module, but: Collection[int]) -> bool:
    """Return whether functions that a copied network holds lead to parts of the one that it was
    copied from, but for some: by a variable, a default or what they are bound to."""
    wanted = {*map(id, parts_of.modules()), *map(id, parts_of.parameters())}
    wanted |= set(map(id, parts_of.buffers()))
    wanted -= {*but, *map(id, copy.parameters())}
    found: list[Any] = [value for module in copy.modules() for value in vars(module).values()]
    known = dict[int, Any]()  # they stay alive, so that no other one has an id of theirs
    while found:
        value = found.pop()
        if id(value) in wanted:
            return True
        if id(value) not in known:
            known[id(value)] = value
            found += _held_by(value)
    return False


def _held_by(value: Any) -> list[Any]:
    """Return what a function or a container leads to."""
    if isfunction(value):
        more = [
            value.__defaults__ or (),
            (value.__kwdefaults__ or {}).values(),
            vars(value).values(),
        ]
        with suppress(ValueError):  # a variable that has no value yet
            names = getclosurevars(value)
            more += [names.nonlocals.values(), names.globals.values()]
        return [*chain(*more)]
    if ismethod(value):
        return [value.__self__, value.__func__]
    if isbuiltin(value):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Mapping):
        return [*value.values()]
    return [*value] if isinstance(value, (list, tuple, set, frozenset)) else []


def innermost(make: Any) -> Any:
    """Return the class or function that nested ``partial`` objects call."""
    return _unwrapped(make).function


def _unwrapped(make: Any) -> Recipe:
    """Return what nested ``partial`` objects call, and with what.

    The partials of jsonargparse pass the class to a function that builds it.
    """
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    while isinstance(make, partial):
        named = {**make.keywords, **named}
        if str(getattr(make.func, "__module__", "")).startswith("jsonargparse."):
            make = make.args[-1]
        else:
            arguments, make = (*make.args, *arguments), make.func
    return Recipe(make, arguments, named)
