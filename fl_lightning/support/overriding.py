"""Which hooks of a base class an object has of its own."""

from __future__ import annotations


def overrides(instance: object, base: type, hook: str) -> bool:
    """Return whether ``instance`` has another ``hook`` than ``base``: of a subclass, a mixin, or set on it.

    A shortcut for the base's own hook is taken only where this is false; a decorator counts as another hook.
    """
    return hook in vars(instance) or getattr(type(instance), hook) is not getattr(base, hook)
