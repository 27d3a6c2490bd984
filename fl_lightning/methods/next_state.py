"""The change of the server's state at the end of a round."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from fl_lightning.methods.base import Method

log = logging.getLogger("fl_lightning")


def set_next_state(method: Method, round: int, make: Callable[[], None]) -> None:
    """Let the method make the server's next state; the server keeps its last one where the next would not be
    finite."""
    before = dict(method.server)
    make()
    broken = [name for name, tensor in method.server.items() if not is_finite(tensor)]
    if broken:
        method.server = before
        log.warning(
            "round %d: the server's next %s would not be finite; it keeps its last state",
            round,
            ", ".join(broken),
        )


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, in one pass without a mask of the tensor's size."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not (tensor.is_floating_point() and tensor.numel()):
        return True
    return all(math.isfinite(value) for value in torch.stack(torch.aminmax(tensor)).tolist())
