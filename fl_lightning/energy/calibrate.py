"""The cost table of one network on this device, by measuring linear layers, the rest, and whole steps."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning import rng
from fl_lightning.energy.cost_shapes import KINDS, MeasuredCost
from fl_lightning.energy.costs import OPTIONS, CostTable
from fl_lightning.energy.fitting import high_quantile, measured_cost, relative_errors, robust_mean
from fl_lightning.energy.measuring import measure
from fl_lightning.energy.meters import JouleMeter
from fl_lightning.energy.reference_options import LinearShape, linear_options
from fl_lightning.errors import require
from fl_lightning.models.language.llama import KeyValueCache, Llama

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens that costs are fitted to. Products of 3 rows take longer than of 4 on some processors."""
HELD_OUT = (5, 10, 20, 40, 80, 160, 320, 448)
"""Numbers of tokens at which a fit is checked: between the knots."""
DEFAULT_CONTEXT = 256
REST, STEP = "rest", "step"
Samples: TypeAlias = Mapping[tuple[str, int], np.ndarray]


@dataclass(frozen=True)
class Calibration:
    """A table and how well it predicts what it was not fitted to.

    Args:
        table: the costs.
        errors: relative errors of means at numbers of tokens that were not fitted, and at one token with
            samples that were not: of each shape and option, and, as ``step``, of a whole step of the network
            with all groups at ``high``.
        samples: smallest number of samples of a measured cost.
    """

    table: CostTable
    errors: Mapping[str, Mapping[int, float]]
    samples: int

    def largest_error(self, name: str | None = None) -> float:
        """Return the largest relative error, of all or of one name."""
        chosen = self.errors.values() if name is None else [self.errors[name]]
        return max(abs(error) for errors in chosen for error in errors.values())


def calibrate(
    network: Llama,
    meter: JouleMeter,
    seconds: float = 60.0,
    scope: str = "adapter",
    context: int = DEFAULT_CONTEXT,
    seed: int = 0,
) -> Calibration:
    """Measure what each option of each group costs, with one CPU thread.

    Weights and inputs are random, since times do not depend on them. A step of n tokens sees ``context``
    tokens, its own included, or n where that is more; the cache holds those before it.

    A layer that is called again and again is faster than the same layer in its network. The rest is
    therefore what a step costs without groups, or what a whole step costs more than its groups, whichever is
    more: steps at ``high`` cost what was measured, and what an option saves is not overstated.

    Args:
        network: a network with adapters, on the CPU; it is not changed.
        meter: where joules come from.
        seconds: time of the measurement, by the clock on the wall; three passes are done at least.
        scope: ``adapter`` or ``model``: what *off* leaves out.
        context: tokens that a step sees.
        seed: of the random inputs.

    Raises:
        InputError: no layer has an adapter, or a number is not above 0.
    """
    require(
        seconds > 0 and context >= 1,
        f"--seconds {seconds}, --context {context}",
        "both are above 0",
        "write --seconds 60 --context 256",
    )
    shapes = {name: shape_of(layer) for name, layer in adapted_linears(network).items()}
    require(
        shapes,
        f"{type(network).__name__} without adapters",
        "a group is a linear layer with an adapter",
        "write a rank of 1 or more",
    )
    with one_thread(), torch.inference_mode(), rng.torch_stream(seed, "calibration"):
        works = {
            (work_name(shape, option), n): work
            for shape in sorted(set(shapes.values()))
            for (option, n), work in linear_works(shape, scope).items()
        }
        works |= {(STEP, n): step_work(network, n, context) for n in (*KNOTS, *HELD_OUT)}
        empty = without_groups(network)
        works |= {(REST, n): step_work(empty, n, context) for n in KNOTS}
        samples = measure(works, meter, seconds)
    return evaluated(samples, shapes, meter.label, scope, context)


def evaluated(
    samples: Samples, shapes: Mapping[str, LinearShape], label: str, scope: str, context: int
) -> Calibration:
    """Return the table that samples give, and its errors at samples that it does not use.

    Args:
        samples: joules of single calls by name of the work and number of tokens.
        shapes: shape of each group.
        label: label of the meter.
        scope: ``adapter`` or ``model``.
        context: tokens that a step saw.
    """
    fitted, held_out = {}, {}
    for (name, n), values in samples.items():  # of one token, every second sample is held out
        fitted[name, n] = values[::2] if n == 1 and len(values) > 1 else values
        held_out[name, n] = values[1::2] if n == 1 and len(values) > 1 else values
    means = {key: robust_mean(values) for key, values in fitted.items()}
    quantiles = {key: high_quantile(values) for key, values in fitted.items()}

    def cost_of(name: str) -> MeasuredCost:
        return measured_cost(
            KNOTS, *(np.array([found[name, n] for n in KNOTS]) for found in (means, quantiles))
        )

    names = {shape: {option: work_name(shape, option) for option in OPTIONS} for shape in shapes.values()}
    costs = {name: cost_of(name) for of_shape in names.values() for name in of_shape.values()}
    groups = {
        group: {option: costs[names[shape][option]] for option in OPTIONS} for group, shape in shapes.items()
    }
    for kind, found in zip(KINDS, (means, quantiles), strict=True):
        for n in KNOTS:
            of_groups = sum(float(options["high"].of_kind(kind).at(n)) for options in groups.values())
            found[REST, n] = max(found[REST, n], found[STEP, n] - of_groups)
    table = CostTable(label, device_name(), scope, context, groups, cost_of(REST))

    def errors_of(name: str, joules: Callable[[int], float]) -> dict[int, float]:
        chosen = (1, *HELD_OUT)
        return relative_errors({n: joules(n) for n in chosen}, {n: held_out[name, n] for n in chosen})

    errors = {name: errors_of(name, lambda n, c=cost: float(c.mean.at(n))) for name, cost in costs.items()}
    errors[STEP] = errors_of(STEP, table.all_high)
    return Calibration(table, errors, min(map(len, samples.values())))


def work_name(shape: LinearShape, option: str) -> str:
    """Return the name of a measured option of a linear layer, as ``96x288 int8``."""
    return f"{shape.inputs}x{shape.outputs} {option}"


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


def linear_works(shape: LinearShape, scope: str) -> dict[tuple[str, int], Callable[[], object]]:
    """Return calls of each option of a layer at each number of tokens."""
    options = linear_options(shape, scope)
    inputs = {n: torch.randn(n, shape.inputs) for n in (*KNOTS, *HELD_OUT)}

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


def device_name() -> str:
    """Return the processor in words, without the machine's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, one thread"
    return f"{platform.processor() or platform.machine()}, one thread"


@contextmanager
def one_thread() -> Iterator[None]:
    """Return a context in which torch computes with one thread, as clients do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
