"""Put switches around the adapted layers of a network, and find them there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from torch import nn

from fl_lightning.config.near_names import require_choice
from fl_lightning.energy.options import HighPrecision, Scope
from fl_lightning.energy.switched.integers import MOST_INPUTS
from fl_lightning.energy.switched.plan import Switchboard
from fl_lightning.energy.switched.switched import SwitchedLinear
from fl_lightning.errors import require
from fl_lightning.models.adapters import AdaptedLinear

PARTS_OF_BASE_IN_PEFT = ("pissa", "corda", "olora", "loftq")
"""Beginnings of peft's ``init_lora_weights`` that change the base's weights."""


def add_switches(
    network: nn.Module, scope: Scope = "adapter", high: HighPrecision = "float32"
) -> list[SwitchedLinear]:
    """Put a switch around every adapted linear layer of a network.

    Names of an adapter's tensors get a part more, as ``layers.0.mlp.down_proj.adapted.spectral_m``.

    Args:
        network: network with adapters, of ours or of peft's; it is changed in place.
        scope: what off means: ``adapter``: the base without the adapter; ``model``: zeros.
        high: precision of the option high; ``float32`` is that of the network.

    Returns:
        The switched layers in the order of the network. They share ``board``, whose plan is None.

    Raises:
        InputError: there is no adapted linear layer, the network has switches or is itself such a
            layer, a base has no whole weights or too many inputs, or off has no meaning for the
            adapter.
    """
    require_choice(scope, get_args(Scope), "scope")
    require_choice(high, get_args(HighPrecision), "high")
    require(
        not switches(network),
        f"{type(network).__name__} with switches",
        "a network is switched once",
        "give the network without them",
    )
    found = {name: module for name, module in network.named_modules() if is_adapted(module)}
    require(
        found and "" not in found,
        f"{type(network).__name__} {'itself an' if found else 'without'} adapted linear layer",
        "switches are put around the adapted linear layers of a network",
        "write network: llama_tiny with an adapter, or nn.Sequential(layer)",
    )
    for name, adapted in found.items():
        _require_switchable(name, adapted)
    require(
        scope == "model" or not _took_part_of_base(network),
        f"switches of scope adapter on {type(network).__name__} with adapter pissa",
        "its base lacks the part of the weights that the adapter took, and is no layer without it",
        "write scope model, or another adapter",
    )
    board, layers = Switchboard(len(found)), []
    for group, (name, adapted) in enumerate(found.items()):
        layers.append(SwitchedLinear(adapted, name, group, board, scope, high))
        network.set_submodule(name, layers[-1])
    return layers


def switches(network: nn.Module) -> list[SwitchedLinear]:
    """Return the switched layers of a network, in its order."""
    return [module for module in network.modules() if isinstance(module, SwitchedLinear)]


@contextmanager
def narrow_kept(network: nn.Module) -> Iterator[None]:
    """Keep the narrow weights of all switched layers within the block: an evaluation makes them
    once.

    Layers that kept them before go on after the block.
    """
    layers = [layer for layer in switches(network) if not layer.keeps_narrow]
    try:
        for layer in layers:
            layer.keep_narrow(True)
        yield
    finally:
        for layer in layers:
            layer.keep_narrow(False)


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with an adapter, ours or peft's."""
    if isinstance(module, AdaptedLinear):
        return True
    return hasattr(module, "get_delta_weight") and isinstance(
        getattr(module, "base_layer", None), nn.Linear
    )


def _require_switchable(name: str, adapted: Any) -> None:
    """Refuse a layer whose options cannot be computed."""
    base = adapted.base_layer
    require(
        base.weight.is_floating_point()
        and base.weight.shape == (base.out_features, base.in_features),
        f"switches on {name} of {base.weight.dtype} {tuple(base.weight.shape)}",
        "options are computed from whole weights",
        "write load_in_4bit: false",
    )
    require(
        base.in_features <= MOST_INPUTS,
        f"switches on {name} of {base.in_features} inputs",
        f"int32 holds the sums of at most {MOST_INPUTS} products",
        "leave this layer out of targets",
    )


def _took_part_of_base(network: nn.Module) -> bool:
    """Return whether adapters, ours or peft's, have taken a part of the base's weights, as PiSSA
    does."""
    for module in network.modules():
        if isinstance(module, AdaptedLinear) and not module.removable:
            return True
        configs = getattr(module, "peft_config", {})
        starts = [str(getattr(config, "init_lora_weights", "")) for config in configs.values()]
        if any(start.startswith(PARTS_OF_BASE_IN_PEFT) for start in starts):
            return True
    return False
