"""Which names may be imported for a configuration that somebody else wrote; without a gate, all.

A node of a deployment builds what a server's configuration says, with a gate. Everything here that
turns the words of a configuration into an import asks :func:`check_import` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fl_lightning.errors import InputError

_GATE: ContextVar[frozenset[str] | None] = ContextVar("import_gate", default=None)


def allowed_imports() -> frozenset[str] | None:
    """Return the dotted names that may be imported, each with all below it; None where there is no
    gate."""
    return _GATE.get()


def may_import(path: str) -> bool:
    """Return whether the gate, where there is one, lets a dotted name through."""
    gate, parts = _GATE.get(), path.split(".")
    return gate is None or any(".".join(parts[:end]) in gate for end in range(1, len(parts) + 1))


def check_import(path: str) -> None:
    """Refuse a dotted name that the gate does not let through."""
    if not may_import(path):
        raise InputError(
            f"import path {path}",
            "this node does not import it",
            "its owner can add a package with --allow",
        )


@contextmanager
def gate(names: Iterable[str]) -> Iterator[None]:
    """Return a context in which nothing but these names, and what is below them, may be
    imported."""
    token = _GATE.set(frozenset(names))
    try:
        yield
    finally:
        _GATE.reset(token)
