"""Success criteria, such as ``accuracy(FedMPQKD) - accuracy(FedMPQ) >= 0.01``: what they consist
of, how they are parsed and checked.

A criterion is made of conditions, joined by ``and`` and ``or``. A condition is

- a comparison of two sides, each arithmetic (+ - * /) on numbers and quantities;
- ``p(A, B) < 0.05``, the test of the study's metric;
- ``no_increase(upload, A, B)``, "no significant increase", or with a relative margin
  ``no_increase(upload, A, B, 0.01)``.

How they are judged is written in ``report/verdicts.py``. The text is parsed by ``ast`` and walked;
nothing in it is ever executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from fl_lightning.errors import InputError, require
from fl_lightning.study.metric_names import is_timing
from fl_lightning.study.plan.quantities import (
    ARGUMENTS,
    OF_THE_METRIC,
    QUANTITIES,
    TRANSFER,
    Quantity,
    Wrong,
    arguments_of,
    is_finite_number,
    quantities_in,
    require_labels,
    require_levels,
    shown,
)

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
RELATIONS = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
MAX_LENGTH = 500
"""Characters of a criterion."""
EXAMPLE = "accuracy(A) - accuracy(B) >= 0.01"
NO_INCREASE = "no_increase"
NO_INCREASE_EXAMPLE = (
    "write no_increase(upload, A, B), or with a margin no_increase(upload, A, B, 0.01)"
)


@dataclass(frozen=True)
class Inequality:
    """A comparison of two sides.

    Args:
        text: the comparison as it was written.
        left, right: both sides, checked.
        relation: the relation between them.
        quantities: all quantities that it mentions, each once.
    """

    text: str
    left: ast.expr
    right: ast.expr
    relation: type[ast.cmpop]
    quantities: tuple[Quantity, ...]

    @property
    def is_p(self) -> bool:
        return self.quantities[0].name == "p"


@dataclass(frozen=True)
class NoIncrease:
    """The statement that A's quantity is not greater than B's.

    Args:
        text: the statement as it was written.
        quantities: the quantity of A, and that of B.
        margin: None: A is not significantly greater; a number of 0 or more: A is above B by at most
            ``margin`` times the size of B.
    """

    text: str
    quantities: tuple[Quantity, Quantity]
    margin: float | None


@dataclass(frozen=True)
class AllOf:
    """A statement that is true when all of its ``parts`` are."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True)
class AnyOf:
    """A statement that is true when at least one of its ``parts`` is."""

    parts: tuple[Condition, ...]


Condition = Inequality | NoIncrease | AllOf | AnyOf


@dataclass(frozen=True)
class Criterion:
    """A criterion, or a premise, that can be judged.

    Args:
        text: the criterion as it was written.
        condition: what it states of one level of the grid.
        name: what it is called; without a name, its text.
        share: the share of the grid's levels, in (0, 1], at which it has to hold.
        claim: what is claimed, in words.
        needed_by: for a premise, the names of the criteria that it belongs to; none: all of them.
    """

    text: str
    condition: Condition
    name: str = ""
    share: float = 1.0
    claim: str = ""
    needed_by: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.name or self.text

    @property
    def conditions(self) -> tuple[Inequality | NoIncrease, ...]:
        """The conditions that it is made of, from left to right."""
        return tuple(_leaves(self.condition))

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """All quantities that it mentions, each once."""
        return tuple(dict.fromkeys(one for leaf in self.conditions for one in leaf.quantities))

    def is_timing(self, metric: str) -> bool:
        """Return whether a clock decides it, in a study with this metric."""
        of_metric = is_timing(metric) and any(map(self.mentions, OF_THE_METRIC))
        return of_metric or any(quantity.is_timing for quantity in self.quantities)

    def is_premise_of(self, criterion: Criterion) -> bool:
        """Return whether it, a premise, belongs to a criterion."""
        return not self.needed_by or criterion.name in self.needed_by

    def needed_levels(self, levels: int) -> int:
        """Return at how many of so many levels it has to hold.

        >>> Criterion("", AllOf(()), share=0.8).needed_levels(6)
        5
        """
        return max(1, ceil(self.share * levels - 1e-9))

    @property
    def pinned(self) -> tuple[str, ...]:
        """The axes of the grid whose levels its quantities name."""
        return tuple(dict.fromkeys(axis for quantity in self.quantities for axis, _ in quantity.at))

    def mentions(self, name: str) -> bool:
        return any(quantity.name == name for quantity in self.quantities)


