"""Joules of pieces of work, measured in turn so that a machine that slows down slows all of
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np

from fl_lightning.energy.calibration.meters import JouleMeter

Key = TypeVar("Key", bound=Hashable)
VISIT_SECONDS = 0.002
"""Work that takes less is repeated within a visit: short steps need more samples for their 0.99
quantile."""
MAX_CALLS_PER_VISIT = 20
LONG_SECONDS = 0.01
"""Work that takes more is measured at its first call: the state of the caches makes no difference
to it."""
WARM_CALLS = 4
"""Calls of short work that are not measured: after steps of hundreds of tokens, the second call of
a step of one token took a quarter longer than the fifth."""
MIN_VISITS = 3


def measure(
    works: Mapping[Key, Callable[[], object]], meter: JouleMeter, seconds: float
) -> dict[Key, np.ndarray]:
    """Return joules of single calls of each piece of work, ``{key: [samples]}``.

    All are visited in turn, again and again, until the time is over, but at least three times. A
    visit calls short work some times without measuring, so that its weights and code are in the
    caches as they are in a running network. A meter with a window gives the mean of a window as one
    sample.

    Args:
        works: functions by name.
        meter: the counter of joules.
        seconds: time of the whole measurement, by the clock on the wall.
    """
    samples: dict[Key, list[float]] = {key: [] for key in works}
    empty = _joules_of_nothing(meter)
    end, visits = time.monotonic() + seconds, 0
    while visits < MIN_VISITS or time.monotonic() < end:
        for key, work in works.items():
            if visits >= MIN_VISITS and time.monotonic() >= end:
                break
            samples[key] += [max(joules - empty, 0.0) for joules in _visit(work, meter)]
        visits += 1
    return {key: np.array(values) for key, values in samples.items()}


def _visit(work: Callable[[], object], meter: JouleMeter) -> list[float]:
    begin = time.perf_counter()
    first = meter.joules_of(work)
    took = max(time.perf_counter() - begin, 1e-7)
    if not meter.window_seconds:
        if took > LONG_SECONDS:
            return [first]
        for _ in range(WARM_CALLS - 1):
            work()
        calls = int(min(max(VISIT_SECONDS / took, 1), MAX_CALLS_PER_VISIT))
        return [meter.joules_of(work) for _ in range(calls)]
    repeats = int(meter.window_seconds / took) + 1
    before = meter.read()
    for _ in range(repeats):
        work()
    return [(meter.read() - before) / repeats]


def _joules_of_nothing(meter: JouleMeter) -> float:
    """Return what two readings of the meter cost themselves; 0 for one whose window makes that too
    little."""
    if meter.window_seconds:
        return 0.0
    return float(np.median([meter.joules_of(lambda: None) for _ in range(200)]))
