"""A test of whether an object overrides a hook of its base class."""

from __future__ import annotations


def overrides(instance: object, base: type, hook: str) -> bool:
    """Return whether ``instance`` has another ``hook`` than ``base``.

    It may come from a subclass or a mixin, or be set on the instance; a decorated hook is another
    one too. A shortcut that replaces the hook of ``base`` may be taken only where this is false.
    """
    return hook in vars(instance) or getattr(type(instance), hook) is not getattr(base, hook)
