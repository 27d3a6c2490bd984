"""Whether a function that is given as ``network`` makes a new network each time that it is called.

One that returns the same modules again would carry what a run has learnt into the next one, silently. What
a new module is given of tensors that exist, as ``load_state_dict(..., assign=True)`` does, is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter

from fl_lightning.errors import InputError
from fl_lightning.models.checks import name_of


@contextmanager
def new_parameters() -> Iterator[set[int]]:
    """Collect the identities of the parameters that modules register within the block."""
    found = set[int]()

    def note(module: nn.Module, name: str, parameter: Any) -> None:
        found.add(id(parameter))

    handle = register_module_parameter_registration_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def check_new(made: nn.Module, again: Callable[[], Any], new: set[int], given: object) -> None:
    """Refuse a function whose networks have trained parameters in common.

    It is called once more where not all of them were registered while it ran: it may have copied them.

    Args:
        made: what it has made.
        again: calls it.
        new: what :func:`new_parameters` has found.
        given: how the function was given.

    Raises:
        InputError: they have.
    """
    if all(id(parameter) in new for parameter in _trained(made)):
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            other = again()
        except Exception:  # it works once, so that no other run can have its network
            return
    if isinstance(other, nn.Module) and _places(made) & _places(other):
        raise InputError(
            f"network={name_of(given)}",
            "it returns tensors that exist already, which would be trained on from run to run",
            "make the network in it, or return copy.deepcopy(network)",
        )


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [
        parameter
        for parameter in module.parameters()
        if parameter.requires_grad and not isinstance(parameter, UninitializedParameter)
    ]


def _places(module: nn.Module) -> set[tuple[int, str]]:
    """Return where in memory the trained parameters of a module begin; those without a place are left out."""
    return {(one.data_ptr(), str(one.device)) for one in _trained(module) if one.numel() and not one.is_meta}
