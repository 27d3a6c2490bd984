"""Success criteria: ``accuracy(FedMPQKD) - accuracy(FedMPQ) >= 0.01`` as data, and whether the runs decide
it.

A criterion compares two sides; each is arithmetic (+ - * /) on numbers and quantities. It is computed seed by
seed, over the seeds that every method in it has, and judged by the 95 % t interval of left - right: it
*holds* when the whole interval satisfies it, *fails* when no point of it does, and is *undecided* otherwise.
Quantities that are counted (bytes) need no interval: all seeds, no seed, or undecided. ``p(A, B) < 0.05``
holds when A is significantly better, fails when it is significantly worse, and is undecided when the test
says nothing.

The text is parsed by ``ast`` and walked; nothing in it is ever executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite

from fl_lightning.errors import InputError
from fl_lightning.study.metric_names import is_exact, is_timing

QUANTITIES = {
    "accuracy": "final/accuracy",
    "auc": "final/auc_accuracy",
    "ece": "test/ece",
    "bytes": "total/total_bytes",
    "upload": "total/upload_bytes",
    "download": "total/download_bytes",
    "time": "time/round",
    "rounds": "target/rounds",
    "megabytes": "target/megabytes",
}
"""Those of one method that are a metric of its runs."""
ARGUMENTS = {**dict.fromkeys(QUANTITIES, 1), "drop": 1, "gap": 2, "p": 2, "metric": 2}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
RELATIONS = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
LONGEST = 500  # characters
EXAMPLE = "accuracy(A) - accuracy(B) >= 0.01"


@dataclass(frozen=True)
class Quantity:
    """A call in a criterion.

    Args:
        name: one of ``ARGUMENTS``.
        arguments: labels; of ``metric``, the metric and a label.
    """

    name: str
    arguments: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return self.arguments[1:] if self.name == "metric" else self.arguments

    @property
    def metric(self) -> str | None:
        """The metric of the runs that it is, if it is one."""
        return self.arguments[0] if self.name == "metric" else QUANTITIES.get(self.name)


@dataclass(frozen=True)
class Criterion:
    """A criterion that can be judged.

    Args:
        text: as written.
        left, right: both sides, checked.
        relation: between them.
        quantities: all that it mentions, each once.
    """

    text: str
    left: ast.expr
    right: ast.expr
    relation: type[ast.cmpop]
    quantities: tuple[Quantity, ...]

    @property
    def is_timing(self) -> bool:
        return any(quantity.metric is not None and is_timing(quantity.metric) for quantity in self.quantities)

    @property
    def is_exact(self) -> bool:
        return all(quantity.metric is not None and is_exact(quantity.metric) for quantity in self.quantities)

    @property
    def is_p(self) -> bool:
        return self.quantities[0].name == "p"

    def mentions(self, name: str) -> bool:
        return any(quantity.name == name for quantity in self.quantities)


def parse(text: str, labels: Sequence[str]) -> Criterion:
    """Check a criterion.

    Args:
        text: the criterion; a label that is no plain name may be written as it is, or in quotes.
        labels: of the study.

    Raises:
        InputError: it is not a comparison, or mentions what is not known; the message names the nearest.
    """

    def wrong(given: object, rule: str, instead: str = f"write {EXAMPLE}") -> InputError:
        return InputError(f"criterion {text[:LONGEST]!r}: {given}", rule, instead)

    if len(text) > LONGEST:
        raise wrong(f"{len(text)} characters", f"it has {LONGEST} at most")
    try:
        tree = ast.parse(_quote(text.strip(), labels), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise wrong(
            getattr(error, "msg", None) or "it cannot be read", "two sides and one of < <= > >= between them"
        ) from None
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or type(tree.ops[0]) not in RELATIONS:
        raise wrong(
            _shown(tree), "it compares two sides once, by < <= > or >=", f"write two criteria, or {EXAMPLE}"
        )
    left, right, relation = tree.left, tree.comparators[0], type(tree.ops[0])
    quantities = tuple(dict.fromkeys([*_quantities(left, labels, wrong), *_quantities(right, labels, wrong)]))
    if not quantities:
        raise wrong("no method in it", f"it is about at least one of {', '.join(ARGUMENTS)}")
    criterion = Criterion(text.strip(), left, right, relation, quantities)
    if criterion.mentions("p"):
        alone = (
            isinstance(left, ast.Call) and isinstance(right, ast.Constant) and relation in (ast.Lt, ast.LtE)
        )
        if not alone:
            raise wrong("p(...)", "it stands alone on the left, below a number", "write p(A, B) < 0.05")
        if len(set(quantities[0].labels)) < 2:
            raise wrong("one method", "p compares two", "write p(A, B) < 0.05")
        if not (isinstance(right, ast.Constant) and _is_number(right) and 0 < right.value < 1):  # type: ignore[operator]
            raise wrong(_shown(right), "p is compared with a number between 0 and 1", "write p(A, B) < 0.05")
    return criterion


def check_needs(criterion: Criterion, degradation: object, target_accuracy: float | None) -> None:
    """What a criterion is about is asked for in its study; no run is needed to tell.

    Args:
        criterion: as parsed.
        degradation: of the study, or None.
        target_accuracy: of the study, or None.

    Raises:
        InputError: it is not.
    """
    if criterion.mentions("drop") and not degradation:
        raise InputError(
            f"criterion {criterion.text!r}: drop(...)",
            "it is of a degradation",
            "add 'degradation: {axis: noise, stressed: on, clean: off}' to the study",
        )
    for name in ("rounds", "megabytes"):
        if criterion.mentions(name) and target_accuracy is None:
            raise InputError(
                f"criterion {criterion.text!r}: {name}(...)",
                "it is counted until a target",
                "add 'target_accuracy: 0.9' to the study",
            )


def _quote(text: str, labels: Sequence[str]) -> str:
    """Labels that stand alone between the parentheses of a quantity, in quotes: ``accuracy(FedMPQKD
    a=1)``."""
    longest_first = sorted(labels, key=len, reverse=True)
    pattern = "|".join(re.escape(label) for label in longest_first)
    return (
        re.sub(rf"(?<=[(,])\s*({pattern})\s*(?=[,)])", lambda match: repr(match[1]), text) if labels else text
    )


def _shown(node: ast.AST) -> str:
    try:
        return ast.unparse(node)[:80]
    except (RecursionError, ValueError):
        return "a deep expression"


def _quantities(
    node: ast.expr, labels: Sequence[str], wrong: Callable[..., InputError]
) -> Iterator[Quantity]:
    """All that one side mentions; refuses everything that is not arithmetic on them."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield from _quantities(node.left, labels, wrong)
        yield from _quantities(node.right, labels, wrong)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        yield from _quantities(node.operand, labels, wrong)
    elif isinstance(node, ast.Call):
        yield _quantity(node, labels, wrong)
    elif not _is_number(node):
        raise wrong(
            _shown(node),
            "numbers, quantities and + - * / are allowed",
            f"quantities are {', '.join(ARGUMENTS)}",
        )


