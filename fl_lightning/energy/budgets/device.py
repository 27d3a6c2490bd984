"""What one client's device grants a sequence, and what its steps cost.

A sequence is read and written as inference does it: its prompt of p tokens is one step, and each
token after it is a step of its own. ``G`` groups, three options, joules.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

from torch import Tensor

from fl_lightning.energy.budgets.choosing import costs_by_count
from fl_lightning.energy.budgets.ledger import UNITS_PER_JOULE, whole_units
from fl_lightning.energy.costs import CostTable
from fl_lightning.energy.options import Deciding


class Device:
    """One device and its budget.

    Args:
        table: cost of each option on this device, its groups in the order of the network's.
        share: the budget of a sequence, as a share of its cost with all groups at ``high``, above
            0.
        whole: whether budgets and joules are of the whole network; if not, of its groups alone.
        deciding: what a controller gives a level of its own: nothing, each ``sequence``, which is
            decided with its prompt, or each ``step`` of one token after it. Its joules are spent,
            and not part of the network that a budget is a share of.

    Quantities of ``q99`` are compared with quantities of ``q99``.
    """

    def __init__(
        self, table: CostTable, share: float, whole: bool = False, deciding: Deciding = "none"
    ) -> None:
        self.table, self.share, self.whole, self.deciding = table, share, whole, deciding
        self.groups = len(table.groups)
        self._of_prompt = lru_cache(maxsize=512)(table.by_tokens)
        self._of_step = lru_cache(maxsize=2048)(self._joules_of_step)

    @cached_property
    def undecided(self) -> Device:
        """The same device where nothing decides."""
        return self if self.deciding == "none" else Device(self.table, self.share, self.whole)

    def decision(self, step: Deciding, kind: str) -> float:
        """Return joules of the controller in a ``step`` of one token, or in the prompt of a
        ``sequence``."""
        if step == "none" or self.deciding != step:
            return 0.0
        assert self.table.controller is not None, "a table without the controller's cost is refused"
        return float(self.table.controller.of_kind(kind).at(1))

    def prompt_costs(self, tokens: int, kind: str) -> Tensor:
        """Return joules of an option that 0, 1 ... n tokens of a step take, float64 ``[G, 3, n +
        1]``."""
        return self._of_prompt(tokens, kind)

    def token_costs(self, tokens: int, kind: str = "mean") -> Tensor:
        """Return joules of a token by option where all n tokens of its step take it, float64 ``[G,
        3]``."""
        return self.prompt_costs(tokens, kind)[..., -1] / tokens

    def fixed(self, tokens: int, kind: str) -> float:
        """Return joules of a step that are counted and that no option changes."""
        return self.table.fixed(tokens, kind) if self.whole else 0.0

    def all_high(self, prompt: int, new: int, kind: str) -> float:
        """Return joules of a prompt and ``new`` steps of one token with all groups at ``high``;
        those of ``q99`` as a ledger charges them, so that a share of 1 buys all of them."""
        return self._of_step(prompt, kind) + new * (self._of_step(1, kind) if new else 0.0)

    def _joules_of_step(self, tokens: int, kind: str) -> float:
        if tokens == 0:
            return 0.0
        each, fixed = self.prompt_costs(tokens, kind)[:, -1, -1], self.fixed(tokens, kind)
        if kind == "q99":
            return (int(whole_units(each).sum()) + int(whole_units(fixed))) / UNITS_PER_JOULE
        return float(each.sum()) + fixed

    def budget(self, prompt: int, new: int, kind: str) -> float:
        """Return E_max of a sequence."""
        return self.share * self.all_high(prompt, new, kind)

    def spent(self, choices: Tensor, prompt: int, kind: str) -> float:
        """Return joules of a sequence whose tokens took these options.

        Args:
            choices: int64 ``[T, G]``, of the prompt and of the tokens after it.
            prompt: tokens of the prompt, 1 or more.
            kind: ``mean`` or ``q99``.
        """
        found = self._step_of(choices[:prompt], kind)
        alone = self.prompt_costs(1, kind)[..., 1]
        later = choices[prompt:]
        found += float(alone.gather(1, later.T).sum()) + len(later) * self.fixed(1, kind)
        return found + self.decision("sequence", kind) + len(later) * self.decision("step", kind)

    def _step_of(self, choices: Tensor, kind: str) -> float:
        costs = self.prompt_costs(len(choices), kind)
        return float(costs_by_count(choices, costs).sum()) + self.fixed(len(choices), kind)

    def rest(self, prompt: int, new: int, kind: str = "mean") -> float:
        """Return joules of a sequence that no option changes."""
        return (self.table.fixed(prompt, kind) if prompt else 0.0) + new * self.table.fixed(1, kind)

    def least_share(self, prompt: int, new: int, kind: str) -> float:
        """Return the cost of a sequence with all groups at their cheapest options, as a share of
        its cost at ``high``."""
        first, later = (
            float(self.prompt_costs(n, kind)[..., -1].min(-1).values.sum()) + self.fixed(n, kind)
            for n in (prompt, 1)
        )
        return (first + new * later) / self.all_high(prompt, new, kind)
