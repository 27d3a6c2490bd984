"""How many threads one operation uses on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MOST = 0
"""What operations had before the outermost :func:`one_thread`."""


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU a client trains on one thread, whoever trains it: sums over other numbers of threads are rounded differently."""
    global _MOST
    before, most = torch.get_num_threads(), _MOST
    if device.type == "cpu" and before != 1:
        _MOST = before
        torch.set_num_threads(1)
    try:
        yield
    finally:
        _MOST = most
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextmanager
def all_threads() -> Iterator[None]:
    """Inside of :func:`one_thread`, as many threads as outside: for what the server alone does, value by value."""
    before = torch.get_num_threads()
    if _MOST:
        torch.set_num_threads(_MOST)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
