"""The exceptions by which a check ends when the method does not pass it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fl_lightning.errors import RunStopped
from fl_lightning.support.user_code import users_step


class Violation(AssertionError):
    """The method broke a rule.

    Args:
        seen: what was seen.
        expected: what the rule leads to, where that is known.
        cause: the likely cause, where there is one.
    """

    def __init__(self, seen: str, expected: str = "", cause: str = "") -> None:
        parts = [
            seen,
            f"expected: {expected}" if expected else "",
            f"likely cause: {cause}" if cause else "",
        ]
        super().__init__("\n".join(filter(None, parts)))


class NotApplicable(Exception):
    """The rule does not concern this method."""


def expect(holds: bool, otherwise: str, expected: str = "", cause: str = "") -> None:
    """Report a broken rule.

    Args:
        holds: whether the rule holds.
        otherwise: what was seen, for the message.
        expected: what the rule leads to.
        cause: the likely cause.

    Raises:
        Violation: the rule does not hold.
    """
    if not holds:
        raise Violation(otherwise, expected, cause)


def in_words(error: Exception, warning: str = "") -> str:
    """Return the type and text of an error, and the last line of the method's own file that it went
    through.

    Args:
        error: what a check ended with.
        warning: the first warning of the check's runs, which says why one that was stopped has
            learned nothing: its folder is gone when somebody reads the table.
    """
    text = f"{error.given}; {warning}" if isinstance(error, RunStopped) and warning else str(error)
    step = users_step(error)
    parts = (f"{type(error).__name__}: {text}".removesuffix(": "), f"({step})" if step else "")
    return " ".join(filter(None, parts))


def not_finite(**tensors: Mapping[str, Tensor]) -> str:
    """Return in words which tensors have NaN or infinity, or a variance below 0, which leads to
    NaN.

    Args:
        tensors: groups of tensors, by the name of the group, such as ``server``.
    """
    found = []
    for group, named in tensors.items():
        for name, tensor in named.items():
            if not torch.isfinite(tensor).all():
                found.append(
                    f"{group}[{name!r}] has {'NaN' if tensor.isnan().any() else 'infinity'}"
                )
            elif name.rpartition(".")[2] == "running_var" and (tensor < 0).any():
                found.append(f"{group}[{name!r}] is a variance below 0")
    return ", ".join(found)


def show(tensor: Tensor) -> str:
    """Return a short vector as text, with three digits for each value."""
    return "[" + ", ".join(f"{value:.3g}" for value in tensor.flatten().tolist()) + "]"
