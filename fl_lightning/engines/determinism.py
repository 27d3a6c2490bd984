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
    r"(.+?) (does not have a deterministic implementation|defaults to a non-deterministic algorithm)"
)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use deterministic algorithms within the block.

    An operation that has none runs all the same and is named in the log once.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
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
        elif match[1] not in named:
            named.add(match[1])
            log.warning(
                (
                    "%s has no deterministic form on this device: two runs of one seed may differ in "
                    "the last digits"
                ),
                match[1],
            )

    return note
