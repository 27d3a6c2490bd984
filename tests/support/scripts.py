"""Scripts of ``benchmarks`` and ``docs``, imported by name as they import each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from places import ROOT


@contextmanager
def script(name: str) -> Iterator[ModuleType]:
    """Give the module of a script, such as ``benchmarks/attack_grid``, within the block."""
    folder, _, module = name.rpartition("/")
    sys.path.insert(0, str(ROOT / folder))
    try:
        yield import_module(module)
    finally:
        sys.path.remove(str(ROOT / folder))
