"""Python attributes of a module: which PyTorch keeps books of, and which are plain values."""

from __future__ import annotations

REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes in which ``torch.nn.Module`` keeps its tensors and submodules."""
PLAIN = (bool, int, float, str, type(None))


def is_plain(value: object) -> bool:
    """Return whether a value is a number, a text, None, or a list or tuple of such."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)
