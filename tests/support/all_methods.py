"""The methods of the project whose clients train."""

from __future__ import annotations

from fl_lightning import methods
from fl_lightning.methods import Method


def _is_method(value):
    return isinstance(value, type) and issubclass(value, Method) and value is not Method


METHODS = [
    name
    for name in methods.__all__
    if _is_method(getattr(methods, name)) and name != "Centralised"  # whose clients make no step
]
