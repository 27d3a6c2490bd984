"""Tensors as files, pipes and messages take them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, uint8 ``[n]``, where they are. A tensor of one value
    counts as contiguous whatever its stride is."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors that share no memory, since safetensors takes no others."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        found[name] = tensor
    return found
