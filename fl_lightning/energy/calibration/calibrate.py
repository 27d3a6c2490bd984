"""Cost tables of networks on this device, by measuring linear layers, the rest, and whole steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fl_lightning import rng
from fl_lightning.energy.calibration.measuring import measure
from fl_lightning.energy.calibration.meters import JouleMeter
from fl_lightning.energy.calibration.samples import REST, Calibration, Measured, tables_of
from fl_lightning.energy.calibration.steps import steps_of
from fl_lightning.energy.calibration.works import (
    LinearShape,
    Prefix,
    linear_works,
    prefix_of,
    step_name,
    step_work,
    switched_copy,
    without_groups,
)
from fl_lightning.energy.options import OPTIONS, HighPrecision, Scope
from fl_lightning.energy.switched import MergedLinear, SwitchedLinear
from fl_lightning.energy.switched.kinds import adapter_name
from fl_lightning.errors import require
from fl_lightning.support.memory import keep_freed_memory

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens that costs are fitted to. Products of 3 rows take longer than of 4 on some
processors."""
HELD_OUT = (5, 10, 20, 40, 80, 160, 320, 448)
"""Numbers of tokens at which a fit is checked: between the knots."""
DEFAULT_CONTEXT = 256


@dataclass(frozen=True)
class Subject:
    """What a table is of.

    Args:
        network: ``llama_tiny`` or a network of transformers, with adapters of one kind, on the CPU.
        scope: ``adapter`` or ``model``: what *off* leaves out.
        high: precision of the option *high*.
    """

    network: nn.Module
    scope: Scope = "adapter"
    high: HighPrecision = "float32"


def calibrate(
    network: nn.Module,
    meter: JouleMeter,
    seconds: float = 60.0,
    scope: Scope = "adapter",
    context: int = DEFAULT_CONTEXT,
    seed: int = 0,
    high: HighPrecision = "float32",
) -> Calibration:
    """Measure what each option of each group costs, with one CPU thread.

    Inputs are random, since times do not depend on them. A step of n tokens sees ``context``
    tokens, its own included, or n where that is more; the cache holds those before it. A network
    that has learned fewer positions is measured within these.

    Layers are measured alone, whole steps with all groups at one option, and steps without groups,
    which are the rest. What a step costs more than the rest and its layers alone is added to all
    layers equally.

    Args:
        network: see :class:`Subject`; it is not changed.
        meter: where joules come from.
        seconds: time of the measurement, by the clock on the wall; three passes are done at least.
        scope: ``adapter`` or ``model``: what *off* leaves out.
        context: tokens that a step sees.
        seed: of the random inputs.
        high: precision of the option *high*.

    Raises:
        InputError: no layer has an adapter, the network is of another kind, or a number is not
            above 0.
    """
    return calibrate_together({"": Subject(network, scope, high)}, meter, seconds, context, seed)[
        ""
    ]


def calibrate_together(
    subjects: Mapping[str, Subject],
    meter: JouleMeter,
    seconds: float = 60.0,
    context: int = DEFAULT_CONTEXT,
    seed: int = 0,
) -> dict[str, Calibration]:
    """Measure several tables of one network in turn: they have one rest, and the same moments of
    the machine.

    Args:
        subjects: by name of the table: one network with different adapters, scopes or precisions.
        meter, seconds, context, seed: see :func:`calibrate`; the time is that of all tables.

    Raises:
        InputError: as :func:`calibrate`, or the subjects have other groups than the first.
    """
    require(
        subjects and seconds > 0 and context >= 1,
        f"--seconds {seconds}, --context {context}",
        "both are above 0",
        "write --seconds 60 --context 256",
    )
    # as runs do; else the pages of long steps are faulted in again, at each or at none
    keep_freed_memory()
    with one_thread(), rng.torch_stream(seed, "calibration"):
        switched = {
            name: switched_copy(one.network, one.scope, one.high) for name, one in subjects.items()
        }
        shapes = {
            name: {group: LinearShape(*layer.shape) for group, layer in layers.items()}
            for name, (_, layers) in switched.items()
        }
        _require_same_groups(shapes)
        with torch.inference_mode():
            samples = measure(_works(switched, context), meter, seconds)
    rest = {(work, n): values for (_, work, n), values in samples.items() if work == REST}
    measured = {
        name: Measured(
            {(work, n): values for (of, work, n), values in samples.items() if of == name} | rest,
            shapes[name],
            one.scope,
            one.high,
            merged=all(
                isinstance(layer.adapted, MergedLinear) for layer in switched[name][1].values()
            ),
            adapter=adapter_name(next(iter(switched[name][1].values())).adapted),
        )
        for name, one in subjects.items()
    }
    return tables_of(measured, meter.label, context)


def _works(
    switched: Mapping[str, tuple[nn.Module, Mapping[str, SwitchedLinear]]], context: int
) -> dict[tuple[str, str, int], Callable[[], object]]:
    """Return the calls to measure, by table, name of the work and number of tokens.

    Those of one number of tokens follow each other, so that what is compared is measured at about
    one time.
    """
    first, (network, _) = next(iter(switched.items()))
    longest = steps_of(network).longest
    context = context if longest is None else min(context, longest)
    tokens = [n for n in (*KNOTS, *HELD_OUT) if longest is None or n <= longest]
    alone = {name: linear_works(layers, tokens) for name, (_, layers) in switched.items()}
    empty = without_groups(network)
    works: dict[tuple[str, str, int], Callable[[], object]] = {}
    for n in tokens:
        prefix = prefix_of(network, n, context)
        for name, (whole, layers) in switched.items():
            works |= {(name, work, n): call for (work, of), call in alone[name].items() if of == n}
            works |= _steps(name, whole, prefix, len(layers), n)
        if n in KNOTS:
            works[first, REST, n] = step_work(empty, prefix)
    return works


def _steps(
    name: str, network: nn.Module, prefix: Prefix, groups: int, n: int
) -> dict[tuple[str, str, int], Callable[[], object]]:
    return {(name, step_name(z), n): step_work(network, prefix, z, groups) for z in OPTIONS}


def _require_same_groups(shapes: Mapping[str, Mapping[str, LinearShape]]) -> None:
    """Refuse networks whose groups differ: they have no common rest."""
    first, *others = shapes
    for name in others:
        require(
            shapes[name] == shapes[first],
            f"{first} and {name} with other groups",
            "tables of one rest are of one network",
            "calibrate them one by one",
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """Return a context in which torch computes with one thread, as clients do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
