"""The call that made a network: what a program without this package repeats to make it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from inspect import isclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

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


def copied(network: nn.Module) -> nn.Module:
    """Return a deep copy of a network, made by the same call."""
    another = deepcopy(network)
    recipe = recipe_of(network)
    if recipe is not None:
        _RECIPES[another] = recipe
    return another


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
