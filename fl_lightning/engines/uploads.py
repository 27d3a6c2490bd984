"""The uploads of a stack of clients as a whole, where a method leaves it at the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.methods import Method
from fl_lightning.models.tensors import tensors_of
from fl_lightning.wire import Layout, encode_rows


def default_uploads(method: Method, clients: Sequence[Client], tensors: Mapping[str, Tensor]) -> list[bytes] | None:
    """What ``Method.upload`` gives for each client, as bytes; None where the method or its layout does something else.

    Args:
        tensors: ``[K, ...]``, the values of the module's parameters and buffers for each of K clients, by name.
    """
    if getattr(method.upload, "__func__", None) is not Method.upload:
        return None
    layout = method.layout
    if type(layout) is not Layout or "read" in vars(layout):
        return None
    names = {id(tensor): name for name, tensor in tensors_of(method).items()}
    mine = {name: tensors[names[id(tensor)]] for name, tensor in tensors_of(method.network).items()}
    examples = torch.tensor([len(client.train) for client in clients], dtype=torch.int32)
    return encode_rows({"examples": examples, "weights": layout.pack_rows(mine, len(clients))})
