"""Adapters that are always on, merged into their bases: W + dW is one matrix, and costs what W
costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.energy.switched.attach import is_adapted
from fl_lightning.energy.switched.switched import full_weight
from fl_lightning.errors import require
from fl_lightning.models.adapters import AdaptedLinear


class MergedLinear(AdaptedLinear):
    """A linear layer whose adapter is part of its weights. Switches take it as they take an adapted
    layer.

    Args:
        plain: the layer with the weights W + dW.
    """

    removable = False

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain)
        self.merged = True

    def added(self, x: Tensor) -> Tensor:
        """Return zeros ``[..., out]``: the base has dW already."""
        return x.new_zeros(*x.shape[:-1], self.base_layer.out_features)

    def product(self) -> Tensor:
        """Return zeros ``[out, in]``: the base has dW already."""
        return torch.zeros_like(self.base_layer.weight)


@torch.no_grad()
def merge_adapters(network: nn.Module) -> nn.Module:
    """Put a :class:`MergedLinear` of its weights W + dW in the place of every adapted layer.

    The layers keep their names, with adapters of ours and of peft's. Nothing is left to train.

    Args:
        network: network with adapters; it is changed in place.

    Raises:
        InputError: no layer has an adapter.
    """
    found: dict[str, Any] = {
        name: one for name, one in network.named_modules() if is_adapted(one) and name
    }
    require(
        found,
        f"{type(network).__name__} without adapted linear layer",
        "what is merged is an adapter",
        "write network: llama_tiny with an adapter",
    )
    for name, adapted in found.items():
        base = adapted.base_layer
        plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(full_weight(adapted).detach().clone())
        plain.bias = base.bias
        network.set_submodule(name, MergedLinear(plain))
    return network
