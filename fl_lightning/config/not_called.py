"""Hooks that a user's class overrides and that nobody calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fl_lightning.config.overriding import overrides

log = logging.getLogger("fl_lightning")


def overridden(instance: object, base: type, hooks: Iterable[str]) -> list[str]:
    """Return those of some hooks of a base that an object overrides."""
    return [hook for hook in hooks if overrides(instance, base, hook)]


def warn_of_ignored(names: Iterable[str], owner: object, why: str) -> None:
    """Warn of parts of an object that have no effect, if there are any.

    Args:
        names: of the parts.
        owner: the object.
        why: what is done in their place, a clause.
    """
    if names := list(names):
        log.warning("%s of %s: %s", ", ".join(names), type(owner).__name__, why)
