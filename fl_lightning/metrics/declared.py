"""What methods and callbacks declare of the metrics that they add to the rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fl_lightning.errors import InputError, require


@dataclass(frozen=True)
class Metric:
    """How reports read and write a metric.

    Args:
        name: its name in the rounds, such as ``novel/drift``.
        title: the heading of its column, with the unit; empty: the name, and no column in the table
            of results.
        scale: the factor from its values to those of a table, such as 100 for percent.
        digits: the digits after the point.
        unit: the unit of a difference, such as `` points``.
        short: a heading of a few words for a table on paper; empty: ``title`` is one.
        higher_is_better: the direction in which it ranks; None: the words of its name tell.

    Raises:
        InputError: an argument is of another kind.
    """

    name: str
    title: str = ""
    scale: float = 1.0
    digits: int = 3
    unit: str = ""
    short: str = ""
    higher_is_better: bool | None = None

    def __post_init__(self) -> None:
        def expect(key: str, fits: bool, rule: str, instead: str) -> None:
            require(fits, f"Metric({self.name!r}, {key}={getattr(self, key)!r})", rule, instead)

        for key in ("name", "title", "unit", "short"):
            expect(key, isinstance(getattr(self, key), str), "it is a text", f"write {key}='...'")
        expect("name", bool(self.name), "a metric has a name", "write name='novel/drift'")
        number = type(self.scale) in (int, float) and math.isfinite(self.scale) and self.scale != 0
        expect("scale", number, "it is a number, finite and not 0", "write scale=100")
        expect(
            "digits",
            type(self.digits) is int and 0 <= self.digits < 16,
            "0 to 15 digits",
            "write digits=1",
        )
        known = self.higher_is_better is None or isinstance(self.higher_is_better, bool)
        expect(
            "higher_is_better", known, "it is True, False or None", "write higher_is_better=False"
        )


class Emitter:
    """What adds metrics to the rounds: a method or a callback."""

    declared_metrics: Sequence[Metric] = ()
    """What reports know of the metrics that it adds."""
    measured_by: Mapping[str, str] = {}
    """The ``sha256``, ``label`` and ``scope`` of the tables of costs from which a method takes its
    joules, once it is built; empty for a method without them, and for callbacks."""


def declared_by(emitters: Iterable[Emitter]) -> dict[str, Metric]:
    """Return by name what the method and the callbacks of a run declare.

    Raises:
        InputError: ``declared_metrics`` holds something else than metrics, or two of one name
            differ.
    """
    found: dict[str, Metric] = {}
    for emitter in emitters:
        what, given = f"{type(emitter).__name__}.declared_metrics", emitter.declared_metrics
        are_metrics = isinstance(given, (tuple, list)) and all(
            isinstance(one, Metric) for one in given
        )
        rule = "it is a tuple of Metric"
        instead = 'write (Metric("novel/drift", higher_is_better=False),)'
        require(are_metrics, f"{what}: {given!r}", rule, instead)
        for metric in given:
            if found.setdefault(metric.name, metric) != metric:
                other = f"{what} has another {metric.name!r} than a callback or method beside it"
                raise InputError(
                    other, "a metric is declared once", "declare it alike, or in one class alone"
                )
    return found
