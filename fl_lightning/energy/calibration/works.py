"""The pieces of work that a calibration measures: layers in each option, steps of a network, steps
without groups."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.energy.calibration.steps import steps_of
from fl_lightning.energy.options import OPTIONS, HighPrecision, Scope
from fl_lightning.energy.switched import Plan, SwitchedLinear, add_switches


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


def dtype_of(layer: SwitchedLinear) -> torch.dtype:
    """Return the precision of a layer's base."""
    return layer.adapted.base_layer.weight.dtype


def step_name(option: str) -> str:
    """Return the name of a measured step with all groups at one option."""
    return f"step {option}"


def switched_copy(
    network: nn.Module, scope: Scope, high: HighPrecision = "float32"
) -> tuple[nn.Module, dict[str, SwitchedLinear]]:
    """Return a copy of a network with adapters whose layers are switched, and these layers by name:
    its groups. They keep their weights in int8 between calls, as in an evaluation.

    The copy has the weights of the network themselves, which are not changed.

    Raises:
        InputError: no layer has an adapter, or the scope or the precision is none of the two.
    """
    weights = {id(weight): weight for weight in network.parameters()}
    switched = copy.deepcopy(network, weights)  # type: ignore[arg-type]  # what is in the memo is not copied
    layers = add_switches(switched, scope, high)
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
        (work_name(shape, option), n): call(
            layer, option, torch.randn(n, shape.inputs, dtype=dtype_of(layer))
        )
        for shape, layer in sorted(one_of_each.items(), key=lambda item: item[0])
        for option in OPTIONS
        for n in tokens
    }


class Prefix(NamedTuple):
    """What a step begins after.

    Args:
        ids: the tokens before and those of the step, int64 ``[1, T]``.
        before: number of those before.
        cache: of those before; None: there are none.
    """

    ids: Tensor
    before: int
    cache: Any


def prefix_of(network: nn.Module, tokens: int, context: int) -> Prefix:
    """Return random tokens, of which all but the last so many are read.

    Args:
        network: the network.
        tokens: n, tokens of the step.
        context: tokens that the step sees, its own included.
    """
    steps, before = steps_of(network), max(context - tokens, 0)
    ids = torch.randint(steps.vocabulary, (1, before + tokens))
    return Prefix(ids, before, steps.read(ids[:, :before]) if before else None)


def step_work(
    network: nn.Module, prefix: Prefix, option: str | None = None, groups: int = 0
) -> Callable[[], Tensor]:
    """Return a call of one step: the logits of the last token of a prefix, after those in its
    cache.

    Args:
        network: the network.
        prefix: what the step begins after; steps of several networks may share one.
        option: what all groups of a switched network are computed by; None: it has no switches.
        groups: number of its groups.
    """
    steps, ids = steps_of(network), prefix.ids[:, prefix.before :]

    def step() -> Tensor:
        return steps.last_logits(ids, prefix.cache)

    if option is None:
        return step
    board = next(module.board for module in network.modules() if isinstance(module, SwitchedLinear))
    plan = Plan(choices=torch.full((1, ids.shape[1], groups), OPTIONS.index(option)))

    def switched_step() -> Tensor:
        with board.using(plan):
            return step()

    return switched_step


def without_groups(network: nn.Module) -> nn.Module:
    """Return a copy of a switched network in which every group is a layer that returns zeros.

    A step of it costs what no option changes. The other layers have the weights of the network
    themselves.
    """
    kept: dict[int, object] = {id(weight): weight for weight in network.parameters()}
    kept |= {
        id(layer): ZeroOutput(layer.shape[1])
        for layer in network.modules()
        if isinstance(layer, SwitchedLinear)
    }
    return copy.deepcopy(network, kept)  # type: ignore[arg-type]  # what is in the memo is not copied


class ZeroOutput(nn.Module):
    """A layer that maps ``[..., in]`` to zeros ``[..., out]``."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.outputs)
