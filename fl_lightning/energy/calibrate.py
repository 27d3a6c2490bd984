"""The cost table of one network on this device, by measuring linear layers, the rest, and whole steps."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from fl_lightning import rng
from fl_lightning.energy.cost_shapes import MeasuredCost
from fl_lightning.energy.costs import OPTIONS, CostTable
from fl_lightning.energy.fitting import high_quantile, measured_cost, relative_errors, robust_mean
from fl_lightning.energy.measuring import measure
from fl_lightning.energy.meters import JouleMeter
from fl_lightning.energy.works import (
    LinearShape,
    linear_works,
    step_name,
    step_work,
    switched_copy,
    without_groups,
    work_name,
)
from fl_lightning.errors import require
from fl_lightning.models.language.llama import Llama
from fl_lightning.models.options import Scope

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens that costs are fitted to. Products of 3 rows take longer than of 4 on some processors."""
HELD_OUT = (5, 10, 20, 40, 80, 160, 320, 448)
"""Numbers of tokens at which a fit is checked: between the knots."""
DEFAULT_CONTEXT = 256
REST = "rest"
Samples: TypeAlias = Mapping[tuple[str, int], np.ndarray]
Joules: TypeAlias = dict[tuple[str, int], float]


@dataclass(frozen=True)
class Calibration:
    """A table and how well it predicts what it was not fitted to.

    Args:
        table: the costs.
        errors: relative errors of means at numbers of tokens that were not fitted, and at one token with
            samples that were not: of each shape and option alone, and of whole steps with all groups at one
            option, as ``step high``.
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
    scope: Scope = "adapter",
    context: int = DEFAULT_CONTEXT,
    seed: int = 0,
) -> Calibration:
    """Measure what each option of each group costs, with one CPU thread.

    Weights and inputs are random, since times do not depend on them. A step of n tokens sees ``context``
    tokens, its own included, or n where that is more; the cache holds those before it.

    Layers are measured alone, whole steps with all groups at one option, and steps without groups, which are
    the rest. What a step costs more than the rest and its layers alone is added to all layers equally.

    Args:
        network: a network with adapters of one kind, on the CPU; it is not changed.
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
    switched, layers = switched_copy(network, scope)
    shapes = {name: LinearShape(*layer.shape) for name, layer in layers.items()}
    with one_thread(), torch.inference_mode(), rng.torch_stream(seed, "calibration"):
        works = linear_works(layers, (*KNOTS, *HELD_OUT))
        for option, n in product(OPTIONS, (*KNOTS, *HELD_OUT)):
            works[step_name(option), n] = step_work(switched, n, context, option, len(layers))
        empty = without_groups(switched)
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
    kinds, checked = sorted(set(shapes.values())), (1, *HELD_OUT)
    loops = {
        work_name(shape, option): _cost(work_name(shape, option), means, quantiles)
        for shape in kinds
        for option in OPTIONS
    }
    alike = (OPTIONS,) if scope == "adapter" else (OPTIONS[:1], OPTIONS[1:])
    for options in alike:
        _put_in_place(means, quantiles, shapes, options)
    _charge_whole_steps(quantiles, shapes)
    groups = {
        group: {option: _cost(work_name(shape, option), means, quantiles) for option in OPTIONS}
        for group, shape in shapes.items()
    }
    table = CostTable(label, device_name(), scope, context, groups, _cost(REST, means, quantiles))

    predicted = {(name, n): float(cost.mean.at(n)) for name, cost in loops.items() for n in checked}
    for n in checked:
        of_groups = table.tensors(n).sum(0).tolist()
        predicted |= {(step_name(z), n): table.fixed(n) + of_groups[i] for i, z in enumerate(OPTIONS)}
    errors = {
        name: relative_errors(
            {n: predicted[name, n] for n in checked}, {n: held_out[name, n] for n in checked}
        )
        for name in dict.fromkeys(name for name, _ in predicted)
    }
    return Calibration(table, errors, min(map(len, samples.values())))


def _cost(name: str, means: Joules, quantiles: Joules) -> MeasuredCost:
    return measured_cost(KNOTS, *(np.array([found[name, n] for n in KNOTS]) for found in (means, quantiles)))


def _put_in_place(
    means: Joules, quantiles: Joules, shapes: Mapping[str, LinearShape], options: Sequence[str]
) -> None:
    """Make of joules in a loop those in the network, in the dictionaries themselves.

    A layer that is called again and again is faster than the same layer in its network, where others were
    computed since. By measurement the difference hardly depends on the option (one token of llama_tiny: 20 us
    for off, 23 for high, 36 for int8). So one amount, 0 or more, is added to all layers and options of a
    number of tokens: the median over options of what a step costs more than the rest and its layers in loops,
    by the number of layers. The order of options is that of the loops, which have more samples than steps. A
    layer that is left out, *off* in the scope ``model``, has an amount of its own.

    Args:
        means: mean joules by name of the work and number of tokens.
        quantiles: 0.99 quantiles.
        shapes: shape of each group.
        options: those that share an amount.
    """
    kinds, groups = sorted(set(shapes.values())), len(shapes)
    for n in KNOTS:
        missing = [
            means[step_name(option), n]
            - means[REST, n]
            - sum(means[work_name(shape, option), n] for shape in shapes.values())
            for option in options
        ]
        more = max(float(np.median(missing)) / groups, 0.0)
        for option, shape, found in product(options, kinds, (means, quantiles)):
            found[work_name(shape, option), n] += more


def _charge_whole_steps(quantiles: Joules, shapes: Mapping[str, LinearShape]) -> None:
    """Raise the quantile of the rest, if need be, until a step at ``high`` is charged no less than its
    quantile."""
    for n in KNOTS:
        charged = sum(quantiles[work_name(shape, "high"), n] for shape in shapes.values())
        quantiles[REST, n] = max(quantiles[REST, n], quantiles[step_name("high"), n] - charged)


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
