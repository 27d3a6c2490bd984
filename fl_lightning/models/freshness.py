"""A network of its own for every run, whatever a function that is given as ``network`` returns.

One that returns the same modules again, or puts tensors that exist into new ones, would carry what
a run has learnt into the next one, silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from inspect import getclosurevars, isbuiltin, isfunction, ismethod
from itertools import chain
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from fl_lightning.errors import InputError
from fl_lightning.models.checks import error_text, name_of
from fl_lightning.models.recipe import copied


def of_its_own(make: Callable[[], Any], given: object) -> Any:
    """Return what a function makes; a network that has parameters or buffers of the one before is
    copied.

    Args:
        make: calls the function. It is called twice with the same random numbers; the second one
            counts.
        given: the function, for the message.

    Raises:
        InputError: a network shares some, and cannot be copied.
    """
    with isolate_rng():
        before = make()
    try:
        made = make()
    except Exception:  # it works once, so that no other run can have its network
        return before
    both_networks = isinstance(before, nn.Module) and isinstance(made, nn.Module)
    if not both_networks or _places(before).isdisjoint(_places(made)):
        return made
    again = f"network={name_of(given)}, which returns tensors again that it has returned before"
    try:
        copy = copied(made)
    except Exception as error:
        rule = f"they take what a run has learnt into the next one, and a copy failed: {error_text(error)}"
        raise InputError(again, rule, "make new ones in it") from error
    if _holds(copy, parts_of=made):
        rule = "a copy of it holds a function, such as a hook, that goes on using these"
        raise InputError(again, rule, "make new ones in it")
    return copy


def _places(module: nn.Module) -> set[object]:
    """Return the identities of a module's parameters and buffers, and where in memory they
    begin."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    placed = (
        tensor
        for tensor in tensors
        if not (nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.is_sparse)
        and tensor.numel()
    )
    return {*map(id, tensors), *((tensor.device, tensor.data_ptr()) for tensor in placed)}


def _holds(copy: nn.Module, *, parts_of: nn.Module) -> bool:
    """Return whether functions that a copied network holds lead to parts of the one that it was
    copied from: by a variable, a default or what they are bound to, which no copy changes."""
    wanted: set[int] = {*map(id, parts_of.modules()), *map(id, parts_of.parameters())}
    wanted |= set(map(id, parts_of.buffers()))
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
