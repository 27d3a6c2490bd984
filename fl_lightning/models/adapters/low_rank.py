"""The layers of a network with a LoRA adapter, ours or peft's, under one description."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from fl_lightning.errors import require
from fl_lightning.models.tensors import tensors_of


class LowRankLayer(NamedTuple):
    """One adapted layer, which adds ``c B A`` to its weights.

    Args:
        base: the frozen layer, whose weight is ``[out, in]``, or ``[in, out]`` where it is
            ``transposed``.
        a: A ``[r, in]``.
        b: B ``[out, r]``.
        scaling: c = alpha / r.
        transposed: whether the base is of the kind of GPT-2's layers, ``Conv1D`` of transformers.
    """

    base: nn.Module
    a: Tensor
    b: Tensor
    scaling: float
    transposed: bool


class FactorNames(NamedTuple):
    """The names of an adapted layer's tensors in its network, and its c.

    Args:
        a, b: of the factors.
        base: of the frozen weight.
        scaling, transposed: as :class:`LowRankLayer` has them.
    """

    a: str
    b: str
    base: str
    scaling: float
    transposed: bool


def low_rank_layers(network: nn.Module) -> dict[str, LowRankLayer]:
    """Return the layers with two factors by name, in the order of the network; of peft's the first
    adapter.

    AdaLoRA's layers have a third factor and are left out.

    Raises:
        InputError: one of them is an embedding, whose factors have another form.
    """
    found = {}
    for name, module in network.named_modules():
        if (
            not hasattr(module, "lora_A")
            or not hasattr(module, "base_layer")
            or hasattr(module, "lora_E")
        ):
            continue
        a, b, scaling = module.lora_A, module.lora_B, module.scaling
        if isinstance(a, nn.ModuleDict):
            require(
                a,
                f"an adapter on {name}, an embedding",
                "factors A and B are those of linear layers, and here have another form",
                "leave it out of targets",
            )
            key = next(iter(a))
            a, b, scaling = a[key], b[key], scaling[key]
        transposed = bool(getattr(module, "fan_in_fan_out", False))
        found[name] = LowRankLayer(
            module.base_layer, a.weight, b.weight, float(scaling), transposed
        )
    return found


def factor_pairs(network: nn.Module) -> list[FactorNames]:
    """Return the names of the factors of all adapted layers, in the order of the network."""
    names = {id(tensor): name for name, tensor in tensors_of(network).items()}
    return [
        FactorNames(
            names[id(layer.a)],
            names[id(layer.b)],
            names.get(id(layer.base.weight), ""),
            layer.scaling,
            layer.transposed,
        )
        for layer in low_rank_layers(network).values()
    ]


def factor_sides(network: nn.Module) -> list[tuple[int, int, int]]:
    """Return r, m and n of each adapted layer: A is ``[r, n]``, and B is ``[m, r]``."""
    return [
        (*layer.a.shape[:1], len(layer.b), layer.a.shape[1])
        for layer in low_rank_layers(network).values()
    ]
