"""The quantities that criteria are about, as ``accuracy(FedMPQKD)`` and ``sum("bits/moved",
FedMPQ)``: how they are found in a parsed expression."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from fl_lightning.config.near_names import nearest, nearest_of_listed
from fl_lightning.errors import InputError
from fl_lightning.study.metric_names import is_exact, is_of_test_set, is_timing
from fl_lightning.study.plan.selection import Selection, selected_metric

Wrong = Callable[..., InputError]
"""Makes the error of a criterion of what was given, the rule, and what to write instead."""
PRIMARY, ACCURACY = "primary", "accuracy"
"""The primary metric of the runs' task under the study's ``selection``, and what it is called where
it is the accuracy."""
TRANSFER = {
    "gain": "transfer/mean",
    "below_zero": "transfer/below_zero",
    "worst_gain": "transfer/worst",
    "worst_client": "client/worst",
}
"""The quantities of negative transfer, in the primary metric on the clients' validation examples:
the mean gain over clients, the share of clients whose gain is negative, the least gain of a client,
and the metric of the worst client. The gain is against the study's ``alone``."""
QUANTITIES = {
    PRIMARY: "final/last5_accuracy",
    ACCURACY: "final/last5_accuracy",
    "auc": "final/auc_accuracy",
    "ece": "test/ece",
    "bytes": "total/total_bytes",
    "upload": "total/upload_bytes",
    "download": "total/download_bytes",
    "time": "time/round",
    "rounds": "target/rounds",
    "megabytes": "target/megabytes",
    **TRANSFER,
}
"""The quantities of one method that are a metric of its runs, by default; :func:`metric_of` has the
metric of a study."""
OVER_ROUNDS = ("sum", "mean", "max", "min", "last")
"""Aggregates of a metric over the rounds in which it was measured, run by run: ``sum("bits/moved",
A)``."""
OVER = " / "
"""What stands between two metrics that an aggregate divides round by round:
``max("gradient/bit / gradient/task", A)``."""
COUNTS = (
    *("bits/", "clients/", "comm/", "privacy/epsilon"),
    *("energy/clamped", "energy/refused", "energy/over_budget"),
    *("energy/joules", "energy/spent", "energy/granted"),  # tokens by a table of joules
)
"""First parts of the metrics of rounds that count something; what is counted can be the same in
every run."""
WITH_METRIC = ("metric", *OVER_ROUNDS)
"""Quantities whose first argument is the name of a metric, in quotes."""
OF_THE_METRIC = ("gap", "p", "drop")
"""Quantities in the metric of the study."""
AT_ITS_LEVEL = ("drop", "p")
"""Quantities that cannot be taken at another level than the one that is judged."""
ARGUMENTS = {
    **dict.fromkeys(QUANTITIES, 1),
    "drop": 1,
    "gap": 2,
    "p": 2,
    **dict.fromkeys(WITH_METRIC, 2),
}
"""The number of arguments of every quantity."""


