"""Joules of a step as a function of its number of tokens: a line, or a curve through measured
points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from fl_lightning.errors import InputError, as_bad_input, require

KINDS = ("mean", "q99")
"""The mean, for training, and the 0.99 quantile, for enforcement."""


@dataclass(frozen=True)
class CostLine:
    """A cost of ``a + b n`` joules for a step of n tokens, and of nothing for a step of none.

    Args:
        a: joules of a step, whatever its length, 0 or more.
        b: joules of a token, 0 or more.

    Raises:
        InputError: one of them is negative or not finite.

    >>> CostLine(a=1.0, b=0.5).at([0, 1, 4]).tolist()
    [0.0, 1.5, 3.0]
    """

    a: float
    b: float

    def __post_init__(self) -> None:
        _require_joules([self.a, self.b], f"a line of a={self.a}, b={self.b}")

    def at(self, tokens: ArrayLike) -> np.ndarray:
        """Return joules, float64 of the shape of ``tokens``, which are counts of 0 or more."""
        n = np.asarray(tokens, dtype=np.float64)
        return np.where(n > 0, self.a + self.b * n, 0.0)


@dataclass(frozen=True)
class CostCurve:
    """A cost through measured points, straight between them, and nothing for a step of no token.

    Above the last point it goes on with the slope of the last two, or with the last point's joules
    per token where that is more.

    Args:
        tokens: n of the points, ascending; the first is 1.
        joules: joules of a step of so many tokens, 0 or more.

    Raises:
        InputError: the points are not ascending from 1, or joules are negative, not finite or
            missing.

    >>> CostCurve((1, 2, 4), (1.0, 1.0, 3.0)).at([0, 1, 3, 6]).tolist()
    [0.0, 1.0, 2.0, 5.0]
    """

    tokens: tuple[int, ...]
    joules: tuple[float, ...]

    def __post_init__(self) -> None:
        given = f"a curve of tokens {list(self.tokens)}"
        require(
            len(self.tokens) == len(self.joules) >= 1
            and self.tokens[0] == 1
            and all(isinstance(n, int) for n in self.tokens)
            and all(
                n < following for n, following in zip(self.tokens, self.tokens[1:], strict=False)
            ),
            given,
            "the points of a curve ascend from 1 token, each with its joules",
            "write e.g. tokens [1, 8, 64] and three numbers of joules",
        )
        _require_joules(self.joules, given)

    def at(self, tokens: ArrayLike) -> np.ndarray:
        """Return joules, float64 of the shape of ``tokens``, which are counts of 0 or more."""
        n = np.asarray(tokens, dtype=np.float64)
        last, most = self.tokens[-1], self.joules[-1]
        slope = most / last
        if len(self.tokens) > 1:
            slope = max(slope, (most - self.joules[-2]) / (last - self.tokens[-2]))
        within = np.interp(n, self.tokens, self.joules)
        return np.where(n > 0, within + slope * np.maximum(n - last, 0.0), 0.0)


Cost: TypeAlias = CostLine | CostCurve


@dataclass(frozen=True)
class MeasuredCost:
    """What a calibration found of one piece of work.

    Args:
        mean: mean joules, for training.
        q99: 0.99 quantile of joules, for enforcement.
    """

    mean: Cost
    q99: Cost

    def of_kind(self, kind: str) -> Cost:
        """Return the cost of this kind, one of ``KINDS``."""
        assert kind in KINDS, kind
        return self.mean if kind == "mean" else self.q99


def measured_from_json(value: Any, place: str) -> MeasuredCost:
    """Return the cost that a JSON document states.

    Args:
        value: ``{"mean": cost, "q99": cost}``.
        place: where in the document it stands, for messages.

    Raises:
        InputError: it is no such value.
    """
    form = 'write {"mean": {"a": 0, "b": 1e-6}, "q99": {"a": 0, "b": 2e-6}}'
    with as_bad_input(
        place, "a measured cost has the keys mean and q99", form, TypeError, LookupError
    ):
        return MeasuredCost(*(cost_from_json(value[kind], f"{place}.{kind}") for kind in KINDS))


def cost_from_json(value: Any, place: str) -> Cost:
    """Return the line or curve that a JSON document states.

    Args:
        value: ``{"a": joules, "b": joules}``, or ``{"tokens": [...], "joules": [...]}``.
        place: where in the document it stands, for messages.

    Raises:
        InputError: it is neither, or a number is negative.
    """
    rule = "a cost is a line of a and b, or a curve of tokens and joules, in numbers"
    try:
        with as_bad_input(
            f"{value}"[:80], rule, 'write {"a": 0.0, "b": 1e-6}', TypeError, LookupError
        ):
            if "a" in value:
                return CostLine(**value)
            return CostCurve(tuple(value["tokens"]), tuple(value["joules"]))
    except InputError as error:
        raise error.within(place) from None


def _require_joules(joules: Sequence[float], given: str) -> None:
    require(
        all(math.isfinite(value) and value >= 0 for value in joules),
        f"{given} with joules {list(joules)}"[:200],
        "joules are finite and 0 or more",
        "calibrate again: python -m fl_lightning energy --calibrate",
    )
