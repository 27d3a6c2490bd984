"""Python attributes of a module and its children around a local step: which changed, and back as they
were."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from fl_lightning.engines.attributes import REGISTERED


class Attributes:
    """A shallow copy of them; containers one level deep. Parameters, buffers and submodules are left out."""

    def __init__(self, module: nn.Module) -> None:
        self.held = [
            (
                child,
                {
                    name: (value, _contents(value))
                    for name, value in vars(child).items()
                    if name not in REGISTERED
                },
            )
            for child in module.modules()
        ]

    def changed(self) -> str:
        """Return the name of an attribute that is not what it was; empty when there is none."""
        for child, before in self.held:
            now = {name: value for name, value in vars(child).items() if name not in REGISTERED}
            for name in {**before, **now}:
                if name not in before or name not in now:
                    return name
                value, contents = before[name]
                if now[name] is not value or not _same(_contents(value), contents):
                    return name
        return ""

    def restore(self) -> None:
        for child, before in self.held:
            for name in [name for name in vars(child) if name not in REGISTERED and name not in before]:
                del vars(child)[name]
            for name, (value, contents) in before.items():
                vars(child)[name] = value
                if isinstance(value, list):
                    value[:] = contents
                elif isinstance(value, (dict, set)) and contents is not None:
                    value.clear()
                    value.update(contents)


def _contents(value: Any) -> Any:
    if isinstance(value, (list, set)):
        return list(value)
    return dict(value) if type(value) is dict else None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return True


class UnreadableError(Exception):
    """Something was read that a recording must not depend on."""


class Unreadable:
    """Stands for a number that nobody may look at: whatever is done with it raises
    :class:`UnreadableError`."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def _read(self, *_: object) -> NoReturn:
        raise UnreadableError(f"a step reads {self.__dict__['name']}")

    __bool__ = __int__ = __index__ = __float__ = __len__ = __iter__ = __call__ = _read
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _read  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        __floordiv__
    ) = __rfloordiv__ = _read
    __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = __and__ = __rand__ = __or__ = (
        __ror__
    ) = __xor__ = _read
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = __pos__ = __abs__ = __round__ = (
        __getitem__
    ) = _read
    __str__ = __repr__ = __format__ = __hash__ = __getattr__ = _read  # type: ignore[assignment]
