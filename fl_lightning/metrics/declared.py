"""What a method or a callback declares of a metric that it adds to the rounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """How reports read and write a metric.

    Args:
        name: its name in the rounds, such as ``novel/drift``.
        title: the heading of its column, with the unit; empty: the name.
        scale: the factor from its values to those of a table, such as 100 for percent.
        digits: the digits after the point.
        unit: the unit of a difference, such as `` points``.
        short: a heading of a few words for a table on paper; empty: ``title`` is one.
        higher_is_better: the direction in which it ranks; None: the words of its name tell.
        counted: whether a method's metric of an evaluation is a sum over the test set; the others are means.
    """

    name: str
    title: str = ""
    scale: float = 1.0
    digits: int = 3
    unit: str = ""
    short: str = ""
    higher_is_better: bool | None = None
    counted: bool = False
