"""The call that made a network: what a program without this package repeats to make it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from inspect import isclass, isfunction
from types import CellType, FunctionType
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
        InputError: it cannot be copied, or a parameter has a hook, which a copy would lack.
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
        vars(new).update(deepcopy(vars(old), memo))
    for part in another.modules():
        for held in (vars(part), *(each for each in vars(part).values() if isinstance(each, dict))):
            held.update({key: _rebound(each, memo) for key, each in held.items()})
    recipe = recipe_of(network)
    if recipe is not None:
        _RECIPES[another] = recipe
    return another


def _rebound(value: Any, memo: Mapping[int, Any]) -> Any:
    """Return a function that refers to copies of what it refers to; anything else as it is."""
    if not isfunction(value) or not value.__closure__:
        return value
    try:
        seen = [cell.cell_contents for cell in value.__closure__]
    except ValueError:  # one is not set yet
        return value
    if not any(id(each) in memo for each in seen):
        return value
    cells = tuple(CellType(memo.get(id(each), each)) for each in seen)
    made = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    made.__kwdefaults__ = value.__kwdefaults__
    return update_wrapper(made, value)


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
        if make.args and isclass(make.args[-1]):
            make = make.args[-1]
        else:
            arguments, make = (*make.args, *arguments), make.func
    return Recipe(make, arguments, named)
