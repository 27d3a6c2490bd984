"""What one quantised model has at other budgets of bits."""

from __future__ import annotations

from typing import Any

from fl_lightning.errors import InputError, require
from fl_lightning.evaluation import of_network
from fl_lightning.hooks import Context, Meter, RoundRecord
from fl_lightning.metrics import Metric
from fl_lightning.quantization.allocation import MAX_BITS

BUDGETS = (1.0, 2.0, 4.0)


class BitBudgets(Meter):
    """Adds ``bits/at/<budget>/<metric>`` to each round that is evaluated: the metrics of the test
    set, such as ``bits/at/2/accuracy``, of the global model of FedMPQ on the grid of another
    budget, in magnitude bits per weight. It is what FedMPQ's ``supernet`` is trained for. It takes
    a pass over the test set for each.

    Args:
        budgets: from 1 to 8 bits; null: 1, 2 and 4.
    """

    def __init__(self, budgets: list[float] | None = None) -> None:
        self.budgets = budgets
        for bits in self._budgets:
            require(
                1 <= bits <= MAX_BITS,
                f"BitBudgets(budgets={budgets})",
                f"a weight has 1 to {MAX_BITS} magnitude bits",
                "write budgets: [1, 2, 4]",
            )
        self.declared_metrics = tuple(_accuracy_at(bits) for bits in self._budgets)

    @property
    def _budgets(self) -> tuple[float, ...]:
        return BUDGETS if self.budgets is None else tuple(self.budgets)

    def on_check(self, context: Context) -> None:
        method: Any = context.method
        if not hasattr(method, "deploy_at"):
            given = f"callbacks.BitBudgets with {type(method).__name__}"
            raise InputError(given, "it deploys FedMPQ", "write --model FedMPQ, or leave it out")
        if method.personalised or context.data.apart:
            raise InputError(
                "callbacks.BitBudgets where models or test examples are the clients' own",
                "it evaluates the one model of all clients on the test set of the run",
                "leave it out",
            )

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if not any(name.startswith("test/") for name in record.metrics):
            return
        for bits in self._budgets:
            network = context.method.deploy_at(bits)
            found = of_network(context.fabric, network, context.data, shared=True)
            record.metrics |= {f"bits/at/{bits:g}/{name}": value for name, value in found.items()}


def _accuracy_at(bits: float) -> Metric:
    title = f"accuracy at {bits:g} bits (%)"
    return Metric(f"bits/at/{bits:g}/accuracy", title, 100.0, 1, " points", higher_is_better=True)
