"""Success criteria, such as ``accuracy(FedMPQKD) - accuracy(FedMPQ) >= 0.01``: how they are parsed and
checked.

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

from fl_lightning.errors import InputError, require
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
"""The quantities of one method that are a metric of its runs."""
ARGUMENTS = {**dict.fromkeys(QUANTITIES, 1), "drop": 1, "gap": 2, "p": 2, "metric": 2}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
RELATIONS = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
MAX_LENGTH = 500
"""Characters of a criterion."""
EXAMPLE = "accuracy(A) - accuracy(B) >= 0.01"


@dataclass(frozen=True)
class Quantity:
    """A call in a criterion.

    Args:
        name: one of ``ARGUMENTS``.
        arguments: labels; for ``metric``, the metric and a label.
    """

    name: str
    arguments: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return self.arguments[1:] if self.name == "metric" else self.arguments

    @property
    def metric(self) -> str | None:
        """The metric of the runs that the quantity stands for, if it is one."""
        return self.arguments[0] if self.name == "metric" else QUANTITIES.get(self.name)


@dataclass(frozen=True)
class Criterion:
    """A criterion that can be judged.

    Args:
        text: the criterion as it was written.
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
        labels: the labels of the study.

    Raises:
        InputError: it is no comparison, or mentions an unknown name; the message suggests the nearest.
    """

    def wrong(given: object, rule: str, instead: str = f"write {EXAMPLE}") -> InputError:
        return InputError(f"criterion {text[:MAX_LENGTH]!r}: {given}", rule, instead)

    if len(text) > MAX_LENGTH:
        raise wrong(f"{len(text)} characters", f"it has {MAX_LENGTH} at most")
    try:
        tree = ast.parse(_quote(text.strip(), labels), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        given = getattr(error, "msg", None) or "it cannot be read"
        raise wrong(given, "two sides and one of < <= > >= between them") from None
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or type(tree.ops[0]) not in RELATIONS:
        rule = "it compares two sides once, by < <= > or >="
        raise wrong(_shown(tree), rule, f"write two criteria, or {EXAMPLE}")
    left, right, relation = tree.left, tree.comparators[0], type(tree.ops[0])
    quantities = tuple(dict.fromkeys([*_quantities(left, labels, wrong), *_quantities(right, labels, wrong)]))
    if not quantities:
        raise wrong("no method in it", f"it is about at least one of {', '.join(ARGUMENTS)}")
    criterion = Criterion(text.strip(), left, right, relation, quantities)
    if criterion.mentions("p"):
        example, below = "write p(A, B) < 0.05", relation in (ast.Lt, ast.LtE)
        if not (isinstance(left, ast.Call) and isinstance(right, ast.Constant) and below):
            raise wrong("p(...)", "it stands alone on the left, below a number", example)
        if len(set(quantities[0].labels)) < 2:
            raise wrong("one method", "p compares two", example)
        if not (_is_number(right) and 0 < right.value < 1):  # type: ignore[operator]
            raise wrong(_shown(right), "p is compared with a number between 0 and 1", example)
    return criterion


def check_needs(criterion: Criterion, degradation: object, target_accuracy: float | None) -> None:
    """Check that the study asks for what a criterion is about; no run is needed to tell.

    Args:
        criterion: the parsed criterion.
        degradation: the entry of the study, or None.
        target_accuracy: the entry of the study, or None.

    Raises:
        InputError: the study does not ask for it.
    """
    needs = {
        "drop": (
            degradation,
            "a drop needs a degradation",
            "degradation: {axis: noise, stressed: on, clean: off}",
        ),
        "rounds": (target_accuracy, "rounds are counted until a target", "target_accuracy: 0.9"),
        "megabytes": (target_accuracy, "megabytes are counted until a target", "target_accuracy: 0.9"),
    }
    for name, (given, rule, entry) in needs.items():
        valid = given or not criterion.mentions(name)
        require(valid, f"criterion {criterion.text!r}: {name}(...)", rule, f"add '{entry}' to the study")


def _quote(text: str, labels: Sequence[str]) -> str:
    """Put labels that stand alone between the parentheses of a quantity in quotes: ``accuracy(FedMPQKD
    a=1)``."""
    longest_first = sorted(labels, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
    return re.sub(rf"(?<=[(,])\s*({pattern})\s*(?=[,)])", lambda match: repr(match[1]), text)


def _shown(node: ast.AST) -> str:
    try:
        return ast.unparse(node)[:80]
    except (RecursionError, ValueError):
        return "a deep expression"


def _quantities(
    node: ast.expr, labels: Sequence[str], wrong: Callable[..., InputError]
) -> Iterator[Quantity]:
    """Yield the quantities of one side; refuse everything that is not arithmetic on them."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield from _quantities(node.left, labels, wrong)
        yield from _quantities(node.right, labels, wrong)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        yield from _quantities(node.operand, labels, wrong)
    elif isinstance(node, ast.Call):
        yield _quantity(node, labels, wrong)
    elif not _is_number(node):
        rule = "numbers, quantities and + - * / are allowed"
        raise wrong(_shown(node), rule, f"quantities are {', '.join(ARGUMENTS)}")


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
        if name == "metric":
            takes, example = "a metric in quotes and a label", 'metric("test/ece", A)'
        else:
            example = f"{name}({', '.join('AB'[: ARGUMENTS[name]])})"
            takes = f"{ARGUMENTS[name]} label{'s' * (ARGUMENTS[name] > 1)}"
        raise wrong(_shown(node), f"{name} takes {takes}", f"write {example}")
    quantity = Quantity(name, arguments)
    for label in quantity.labels:
        if label not in labels:
            nearest = get_close_matches(label, labels, n=1, cutoff=0.0)
            rule = f"methods of the study are {', '.join(labels)}"
            raise wrong(label, rule, f"write {nearest[0]}" if nearest else "add it")
    return quantity


def arguments_of(node: ast.Call) -> tuple[str, ...]:
    """Return the names and texts among the arguments of a call."""
    words = [item.id if isinstance(item, ast.Name) else getattr(item, "value", None) for item in node.args]
    return tuple(word for word in words if isinstance(word, str))
