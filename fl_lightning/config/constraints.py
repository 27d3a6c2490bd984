"""What a setting may be, beside its type: said once, in the annotation of the constructor's
argument.

``share: Annotated[float, within("(0, 1]", "a share lies in (0, 1]", 0.2)]`` is read where a
constructor of a :class:`~fl_lightning.config.recorded.Recorded` class binds its arguments, and by
the command line, which refuses a slip before it imports torch. Both make the one message here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fl_lightning.config.near_names import nearest
from fl_lightning.errors import InputError


@dataclass(frozen=True)
class Constraint:
    """What the value of one setting may be.

    Args:
        rule: what is right, in words; empty: the list of names.
        instead: what to write in its place: a value; or what to do, a text of several words.
        interval: the numbers that are right, as mathematics writes them: ``(0, 1]`` or ``[1,
            inf)``.
        whole: whether they are integers.
        names: the texts that are right, those of a Literal if none are given; beside an interval,
            what else is right.
        names_from: ``module:function``, which returns the names where they are too many to be kept
            with each setting.
        near: whether the nearest of the names is proposed before ``instead``.
        path: what a path must lead to, ``file``, ``folder`` or ``any``; empty for what is no path.
        at_once: whether the constructor refuses other values; else it is refused where the setting
            is used.
        optional: whether it may be None.
        given: how a value is shown, with ``{value}`` in its place; empty: as the class shows its
            settings. A text is in quotes after a ``=``.
    """

    rule: str = ""
    instead: str = ""
    interval: str = ""
    whole: bool = False
    names: tuple[str | int, ...] = ()
    names_from: str = ""
    near: bool = False
    path: str = ""
    at_once: bool = True
    optional: bool = False
    given: str = ""

    def allows(self, value: Any) -> bool:
        if value in self.names:
            return True
        if self.interval:
            if self._odd_type(value):
                return False
            least, most = map(_number, self.interval[1:-1].split(","))
            above = value > least if self.interval[0] == "(" else value >= least
            return bool(above and (value < most if self.interval[-1] == ")" else value <= most))
        if self.path:
            found = Path(value)
            return {"file": found.is_file, "folder": found.is_dir, "any": found.exists}[self.path]()
        return not self.names

    def _odd_type(self, value: Any) -> str:
        """Return the type of a value that is no number, or not whole where it has to be; else
        ""."""
        right = isinstance(value, Integral if self.whole else Real)
        return type(value).__name__ if self.interval and not right else ""

    def refusal(self, value: Any) -> InputError | None:
        """Return the error of a value that is not allowed; None of one that is."""
        if self.allows(value):
            return None
        shown = value
        if self.path:
            shown = Path(value)
        elif isinstance(value, str) and "=" in self.given:
            shown = repr(value)
        near = nearest(str(value), map(str, self.names)) if self.near else None
        instead = f"write {near}" if near else self.instead
        is_folder = self.path == "file" and Path(value).is_dir()
        rule = "it is a folder, and a file is needed" if is_folder else self.rule
        if odd := self._odd_type(value):
            shown = repr(value)
            rule = f"it is {odd}, where {'an int' if self.whole else 'a number'} is needed"
        return InputError(self.given.replace("{value}", str(shown)), rule, instead)

    def check(self, value: Any) -> None:
        """Refuse a value."""
        if error := self.refusal(value):
            raise error

    def require(self, valid: object, value: Any, rule: str) -> None:
        """Refuse a value by another rule of what to write instead."""
        if not valid:
            raise InputError(str(value), rule, self.instead)

    def of(self, owner: type, name: str) -> Constraint:
        """Return the constraint with texts that say which setting of which class it is for."""
        shown, written = owner.settings_shown  # type: ignore[attr-defined]
        filled = {"name": name, "cls": owner.__name__}
        instead = self.instead
        if " " not in instead:
            instead = f"write {written.format(**filled, value=instead)}"
        given = self.given or shown.format(**filled, value="{value}")
        return replace(self, given=given, instead=instead)


def within(interval: str, rule: str, instead: object, *, given: str = "") -> Constraint:
    """Return the constraint of a number to an interval, such as ``(0, 1]``."""
    return Constraint(rule, str(instead), interval=interval, given=given)


def at_least(least: int) -> Constraint:
    """Return the constraint of a count."""
    return within(f"[{least}, inf)", f"at least {least} is needed", max(least, 1))


def one_of(names: Sequence[str | int], instead: str = "", *, near: bool = False) -> Constraint:
    """Return the constraint of a setting to some names, or to some numbers."""
    rule = f"one of {', '.join(map(str, names))}"
    return Constraint(rule, instead or str(names[0]), names=tuple(names), near=near)


def path_to(kind: str, rule: str, instead: str, *, given: str = "{value}") -> Constraint:
    """Return the constraint of a path: when data are read, a ``file``, a ``folder`` or ``any`` is
    there."""
    return Constraint(rule, instead, path=kind, at_once=False, given=given)


def constraints_of(cls: type) -> dict[str, Constraint]:
    """Return the constraints of a class's settings by name, those that its base declares too."""
    found: dict[str, Constraint] = {}
    seen: set[str] = set()
    for base in cls.__mro__:
        if "__init__" not in vars(base) or not hasattr(base, "settings_shown"):
            continue
        own_of_base = own_constraints(base)
        found |= {name: one.of(cls, name) for name, one in own_of_base.items() if name not in seen}
        _, *own = signature(base.__init__).parameters.values()  # type: ignore[misc]
        seen |= {parameter.name for parameter in own}
        if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in own):
            break
    return found


