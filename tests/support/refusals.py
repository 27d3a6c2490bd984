"""What tests say of a refusal: the kind of error and the setting that it names, not the words of
the sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fl_lightning.cli import types
from fl_lightning.errors import InputError, ThreePartError


@contextmanager
def refused(
    given: str, instead: str = "", kind: type[ThreePartError] = InputError
) -> Iterator[None]:
    """Expect an error of ``kind`` whose first part has ``given``, whose last has ``instead``, and
    which states a rule."""
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    assert given in error.given, error.given
    assert instead in error.instead, error.instead
    assert error.rule


def know_installed_classes_alone(patch: pytest.MonkeyPatch) -> None:
    """Keep the command line from classes that tests of this process defined."""
    all_of = types.subclasses_of

    def those_that_are_installed(cls: type) -> list[type]:
        rooms = ("fl_lightning.", "callbacks.", "torch.", "lightning.", "torchmetrics.")
        return [one for one in all_of(cls) if one.__module__.startswith(rooms)]

    patch.setattr(types, "subclasses_of", those_that_are_installed)
