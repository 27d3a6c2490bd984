"""Deterministic algorithms, and the names of the operations that have none."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

log = logging.getLogger("fl_lightning")

WARNING = re.compile(
    r"(\S+) does not have a deterministic implementation|(.+?) defaults to a non-deterministic algorithm"
)
"""What torch says of operations without a deterministic form, and of attention on CUDA, which has it in the
strict mode alone, where the former would be errors."""


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use deterministic algorithms within the block.

    An operation that has none runs all the same and is named in the log once.
    """
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("always", WARNING.pattern)
            warnings.showwarning = _to_log(warnings.showwarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _to_log(show: Any) -> Any:
    named = set()

    def note(message: Warning | str, *where: Any, **more: Any) -> None:
        match = WARNING.match(str(message))
        if match is None:
            show(message, *where, **more)
            return
        operation = match[1] or match[2]
        if operation not in named:
            named.add(operation)
            log.warning(
                (
                    "%s has no deterministic form on this device: two runs of one seed may differ in "
                    "the last digits"
                ),
                operation,
            )

    return note
