"""Imports of torch and of what rests on it, which take most of the start of a process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType


def import_quickly(module: str) -> ModuleType:
    """Return a module of the package, imported without what slows imports down, for a program of
    one's own.

    Threads of OpenMP that torch starts do not spin while they are idle, which would cost many times
    what it saves on a busy machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with garbage_collection_off():
        return import_module(module)


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Return a context without garbage collection, for imports.

    They make 700 000 objects that stay. Searching them for garbage would take a quarter of the
    imports' time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # the objects now belong to the oldest generation, which the next collection skips
        gc.unfreeze()
        gc.enable()
