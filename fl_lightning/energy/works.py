"""The pieces of work that a calibration measures: layers in each option, steps of a network, steps without
groups."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fl_lightning.energy.costs import OPTIONS
from fl_lightning.energy.reference_options import LinearShape, linear_options
from fl_lightning.models.language.llama import KeyValueCache, Llama


def work_name(shape: LinearShape, option: str) -> str:
    """Return the name of a measured option of a linear layer, as ``96x288 int8``."""
    return f"{shape.inputs}x{shape.outputs} {option}"


def step_name(option: str) -> str:
    """Return the name of a measured step with all groups at one option."""
    return f"step {option}"


def adapted_linears(network: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers with an adapter by name, in the order of the network: its groups."""
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(getattr(module, "base_layer", None), nn.Linear)
    }


def shape_of(layer: nn.Module) -> LinearShape:
    """Return the shape of a linear layer with an adapter."""
    base = layer.base_layer
    assert isinstance(base, nn.Linear)
    down = getattr(layer, "lora_A", None)
    rank = down.out_features if isinstance(down, nn.Linear) else min(base.in_features, base.out_features)
    return LinearShape(base.in_features, base.out_features, rank)


def linear_works(
    shape: LinearShape, scope: str, tokens: Sequence[int]
) -> dict[tuple[str, int], Callable[[], object]]:
    """Return calls of each option of a layer at each number of tokens."""
    options = linear_options(shape, scope)
    inputs = {n: torch.randn(n, shape.inputs) for n in tokens}

    def call(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
        return lambda: function(x)

    return {(option, n): call(options[option], x) for option in OPTIONS for n, x in inputs.items()}


def step_work(network: Llama, tokens: int, context: int) -> Callable[[], object]:
    """Return a call of one step: the logits of the last of so many tokens, after those in the cache.

    Args:
        network: the network.
        tokens: n, tokens of the step.
        context: tokens that the step sees, its own included.
    """
    before = max(context - tokens, 0)
    ids = torch.randint(network.embed_tokens.num_embeddings, (1, before + tokens))
    positions = torch.arange(before + tokens).unsqueeze(0)
    cache = KeyValueCache()
    if before:
        network.features(ids[:, :before], positions[:, :before], cache)

    def step() -> Tensor:
        own = KeyValueCache(list(cache.keys), list(cache.values))  # a step replaces tensors of its own lists
        features = network.features(ids[:, before:], positions[:, before:], own)
        return network.logits(features[:, -1])

    return step


def with_option(network: Llama, option: str, scope: str) -> Llama:
    """Return a copy of the network in which every group is computed by one option, with random weights."""
    switched = {
        id(layer): OptionLayer(linear_options(shape_of(layer), scope)[option])
        for layer in adapted_linears(network).values()
    }
    return copy.deepcopy(network, switched)  # type: ignore[arg-type]  # what is in the memo is not copied


class OptionLayer(nn.Module):
    """A layer ``[..., in]`` to ``[..., out]`` that is a function of ``[n, in]``."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found = self.function(x.flatten(0, -2))
        return found.view(*x.shape[:-1], found.shape[-1])


def without_groups(network: Llama) -> Llama:
    """Return a copy of the network in which every group is a layer that returns zeros.

    A step of it costs what no option changes.
    """
    empty = {id(layer): ZeroOutput(layer) for layer in adapted_linears(network).values()}
    return copy.deepcopy(network, empty)  # type: ignore[arg-type]  # what is in the memo is not copied


class ZeroOutput(nn.Module):
    """A layer that maps ``[..., in]`` to zeros ``[..., out]``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.outputs = shape_of(layer).outputs

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.outputs)
