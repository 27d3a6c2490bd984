"""The uploads of a whole stack, where the method leaves ``upload`` and ``end_client`` at the
default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.config.overriding import overrides
from fl_lightning.methods import Method
from fl_lightning.models.tensors import tensors_of
from fl_lightning.wire import Layout, encode_rows


def default_uploads(
    method: Method,
    clients: Sequence[Client],
    tensors: Mapping[str, Tensor],
    shared: Mapping[str, Tensor] | None = None,
) -> list[bytes] | None:
    """Return what ``Method.upload`` gives for each client, as bytes; None where the method or its
    layout does something else.

    Args:
        tensors: ``[K, ...]``, the values of the module's parameters and buffers for each of K
            clients, by name.
        shared: values that are the same for all of them, by name.
    """
    own = any(overrides(method, Method, hook) for hook in ("upload", "end_client", "examples_of"))
    own = own or method.adapters.sends_parts
    if own or method.terms_read("previous_features", "shift") or method.own.size:
        return None
    layout = method.layout
    if type(layout) is not Layout or "read" in vars(layout):
        return None
    names = {id(tensor): name for name, tensor in tensors_of(method).items()}
    every = {
        name: tensor.expand(len(clients), *tensor.shape) for name, tensor in (shared or {}).items()
    }
    every |= tensors
    mine = {name: every[names[id(tensor)]] for name, tensor in tensors_of(method.network).items()}
    examples = torch.tensor(
        [method.client_weights.of(client) for client in clients], dtype=torch.int32
    )
    return encode_rows(
        {"examples": examples, "weights": layout.to_wire(layout.pack_rows(mine, len(clients)))}
    )