def own_constraints(cls: type) -> dict[str, Constraint]:
    """Return the constraints that the constructor of a class itself declares, by name."""
    found = {name: next(_constraints_in(hint), None) for name, hint in own_hints(cls)}
    return {name: constraint for name, constraint in found.items() if constraint}


def own_hints(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the types of the arguments that the constructor of a class itself declares, by name."""
    constructor: Any = cls.__init__  # type: ignore[misc]
    constructor = getattr(constructor, "__wrapped__", constructor)
    for name, annotation in constructor.__annotations__.items():
        with suppress(Exception):  # of a user's class, an annotation that names what is not there
            one = SimpleNamespace(__annotations__={name: annotation})
            yield name, get_type_hints(one, constructor.__globals__, include_extras=True)[name]


def check_fields(made: Any) -> None:
    """Refuse fields of a dataclass that their annotations do not allow."""
    check_arguments(type(made), own_constraints(type(made)), vars(made))


def check_arguments(
    cls: type, constraints: Mapping[str, Constraint], given: Mapping[str, Any]
) -> None:
    """Refuse arguments of a constructor that are not allowed.

    Args:
        cls: the class that is made.
        constraints: those of the constructor, by name.
        given: what it got, by name.
    """
    for name, constraint in constraints.items():
        if (
            not constraint.at_once
            or name not in given
            or (constraint.optional and given[name] is None)
        ):
            continue
        if not constraint.allows(given[name]):
            constraint.of(cls, name).check(given[name])


def _constraints_in(hint: Any) -> Iterator[Constraint]:
    """Yield the constraints of a type: those that it is annotated with, or that of names to a
    Literal."""
    declared: list[Any] = []
    if get_origin(hint) is Annotated:
        hint, *declared = get_args(hint)
    members = members_of(hint)
    literals = [member for member in members if get_origin(member) is Literal]
    names = tuple(name for member in literals for name in get_args(member))
    whole = int in members and float not in members
    optional = NoneType in members
    yield from (
        replace(
            one,
            names=one.names or names,
            rule=one.rule or one_of(names).rule,
            whole=whole,
            optional=optional,
        )
        for one in declared
        if isinstance(one, Constraint)
    )
    if names and {*members} <= {*literals, NoneType}:
        yield replace(one_of(names), optional=optional)


def members_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; of another type, the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _number(text: str) -> float:
    """Return a bound; a whole number exactly, however large it is."""
    return float(text) if {*".infe"} & {*text} else int(text)
