"""A network of its own for every run, whatever a function that is given as ``network`` returns.

One that returns the same modules again, or puts tensors that exist into new ones, would carry what
a run has learnt into the next one, silently.
"""

from __future__ import annotations

from collections.abc import Callable
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
        return copied(made)
    except Exception as error:
        rule = f"they take what a run has learnt into the next one, and a copy failed: {error_text(error)}"
        raise InputError(again, rule, "make new ones in it") from error


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
