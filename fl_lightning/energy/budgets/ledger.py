"""The budget of a sequence at inference, kept by construction.

Before each token F is the unavoidable cost of a token and c_min = sum_g min_z c_gz. With ``owed``
tokens to come, this one included,

    room = E_max - spent - F owed - c_min (owed - 1)

is what the groups may cost now. If room < c_min the sequence is refused. Else each group takes
argmax_z theta_gz - lambda c_gz, and is downgraded, in the order of loss of theta per joule saved,
until the cost is at most room. So ``spent + (F + c_min) owed <= E_max`` always holds, whatever the
controller says.

Everything is counted in whole units of 2^-40 J (0.9 picojoules), costs rounded up and budgets down,
so sums are exact and nothing depends on the order of additions. ``B`` sequences, ``G`` groups, 3
options.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl_lightning.energy.budgets.choosing import (
    PROMPT_PRICES,
    UNLIMITED,
    cheapest_first,
    cost_of_prompt,
    finite_logits,
    finite_prices,
    sum_of_units,
)
from fl_lightning.errors import require

UNITS_PER_JOULE = 2.0**40
REFUSED = -1
"""Stands for every choice of a sequence that is refused."""


def whole_units(joules: Tensor | float) -> Tensor:
    """Return costs as int64 units of 2^-40 J, rounded up; ``UNLIMITED`` where they are infinite."""
    scaled = torch.as_tensor(joules, dtype=torch.float64) * UNITS_PER_JOULE
    limited = scaled.ceil().clamp(max=float(UNLIMITED))
    return torch.where(limited >= UNLIMITED, UNLIMITED, limited.nan_to_num().long())


class Account:
    """What B sequences may spend, and have spent.

    Args:
        budget: E_max of each sequence in joules, float64 ``[B]``; infinity: without a limit.
        owed: tokens that each sequence may still have, int64 ``[B]``.

    Attributes:
        used: units that were charged so far, int64 ``[B]``.
        clamped: tokens of each sequence that got less than was wished for, int64 ``[B]``.
        refused: sequences that were refused, bool ``[B]``.
    """

    def __init__(self, budget: Tensor, owed: Tensor) -> None:
        units = (budget.double() * UNITS_PER_JOULE).floor()
        self.budget = torch.where(
            units >= UNLIMITED, UNLIMITED, units.nan_to_num(posinf=0.0).long()
        )
        self.owed = owed.clone()
        self.used = torch.zeros_like(owed)
        self.clamped = torch.zeros_like(owed)
        self.refused = torch.zeros_like(owed, dtype=torch.bool)

    @property
    def spent(self) -> Tensor:
        """Joules that were charged so far, float64 ``[B]``; never above the budget."""
        return self.used.double() / UNITS_PER_JOULE


class BatchedEnergyLedger(Account):
    """The budgets of B sequences that are decoded side by side; each is as it would be alone.

    Args:
        budget: E_max, joules of each sequence, ``[B]``, float64; infinity: without a limit.
        fixed: F, joules of a token that no option changes.
        costs: joules of a token by option, ``[G, 3]``, the 0.99 quantile; infinite where there is
            none.
        owed: tokens that each sequence may have, ``[B]``, int64; those of a prompt are not counted.

    Raises:
        InputError: a number is negative or not a number, a group has no option, or the whole is
            more than four million joules.
    """

    def __init__(self, budget: Tensor, fixed: float, costs: Tensor, owed: Tensor) -> None:
        costs, budget = costs.to(torch.float64), budget.to(torch.float64)
        possible = costs.isfinite().any(-1).all() and not costs.isnan().any() and (costs >= 0).all()
        require(
            possible and 0 <= fixed < math.inf and (budget >= 0).all() and (owed >= 0).all(),
            f"a ledger of budget={budget.tolist()}, fixed={fixed}, owed={owed.tolist()}",
            "joules and tokens are 0 or more, and each group has an option of finite cost",
            "take the costs of CostTable.tensors",
        )
        self.joules, self.costs = costs, whole_units(costs)
        self.fixed = int(whole_units(fixed))
        self.least = sum_of_units(self.costs.min(-1).values)
        largest = (self.fixed + sum_of_units(self.costs[costs.isfinite()])) * (int(owed.max()) + 1)
        require(
            largest < UNLIMITED,
            f"a ledger of {int(owed.max())} tokens",
            "a sequence costs less than four million joules",
            "give the costs in joules",
        )
        super().__init__(budget, owed)

    def decide(
        self, theta: Tensor, price: float | Tensor = 0.0, active: Tensor | None = None
    ) -> Tensor:
        """Choose the options of one token of each sequence, and charge them.

        Args:
            theta: logits ``[B, G, 3]``.
            price: lambda, logits per joule, 0 or more, one for all or ``[B]``. That of training is
                per budget: divide it by E_max.
            active: bool ``[B]``, the sequences that have a token now; None: all.

        Returns:
            int64 ``[B, G]``, places in ``OPTIONS``; ``REFUSED`` where the sequence has been refused
            or is not active. A sequence that has had all its tokens is refused one more.
        """
        running = ~self.refused if active is None else active & ~self.refused
        room = self.budget - self.used - self.fixed * self.owed - self.least * (self.owed - 1)
        allowed = running & (self.owed > 0) & (room >= self.least)
        self.refused |= running & ~allowed
        priced = _priced(self.joules)
        by_sequence = finite_prices(price, priced).reshape(-1, 1, 1)
        wish = (finite_logits(theta, self.joules) - by_sequence * priced).argmax(-1)
        choices, cost, changed = cheapest_first(theta, wish, self.costs, room)
        assert bool((cost < UNLIMITED).all()), "an option that is not there was chosen"
        self.used += torch.where(allowed, self.fixed + cost, 0)
        self.owed -= allowed.long()
        self.clamped += (allowed & changed).long()
        return choices.masked_fill(~allowed.unsqueeze(-1), REFUSED)

    def decide_prompt(
        self, sequence: int, theta: Tensor, price: float, fixed: float, costs: Tensor
    ) -> Tensor | None:
        """Choose the options of all tokens of a prompt, which is one step, and charge them.

        The step costs ``fixed`` plus, for each group and option, the joules of as many tokens as
        chose it: what does not grow with the tokens is paid once for each option that is used at
        all. The choice is argmax theta - lambda c with c the joules of a token when all take the
        option. If that costs more than the room that the tokens owed leave, lambda is raised by
        bisection. At a price that is high enough all tokens take the cheapest option, which is what
        the sequence is refused by if it does not fit.

        Choices of the first token of a prompt depend on the last: the whole prompt is known when it
        is read.

        Args:
            sequence: place of the sequence in the batch.
            theta: logits ``[T, G, 3]``.
            price: lambda, logits per joule, 0 or more.
            fixed: joules of the step that no option changes.
            costs: joules of an option in a step of which 0, 1 ... T tokens take it, ``[G, 3, T +
                1]``, as :meth:`~fl_lightning.energy.costs.CostTable.by_tokens` gives them.

        Returns:
            int64 ``[T, G]``, or None where the sequence is refused.
        """
        units, whole = whole_units(costs), int(whole_units(fixed))
        room = int(self.budget[sequence] - self.used[sequence]) - whole
        room -= (self.fixed + self.least) * int(self.owed[sequence])
        if bool(self.refused[sequence]) or room < sum_of_units(units[..., -1].min(-1).values):
            self.refused[sequence] = True
            return None
        wish, choices, cost = prompt_choices(theta, price, costs.double(), units, room)
        assert cost <= room, "a prompt was to cost more than its room"
        self.used[sequence] += whole + cost
        self.clamped[sequence] += int((wish != choices).any(-1).sum())
        return choices


def _priced(joules: Tensor) -> Tensor:
    """Return costs with 0 in place of those of options that are not there."""
    return joules.masked_fill(joules.isinf(), 0.0)


def prompt_choices(
    theta: Tensor, price: float, costs: Tensor, units: Tensor, room: int
) -> tuple[Tensor, Tensor, int]:
    """Return the choices wished for, those that fit, both int64 ``[T, G]``, and the units that
    these cost.

    Args:
        theta: logits ``[T, G, 3]``.
        price: lambda, logits per joule.
        costs: joules ``[G, 3, T + 1]``.
        units: the same in units, int64.
        room: units that the step may cost, no fewer than those of the cheapest options.
    """
    per_token = costs[..., -1] / len(theta)
    logits = finite_logits(theta, per_token)
    priced = _priced(per_token)

    def at(price: float) -> tuple[Tensor, int]:
        choices = (logits - finite_prices(price, priced) * priced).argmax(-1)
        return choices, cost_of_prompt(choices, units)

    wish, cost = at(price)
    if cost <= room:
        return wish, wish, cost
    fits = units[..., -1].argmin(-1).expand(len(theta), -1)
    best, best_cost = fits, cost_of_prompt(fits, units)
    low, high = price, None
    for _ in range(PROMPT_PRICES):
        middle = (
            2 * low + 1 / max(float(priced.max()), 1e-300) if high is None else (low + high) / 2
        )
        choices, cost = at(middle)
        if cost <= room:
            best, best_cost, high = choices, cost, middle
        else:
            low = middle
    return wish, best, best_cost


class EnergyLedger:
    """The budget of one sequence; see :class:`BatchedEnergyLedger`.

    Args:
        budget: E_max, joules; infinity: without a limit.
        fixed: F, joules of a token that no option changes.
        costs: joules of a token by option, ``[G, 3]``, infinite where there is none.
        owed: tokens that the sequence may have.

    Raises:
        InputError: as :class:`BatchedEnergyLedger`.
    """

    def __init__(self, budget: float, fixed: float, costs: Tensor, owed: int) -> None:
        self._batch = BatchedEnergyLedger(
            torch.tensor([budget], dtype=torch.float64), fixed, costs, torch.tensor([owed])
        )

    def decide(self, theta: Tensor, price: float = 0.0) -> Tensor | None:
        """Choose the options of the next token, int64 ``[G]``, and charge them; None: it is
        refused.

        Args:
            theta: logits ``[G, 3]``.
            price: lambda, logits per joule.
        """
        choices = self._batch.decide(theta.unsqueeze(0), price)[0]
        return None if self.refused else choices

    def decide_prompt(
        self, theta: Tensor, price: float, fixed: float, costs: Tensor
    ) -> Tensor | None:
        """Choose the options of a prompt, int64 ``[T, G]``, and charge them; None: it is refused.

        The arguments are those of :meth:`BatchedEnergyLedger.decide_prompt`.
        """
        return self._batch.decide_prompt(0, theta, price, fixed, costs)

    @property
    def spent(self) -> float:
        """Joules that were charged so far."""
        return float(self._batch.spent)

    @property
    def owed(self) -> int:
        """Tokens that may still come."""
        return int(self._batch.owed)

    @property
    def clamped(self) -> int:
        """Tokens with a group that was downgraded."""
        return int(self._batch.clamped)

    @property
    def refused(self) -> bool:
        """Whether a step was refused; the sequence has ended then."""
        return bool(self._batch.refused)
