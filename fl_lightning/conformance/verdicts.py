"""How a check ends, other than well."""

from __future__ import annotations

from torch import Tensor


class Violation(AssertionError):
    """The method broke a rule."""


class NotApplicable(Exception):
    """The rule does not concern this method."""


def require(holds: bool, otherwise: str) -> None:
    """Raise :class:`Violation` with ``otherwise`` where a rule does not hold."""
    if not holds:
        raise Violation(otherwise)


def show(tensor: Tensor) -> str:
    """A short vector, three digits each."""
    return "[" + ", ".join(f"{value:.3g}" for value in tensor.flatten().tolist()) + "]"
