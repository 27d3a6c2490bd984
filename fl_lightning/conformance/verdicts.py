"""The exceptions by which a check ends when the method does not pass it."""

from __future__ import annotations

from torch import Tensor


class Violation(AssertionError):
    """The method broke a rule."""


class NotApplicable(Exception):
    """The rule does not concern this method."""


def expect(holds: bool, otherwise: str) -> None:
    """Report a broken rule.

    Args:
        holds: whether the rule holds.
        otherwise: what was seen, for the message.

    Raises:
        Violation: the rule does not hold.
    """
    if not holds:
        raise Violation(otherwise)


def show(tensor: Tensor) -> str:
    """Return a short vector as text, with three digits for each value."""
    return "[" + ", ".join(f"{value:.3g}" for value in tensor.flatten().tolist()) + "]"
