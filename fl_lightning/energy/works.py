"""The pieces of work that a calibration measures: layers in each option, steps of a network, steps without
groups."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.energy.costs import OPTIONS
from fl_lightning.models.language.llama import KeyValueCache, Llama
from fl_lightning.models.options import Plan, Scope, SwitchedLinear, add_switches


class LinearShape(NamedTuple):
    """The shape of a linear layer; all layers of a network have adapters of one kind.

    Args:
        inputs: features of its input.
        outputs: features of its output.
    """

    inputs: int
    outputs: int


def work_name(shape: LinearShape, option: str) -> str:
    """Return the name of a measured option of a linear layer, as ``96x288 int8``."""
    return f"{shape.inputs}x{shape.outputs} {option}"


def step_name(option: str) -> str:
    """Return the name of a measured step with all groups at one option."""
    return f"step {option}"


def switched_copy(network: Llama, scope: Scope) -> tuple[Llama, dict[str, SwitchedLinear]]:
    """Return a copy of a network with adapters whose layers are switched, and these layers by name: its
    groups. They keep their weights in int8 between calls, as in an evaluation.

    Raises:
        InputError: no layer has an adapter, or the scope is none of the two.
    """
    switched = copy.deepcopy(network)
    layers = add_switches(switched, scope)
    for layer in layers:
        layer.keep_narrow(True)
    return switched, {layer.name: layer for layer in layers}


def linear_works(
    layers: Mapping[str, SwitchedLinear], tokens: Sequence[int]
) -> dict[tuple[str, int], Callable[[], object]]:
    """Return calls of each option of a layer of each shape, at each number of tokens."""
    one_of_each = {LinearShape(*layer.shape): layer for layer in layers.values()}

    def call(layer: SwitchedLinear, option: str, x: Tensor) -> Callable[[], object]:
        return lambda: layer.execute(option, x)

    return {
        (work_name(shape, option), n): call(layer, option, torch.randn(n, shape.inputs))
        for shape, layer in sorted(one_of_each.items(), key=lambda item: item[0])
        for option in OPTIONS
        for n in tokens
    }


def step_work(
    network: Llama, tokens: int, context: int, option: str | None = None, groups: int = 0
) -> Callable[[], object]:
    """Return a call of one step: the logits of the last of so many tokens, after those in the cache.

    Args:
        network: the network.
        tokens: n, tokens of the step.
        context: tokens that the step sees, its own included.
        option: what all groups of a switched network are computed by; None: it has no switches.
        groups: number of its groups.
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

    if option is None:
        return step
    board = next(module.board for module in network.modules() if isinstance(module, SwitchedLinear))
    plan = Plan(choices=torch.full((1, tokens, groups), OPTIONS.index(option)))

    def switched_step() -> Tensor:
        with board.using(plan):
            return step()

    return switched_step


def without_groups(network: Llama) -> Llama:
    """Return a copy of a switched network in which every group is a layer that returns zeros.

    A step of it costs what no option changes.
    """
    empty = {
        id(layer): ZeroOutput(layer.shape[1])
        for layer in network.modules()
        if isinstance(layer, SwitchedLinear)
    }
    return copy.deepcopy(network, empty)  # type: ignore[arg-type]  # what is in the memo is not copied


class ZeroOutput(nn.Module):
    """A layer that maps ``[..., in]`` to zeros ``[..., out]``."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.outputs)
