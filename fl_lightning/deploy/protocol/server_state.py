"""What a node must know of the server's state to make its clients' addends, beside their
broadcast."""

from __future__ import annotations

import torch
from safetensors.torch import load, save

from fl_lightning.errors import InputError
from fl_lightning.methods import Method
from fl_lightning.wire import Payload


def beside_broadcast(method: Method, broadcast: bytes) -> bytes:
    """Return the entries of the server's state that addends are made from and that a broadcast does
    not hold bit for bit, in safetensors' form; most methods have none.

    Args:
        method: the server's.
        broadcast: the payload that a client is sent.
    """
    sent = Payload.from_bytes(broadcast, verified=True)
    missing = {}
    for name, tensor in method.summing_state().items():
        value = sent.get(name)
        same = (
            isinstance(value, torch.Tensor)
            and value.dtype == tensor.dtype
            and torch.equal(value, tensor)
        )
        if not same:
            missing[name] = tensor.contiguous()
    return save(missing)


def take_over(method: Method, broadcast: Payload, beside: bytes) -> None:
    """Give a node's method the state that the server has in this round, as far as addends are made
    from it. Rounds may have given it entries that nobody has at the start.

    Raises:
        InputError: an entry has another shape or type than the node's.
    """
    given, known = load(beside), method.summing_state()
    for name in {**known, **given}:
        tensor = given[name] if name in given else broadcast.tensor(name)
        before = tensor if name in method.growing else known.get(name, tensor)
        if (tensor.shape, tensor.dtype) != (before.shape, before.dtype):
            raise InputError(
                f"server.{name} {tuple(tensor.shape)} in {tensor.dtype}",
                f"it is {tuple(before.shape)} in {before.dtype} on this node",
                "use one version and one configuration on both sides",
            )
        method.server[name] = tensor
