"""What a network has beside weights: the same in every run of a configuration, or it is another
network."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fl_lightning.models.tensors import sha256_of_parameters

BLOCK = 2**20
"""Values that are in memory in float64 at a time."""
LIGHTNINGS = {*vars(LightningModule())}
"""Attributes that Lightning sets, such as an example of inputs."""


def what_never_travels(
    network: nn.Module, travels: Collection[str], first: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return what tells a network's fixed parts from others: the SHA-256 of its frozen weights
    (``frozen``) and numbers of its constants (``constants``); both empty where nothing travels.

    Args:
        travels: names of tensors in messages.
        first: what clients begin with beside these, by name.
    """
    begin = {
        f"{name} that clients begin with": numbers(each) for name, each in (first or {}).items()
    }
    if not travels:
        return {"frozen": "", "constants": begin}
    frozen = sha256_of_parameters(network, travels)
    return {"frozen": frozen, "constants": constants_of(network, travels) | begin}


def constants_of(module: nn.Module, without: Collection[str]) -> dict[str, list[float]]:
    """Return two numbers of each tensor of a module that is no parameter and in no message, by its
    name: buffers of integers, buffers that no ``state_dict`` has, and tensors that are attributes.

    They are the norm and a sum with fixed weights, so that what another processor rounds otherwise
    is told from what was drawn anew: :func:`other_constants`.

    Args:
        without: names of tensors in messages.
    """
    found = dict(module.named_buffers())
    for prefix, one in module.named_modules():
        owned = {
            name: value
            for name, value in vars(one).items()
            if isinstance(value, Tensor) and name not in LIGHTNINGS
        }
        found |= {f"{prefix}.{name}".lstrip("."): value for name, value in owned.items()}
    return {
        name: numbers(tensor)
        for name, tensor in found.items()
        if name not in without and not tensor.is_meta and not tensor.is_complex()
    }


def numbers(tensor: Tensor) -> list[float]:
    """Return the norm of a tensor and a sum of its values with fixed weights."""
    flat, norms, total = tensor.detach().cpu().flatten(), [0.0], 0.0
    for first in range(0, len(flat), BLOCK):
        values = flat[first : first + BLOCK].double().nan_to_num(0.0, 1e4, -1e4)
        norms.append(float(values.norm()))
        total += float(values @ torch.arange(first, first + len(values)).double().cos())
    return [math.hypot(*norms), total]


def is_pairs(found: object) -> TypeGuard[dict[str, list[float]]]:
    """Return whether ``found`` may be of :func:`constants_of`."""
    return isinstance(found, dict) and all(
        isinstance(pair, list) and [*map(type, pair)] == [float, float] for pair in found.values()
    )


def other_constants(
    saved: Mapping[str, Sequence[float]], found: Mapping[str, Sequence[float]]
) -> list[str]:
    """Return the names of tensors in both whose numbers differ by more than roundings."""
    return [
        name
        for name, (norm, total) in saved.items()
        if name in found and not np.allclose(found[name], (norm, total), rtol=0, atol=1e-6 * norm)
    ]