def _leaves(condition: Condition) -> Iterator[Inequality | NoIncrease]:
    if isinstance(condition, (AllOf, AnyOf)):
        for part in condition.parts:
            yield from _leaves(part)
    else:
        yield condition


def parse(
    text: str,
    labels: Sequence[str],
    grid: Mapping[str, Collection[str]] | None = None,
    *,
    name: str = "",
    share: float = 1.0,
    claim: str = "",
    needed_by: Sequence[str] = (),
) -> Criterion:
    """Check a criterion.

    Args:
        text: the criterion; a label or level that is no plain name may be written as it is, or in
            quotes.
        labels: the labels of the study.
        grid: its axes, each with its levels.
        name, share, claim, needed_by: see :class:`Criterion`.

    Raises:
        InputError: it is no comparison, or mentions an unknown name; the message suggests the
            nearest.
    """

    def wrong(given: object, rule: str, instead: str = f"write {EXAMPLE}") -> InputError:
        return InputError(f"criterion {text[:MAX_LENGTH]!r}: {given}", rule, instead)

    if len(text) > MAX_LENGTH:
        raise wrong(f"{len(text)} characters", f"it has {MAX_LENGTH} at most")
    try:
        one_line = " ".join(text.split()) if "\n" in text else text.strip()
        tree = ast.parse(_quote(one_line, labels, grid or {}), mode="eval")
        ast.unparse(tree)  # as parts of it are written in reports, which may go deeper
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        given = getattr(error, "msg", None) or "it cannot be read"
        raise wrong(given, "two sides and one of < <= > >= between them") from None
    condition = _condition(tree.body, labels, wrong)
    criterion = Criterion(text.strip(), condition, name, share, claim, tuple(needed_by))
    require_levels(criterion.quantities, grid or {}, wrong)
    return criterion


def _condition(node: ast.expr, labels: Sequence[str], wrong: Wrong) -> Condition:
    if isinstance(node, ast.BoolOp):
        parts = tuple(_condition(value, labels, wrong) for value in node.values)
        return AllOf(parts) if isinstance(node.op, ast.And) else AnyOf(parts)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == NO_INCREASE
    ):
        return _no_increase(node, labels, wrong)
    if (
        not isinstance(node, ast.Compare)
        or len(node.ops) != 1
        or type(node.ops[0]) not in RELATIONS
    ):
        rule = (
            "it compares two sides once, by < <= > or >=; comparisons are joined by 'and' and 'or'"
        )
        raise wrong(shown(node), rule, f"write two criteria, or {EXAMPLE}")
    return _inequality(node, labels, wrong)


def _inequality(node: ast.Compare, labels: Sequence[str], wrong: Wrong) -> Inequality:
    left, right, relation = node.left, node.comparators[0], type(node.ops[0])
    quantities = tuple(
        dict.fromkeys([*quantities_in(left, labels, wrong), *quantities_in(right, labels, wrong)])
    )
    if not quantities:
        raise wrong("no method in it", f"it is about at least one of {', '.join(ARGUMENTS)}")
    if any(quantity.name == "p" for quantity in quantities):
        example, below = "write p(A, B) < 0.05", relation in (ast.Lt, ast.LtE)
        if not (isinstance(left, ast.Call) and isinstance(right, ast.Constant) and below):
            raise wrong("p(...)", "it stands alone on the left, below a number", example)
        if len(set(quantities[0].labels)) < 2:
            raise wrong("one method", "p compares two", example)
        if not (is_finite_number(right) and 0 < right.value < 1):  # type: ignore[operator]
            raise wrong(shown(right), "p is compared with a number between 0 and 1", example)
    return Inequality(_written(node, labels, quantities), left, right, relation, quantities)


