"""Tables of costs from samples of joules, and how far they are from samples that they do not
use."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np

from fl_lightning.energy.calibration.fitting import (
    high_quantile,
    measured_cost,
    relative_errors,
    robust_mean,
)
from fl_lightning.energy.calibration.works import LinearShape, step_name, work_name
from fl_lightning.energy.cost_shapes import MeasuredCost
from fl_lightning.energy.costs import CostTable
from fl_lightning.energy.options import OPTIONS

REST = "rest"
"""Name of a step without groups: what no option changes."""
Samples: TypeAlias = Mapping[tuple[str, int], np.ndarray]
Joules: TypeAlias = dict[tuple[str, int], float]


@dataclass(frozen=True)
class Calibration:
    """A table and how well it predicts what it was not fitted to.

    Args:
        table: the costs.
        errors: relative errors of means at numbers of tokens that were not fitted, and at one token
            with samples that were not: of each shape and option alone, and of whole steps with all
            groups at one option, as ``step high``.
        samples: smallest number of samples of a measured cost.
    """

    table: CostTable
    errors: Mapping[str, Mapping[int, float]]
    samples: int

    def largest_error(self, name: str | None = None) -> float:
        """Return the largest relative error, of all or of one name."""
        chosen = self.errors.values() if name is None else [self.errors[name]]
        return max(abs(error) for errors in chosen for error in errors.values())


@dataclass(frozen=True)
class Measured:
    """What was measured of one network.

    Args:
        samples: joules of single calls by name of the work and number of tokens.
        shapes: shape of each group.
        scope: ``adapter`` or ``model``: what *off* left out.
        high: precision of the option *high*.
        merged: whether its adapters are merged into their bases.
        adapter: its adapters in words, see :class:`fl_lightning.energy.CostTable`.
    """

    samples: Samples
    shapes: Mapping[str, LinearShape]
    scope: str
    high: str = "float32"
    merged: bool = False
    adapter: str = ""
    means: Joules = field(default_factory=dict, init=False)
    quantiles: Joules = field(default_factory=dict, init=False)
    held_out: dict[tuple[str, int], np.ndarray] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        # of one token, every second sample is held out
        for (name, n), values in self.samples.items():
            half = n == 1 and len(values) > 1
            self.held_out[name, n] = values[1::2] if half else values
            self.means[name, n] = robust_mean(values[::2] if half else values)
            self.quantiles[name, n] = high_quantile(values[::2] if half else values)

    @property
    def knots(self) -> list[int]:
        """The numbers of tokens that costs are fitted to: those that the rest was measured at."""
        return sorted(n for name, n in self.samples if name == REST)

    @property
    def checked(self) -> list[int]:
        """The numbers of tokens at which a fit is checked: one, and those that are no knots."""
        return sorted({n for _, n in self.samples} - set(self.knots) | {1})

    @property
    def alike(self) -> list[Sequence[str]]:
        """Options that share an amount, see :func:`_put_in_place`.

        In a merged network they do not: it is mostly read for *high* alone, whose share of the
        amount of int8 would be large against one plain product.
        """
        if self.merged:
            return [(option,) for option in OPTIONS]
        return [OPTIONS] if self.scope == "adapter" else [OPTIONS[:1], OPTIONS[1:]]

    def cost(self, name: str) -> MeasuredCost:
        """Return the cost of a piece of work."""
        found = (
            np.array([values[name, n] for n in self.knots])
            for values in (self.means, self.quantiles)
        )
        return measured_cost(self.knots, *found)


def tables_of(measured: Mapping[str, Measured], label: str, context: int) -> dict[str, Calibration]:
    """Return the tables that samples give, and their errors at samples that they do not use.

    Tables that were measured together have one rest.

    Args:
        measured: by name of the table; all have the same samples of the rest.
        label: label of the meter.
        context: tokens that a step saw.
    """
    loops = {name: _costs_in_loops(one) for name, one in measured.items()}
    for one in measured.values():
        for options in one.alike:
            _put_in_place(one, options)
    _charge_whole_steps(list(measured.values()))
    return {name: _calibration(one, loops[name], label, context) for name, one in measured.items()}


def _costs_in_loops(one: Measured) -> dict[str, MeasuredCost]:
    names = [
        work_name(shape, option) for shape in sorted(set(one.shapes.values())) for option in OPTIONS
    ]
    return {name: one.cost(name) for name in names}


def _calibration(
    one: Measured, loops: Mapping[str, MeasuredCost], label: str, context: int
) -> Calibration:
    groups = {
        group: {option: one.cost(work_name(shape, option)) for option in OPTIONS}
        for group, shape in one.shapes.items()
    }
    rest = one.cost(REST)
    table = CostTable(
        label, device_name(), one.scope, context, groups, rest, high=one.high, adapter=one.adapter
    )
    predicted = {
        (name, n): float(cost.mean.at(n)) for name, cost in loops.items() for n in one.checked
    }
    for n in one.checked:
        of_groups = table.tensors(n).sum(0).tolist()
        predicted |= {
            (step_name(z), n): table.fixed(n) + of_groups[i] for i, z in enumerate(OPTIONS)
        }
    errors = {
        name: relative_errors(
            {n: predicted[name, n] for n in one.checked},
            {n: one.held_out[name, n] for n in one.checked},
        )
        for name in dict.fromkeys(name for name, _ in predicted)
    }
    return Calibration(table, errors, min(map(len, one.samples.values())))


def _put_in_place(one: Measured, options: Sequence[str]) -> None:
    """Make of joules in a loop those in the network, in the dictionaries themselves.

    A layer that is called again and again is faster than the same layer in its network, where
    others were computed since. By measurement the difference hardly depends on the option (one
    token of llama_tiny: 20 us for off, 23 for high, 36 for int8). So one amount, 0 or more, is
    added to all layers and options of a number of tokens: the median over options of what a step
    costs more than the rest and its layers in loops, by the number of layers. The order of options
    is that of the loops, which have more samples than steps. A layer that is left out, *off* in the
    scope ``model``, has an amount of its own.

    Args:
        one: what was measured; its means and quantiles are changed.
        options: those that share an amount.
    """
    means, shapes = one.means, one.shapes
    kinds = sorted(set(shapes.values()))
    for n in one.knots:
        missing = [
            means[step_name(option), n]
            - means[REST, n]
            - sum(means[work_name(shape, option), n] for shape in shapes.values())
            for option in options
        ]
        more = max(float(np.median(missing)) / len(shapes), 0.0)
        for option, shape, found in product(options, kinds, (means, one.quantiles)):
            found[work_name(shape, option), n] += more


def _charge_whole_steps(every: Sequence[Measured]) -> None:
    """Raise the quantile of the rest, if need be, until a step at ``high`` of every network is
    charged no less than its quantile."""
    for n in every[0].knots:
        least = [one.quantiles[REST, n] for one in every]
        for one in every:
            charged = sum(
                one.quantiles[work_name(shape, "high"), n] for shape in one.shapes.values()
            )
            least.append(one.quantiles[step_name("high"), n] - charged)
        for one in every:
            one.quantiles[REST, n] = max(least)


def device_name() -> str:
    """Return the processor in words, without the machine's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, one thread"
    return f"{platform.processor() or platform.machine()}, one thread"