def _is_number(node: ast.expr) -> bool:
    try:
        return isinstance(node, ast.Constant) and type(node.value) in (int, float) and isfinite(node.value)  # type: ignore[arg-type]
    except OverflowError:
        return False


def _quantity(node: ast.Call, labels: Sequence[str], wrong: Callable[..., InputError]) -> Quantity:
    name = node.func.id if isinstance(node.func, ast.Name) else _shown(node.func)
    if name not in ARGUMENTS:
        near = get_close_matches(name, ARGUMENTS, n=1, cutoff=0.0)[0]
        raise wrong(f"{name}(...)", f"quantities are {', '.join(ARGUMENTS)}", f"write {near}(...)")
    arguments = arguments_of(node)
    if len(arguments) != len(node.args) or len(arguments) != ARGUMENTS[name] or node.keywords:
        first = (
            "a metric in quotes and a label"
            if name == "metric"
            else f"{ARGUMENTS[name]} label{'s' * (ARGUMENTS[name] > 1)}"
        )
        raise wrong(
            _shown(node),
            f"{name} takes {first}",
            'write metric("test/ece", A)' if name == "metric" else f"write {name}(A)",
        )
    quantity = Quantity(name, arguments)
    for label in quantity.labels:
        if label not in labels:
            nearest = get_close_matches(label, labels, n=1, cutoff=0.0)
            raise wrong(
                label,
                f"methods of the study are {', '.join(labels)}",
                f"write {nearest[0]}" if nearest else "add it",
            )
    return quantity


def arguments_of(node: ast.Call) -> tuple[str, ...]:
    """Names and texts among the arguments of a call."""
    found = [item.id if isinstance(item, ast.Name) else getattr(item, "value", None) for item in node.args]
    return tuple(item for item in found if isinstance(item, str))