def _no_increase(node: ast.Call, labels: Sequence[str], wrong: Wrong) -> NoIncrease:
    """Read ``no_increase(QUANTITY, A, B)`` or ``no_increase(QUANTITY, A, B, MARGIN)``."""
    words, margin = arguments_of(node), node.args[3] if len(node.args) == 4 else None
    rule = "no_increase takes a quantity of one method or a metric in quotes, two labels and a margin or none"
    if (
        node.keywords
        or len(words) != 3
        or len(node.args) not in (3, 4)
        or isinstance(margin, ast.Name)
    ):
        level = "; it is about the level that is judged" if node.keywords else ""
        raise wrong(shown(node), f"{rule}{level}", NO_INCREASE_EXAMPLE)
    what, *pair = words
    known = what in QUANTITIES and isinstance(node.args[0], ast.Name)
    if not known and not (isinstance(node.args[0], ast.Constant) and "/" in what):
        raise wrong(what, f"{rule}; quantities are {', '.join(QUANTITIES)}", NO_INCREASE_EXAMPLE)
    if len(set(pair)) < 2:
        raise wrong("one method", "no_increase compares two", NO_INCREASE_EXAMPLE)
    require_labels(pair, labels, wrong)
    share = margin.value if isinstance(margin, ast.Constant) and is_finite_number(margin) else None
    if margin is not None and not (isinstance(share, (int, float)) and share >= 0):
        raise wrong(
            shown(margin), "the margin is a share of B, a number of 0 or more", NO_INCREASE_EXAMPLE
        )
    one, other = (Quantity(what, (x,)) if known else Quantity("metric", (what, x)) for x in pair)
    return NoIncrease(
        _written(node, labels),
        (one, other),
        float(share) if isinstance(share, (int, float)) else None,
    )


def check_needs(
    criterion: Criterion,
    degradation: object,
    target: float | None,
    alone: str = "",
    controls: Collection[str] = (),
) -> None:
    """Check that the study asks for what a criterion is about; no run is needed to tell.

    Args:
        criterion: the parsed criterion.
        degradation: the entry of the study, or None.
        target: the entry ``target`` or ``target_accuracy`` of the study, or None.
        alone: the label of the method in which every client trains alone; empty: the study names
            none.
        controls: the labels whose clients hold other examples.

    Raises:
        InputError: the study does not ask for it.
    """
    needs = {
        "drop": (
            degradation,
            "a drop needs a degradation",
            "degradation: {axis: noise, stressed: on, clean: off}",
        ),
        "rounds": (target, "rounds are counted until a target", "target_accuracy: 0.9"),
        "megabytes": (target, "megabytes are counted until a target", "target_accuracy: 0.9"),
    }
    needs |= dict.fromkeys(
        TRANSFER, (alone or None, "a gain is against the clients alone", "alone: LABEL")
    )
    for name, (given, rule, entry) in needs.items():
        valid = given is not None or not criterion.mentions(name)
        require(
            valid, f"criterion {criterion.text!r}: {name}(...)", rule, f"add '{entry}' to the study"
        )
    for quantity in criterion.quantities:
        if quantity.metric not in TRANSFER.values():
            continue
        label, of_client = quantity.labels[0], quantity.metric == TRANSFER["worst_client"]
        rule = "the clients of a control hold other examples than those alone"
        require(
            label not in controls,
            f"criterion {criterion.text!r}: {quantity}",
            rule,
            "name another method",
        )
        rule = "it is what the gains are measured against"
        require(
            of_client or label != alone,
            f"criterion {criterion.text!r}: {quantity}",
            rule,
            "name another method",
        )


def _written(node: ast.expr, labels: Sequence[str], quantities: Sequence[Quantity] = ()) -> str:
    """Return a part of a criterion as text, with labels and levels as they are written in a
    study."""
    text = ast.unparse(node)
    for label in labels:
        text = text.replace(f"({label!r}", f"({label}").replace(f", {label!r}", f", {label}")
    for axis, level in (at for quantity in quantities for at in quantity.at):
        text = text.replace(f"{axis}={level!r}", f"{axis}={level}")
    return text


def _quote(text: str, labels: Collection[str], grid: Mapping[str, Collection[str]]) -> str:
    """Put labels that stand alone between the parentheses of a quantity in quotes, and levels
    behind their axis: ``accuracy(FedMPQKD a=1, beta=0.50)``."""
    behind_axes = [(rf"{re.escape(axis)}\s*=\s*", levels) for axis, levels in grid.items()]
    for before, names in [("", labels), *behind_axes]:
        longest_first = sorted(names, key=len, reverse=True)
        one = "|".join(map(re.escape, longest_first)) or r"(?!)"
        pattern = rf"(?<=[(,])(\s*{before})({one})\s*(?=[,)])"
        text = re.sub(pattern, lambda match: match[1] + repr(match[2]), text)
    return text
