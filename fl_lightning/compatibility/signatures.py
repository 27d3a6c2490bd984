"""Callbacks whose hooks can be called as those of their base are."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from fl_lightning.errors import InputError
from fl_lightning.hooks import Callback, Meter, Stressor

IN_PLACE_OF_LIGHTNINGS = {
    "EarlyStopping": "write callbacks.EarlyStopping, which counts rounds",
    "ModelCheckpoint": "write checkpoint_every and keep_checkpoints of the trainer",
}
"""What to write in place of Lightning's callbacks of these names."""


def hooks_of(base: type) -> dict[str, inspect.Signature]:
    """Return the hooks that a base of callbacks defines, with their signatures, in the order of the
    file."""
    return {
        name: inspect.signature(function)
        for name, function in vars(base).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }


def check_signatures(callbacks: Iterable[object]) -> None:
    """Refuse callbacks with a hook that cannot be called as the base class's is.

    Raises:
        InputError: there is one, which would end the run in the middle of a round.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            name = type(callback).__name__
            derive = "derive it from fl_lightning.Meter, or fl_lightning.Stressor"
            raise InputError(
                f"callbacks: {name}",
                "they are those of fl_lightning, whose rounds Lightning's know nothing of",
                IN_PLACE_OF_LIGHTNINGS.get(name, derive),
            )
        bases = (Callback, Stressor, Meter) if isinstance(callback, Stressor) else (Callback, Meter)
        for hook, right in (
            (hook, right) for base in bases for hook, right in hooks_of(base).items()
        ):
            given = getattr(callback, hook, None)
            if given is None or _takes(given, right):
                continue
            arguments = [
                f"{one.name}={one.name}" if one.kind is one.KEYWORD_ONLY else one.name
                for one in [*right.parameters.values()][1:]
            ]
            raise InputError(
                f"{type(callback).__name__}.{hook}{_without_types(given)}",
                f"it is called as {hook}({', '.join(arguments)})",
                f"write def {hook}{_without_types(right)}",
            )


def _takes(hook: Any, right: inspect.Signature) -> bool:
    """Return whether a bound hook can be called with the arguments of the base class's."""
    _, *arguments = right.parameters.values()
    by_name = {one.name: None for one in arguments if one.kind is one.KEYWORD_ONLY}
    try:
        inspect.signature(hook).bind(*[None] * (len(arguments) - len(by_name)), **by_name)
    except TypeError:
        return False
    except ValueError:  # a builtin function has no signature to read
        return True
    return True


def _without_types(hook: Any) -> str:
    """Return the parameters of a hook as its definition has them, without types."""
    if not isinstance(hook, inspect.Signature):
        if not callable(hook):
            return f" = {hook!r}"
        hook = inspect.signature(getattr(hook, "__func__", hook))
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in hook.parameters.values()]
    return str(inspect.Signature(plain))