@dataclass(frozen=True)
class Quantity:
    """A call in a criterion.

    Args:
        name: one of ``ARGUMENTS``.
        arguments: labels; for ``metric`` and the aggregates over rounds, the metric and a label.
        at: axes of the grid and the level at which it is taken, as in ``accuracy(A, epochs=1)``; on
            the other axes it is taken at the level that is judged.
    """

    name: str
    arguments: tuple[str, ...]
    at: tuple[tuple[str, str], ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return self.arguments[1:] if self.name in WITH_METRIC else self.arguments

    @property
    def metric(self) -> str | None:
        """The metric that the quantity stands for or is an aggregate of, if it is one."""
        return self.arguments[0] if self.name in WITH_METRIC else QUANTITIES.get(self.name)

    @property
    def is_over_rounds(self) -> bool:
        return self.name in OVER_ROUNDS

    @property
    def is_timing(self) -> bool:
        return self.metric is not None and is_timing(self.metric)

    @property
    def is_exact(self) -> bool:
        """Whether it is counted and not estimated, so that one seed is enough to decide on it."""
        if self.is_over_rounds:
            of_round = self.arguments[0]
            counted = of_round == "privacy/epsilon" or of_round.endswith("_bytes")
            return counted and is_exact(of_round) and OVER not in of_round
        return self.metric is not None and is_exact(self.metric)

    @property
    def is_count(self) -> bool:
        """Whether it counts something that can be the same in every seed, as no bit that ever moved
        is."""
        counts = (
            self.is_over_rounds
            and self.arguments[0].startswith(COUNTS)
            and not is_of_test_set(self.arguments[0])
            and OVER not in self.arguments[0]
        )
        return self.is_exact or counts

    @property
    def recorded(self) -> tuple[str, ...]:
        """The metrics that the runs must have recorded by name."""
        if self.name not in WITH_METRIC or self.metric in TRANSFER.values():
            return ()
        return tuple(self.arguments[0].split(OVER)) if self.is_over_rounds else self.arguments[:1]

    def __str__(self) -> str:
        return f"{self.name}({', '.join([*self.arguments, *(f'{axis}={level}' for axis, level in self.at)])})"


def metric_of(name: str, selection: Selection, primary: str) -> str | None:
    """Return the metric that a quantity of one method stands for; None for other quantities.

    Args:
        name: the name of the quantity.
        selection: the study's.
        primary: the primary metric of the runs' task.

    >>> metric_of("primary", "last", "mse"), metric_of("auc", "last", "mse"), metric_of("gap", "last", "mse")
    ('final/mse', 'final/auc_mse', None)
    """
    if name in (PRIMARY, ACCURACY):
        return selected_metric(selection, primary)
    return f"final/auc_{primary}" if name == "auc" else QUANTITIES.get(name)


def quantities_in(node: ast.expr, labels: Sequence[str], wrong: Wrong) -> Iterator[Quantity]:
    """Yield the quantities of one side of a comparison.

    Raises:
        InputError: it is more than arithmetic on them and on numbers.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        yield from quantities_in(node.left, labels, wrong)
        yield from quantities_in(node.right, labels, wrong)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        yield from quantities_in(node.operand, labels, wrong)
    elif isinstance(node, ast.Call):
        yield _quantity(node, labels, wrong)
    elif not is_finite_number(node):
        rule = "numbers, quantities and + - * / are allowed"
        raise wrong(shown(node), rule, f"quantities are {', '.join(ARGUMENTS)}")


def _quantity(node: ast.Call, labels: Sequence[str], wrong: Wrong) -> Quantity:
    name = node.func.id if isinstance(node.func, ast.Name) else shown(node.func)
    if name not in ARGUMENTS:
        near = nearest(name, ARGUMENTS)
        instead = f"write {near}(...)" if near else "write one of them"
        raise wrong(f"{name}(...)", f"quantities are {', '.join(ARGUMENTS)}", instead)
    arguments = arguments_of(node)
    if len(arguments) != len(node.args) or len(arguments) != ARGUMENTS[name]:
        if name in WITH_METRIC:
            takes, example = "a metric in quotes and a label", f'{name}("test/ece", A)'
        else:
            example = f"{name}({', '.join('AB'[: ARGUMENTS[name]])})"
            takes = f"{ARGUMENTS[name]} label{'s' * (ARGUMENTS[name] > 1)}"
        raise wrong(shown(node), f"{name} takes {takes}", f"write {example}")
    quantity = quantity_of(node)
    require_labels(quantity.labels, labels, wrong)
    if quantity.at and name in AT_ITS_LEVEL:
        raise wrong(
            shown(node),
            f"{name} is about the level that is judged",
            f"leave {quantity.at[0][0]} out",
        )
    return quantity


def quantity_of(node: ast.Call) -> Quantity:
    """Return the quantity that a call is."""
    assert isinstance(node.func, ast.Name)
    at = [
        (word.arg or "**", str(getattr(word.value, "value", shown(word.value))))
        for word in node.keywords
    ]
    return Quantity(node.func.id, arguments_of(node), tuple(at))


def require_levels(
    quantities: Sequence[Quantity], grid: Mapping[str, Collection[str]], wrong: Wrong
) -> None:
    """Refuse a level that the grid does not have, and an axis that only some of the quantities
    name: the others would have no level of it."""
    axes = list(dict.fromkeys(axis for quantity in quantities for axis, _ in quantity.at))
    for axis in axes:
        if axis not in grid:
            rule = f"axes of the grid are {', '.join(grid) or 'not given'}"
            raise wrong(
                axis, rule, f"write {nearest_of_listed(axis, grid)}" if grid else "leave it out"
            )
        for quantity in quantities:
            level = dict(quantity.at).get(axis)
            if level is None:
                raise wrong(
                    str(quantity),
                    f"the others name a level of {axis}",
                    f"name its level of {axis} too",
                )
            if level not in grid[axis]:
                raise wrong(
                    f"{axis}={level}",
                    f"its levels are {', '.join(grid[axis])}",
                    "write one of them",
                )


def require_labels(given: Sequence[str], labels: Sequence[str], wrong: Wrong) -> None:
    """Refuse a label that the study does not have, and suggest the nearest."""
    for label in given:
        if label not in labels:
            rule = f"methods of the study are {', '.join(labels)}"
            raise wrong(
                label, rule, f"write {nearest_of_listed(label, labels)}" if labels else "add it"
            )


def arguments_of(node: ast.Call) -> tuple[str, ...]:
    """Return the names and texts among the arguments of a call."""
    words = [
        item.id if isinstance(item, ast.Name) else getattr(item, "value", None)
        for item in node.args
    ]
    return tuple(word for word in words if isinstance(word, str))


def is_finite_number(node: ast.expr) -> bool:
    try:
        if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
            return False
        return isfinite(node.value)  # type: ignore[arg-type]
    except OverflowError:
        return False


def shown(node: ast.AST) -> str:
    """Return the beginning of an expression as text."""
    try:
        return ast.unparse(node)[:80]
    except (RecursionError, ValueError):
        return "a deep expression"
