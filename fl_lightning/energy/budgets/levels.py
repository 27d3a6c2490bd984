"""The budget of a sequence over the levels of a ladder, kept by construction.

Level k costs c_k joules a token, everything included, and level 0 is the best. With ``owed`` tokens
to come, this one included, and c_K the cheapest,

    room = E_max - spent - c_K (owed - 1)

is what the token may cost now. A sequence is refused where room < c_K; else it takes the level it
wishes for, or the best one that fits. So ``spent + c_K owed <= E_max`` always holds, and a sequence
of n tokens without a prompt is refused exactly when c_K n > E_max. A prompt is one step.

Costs are whole units of 2^-40 J, see :mod:`fl_lightning.energy.budgets.ledger`. ``B`` sequences,
``K`` levels below the best.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.ladder import BranchCosts
from fl_lightning.energy.budgets.ledger import REFUSED, Account, whole_units
from fl_lightning.energy.budgets.passes import Lengths


class LevelLedger(Account):
    """The budgets of B sequences that are decoded side by side; each is as it would be alone.

    Args:
        budget: E_max of each sequence in joules, float64 ``[B]``.
        prompts: units of the prompt of each sequence at each level, int64 ``[B, K + 1]``.
        costs: units of a token at each level, int64 ``[K + 1]``.
        owed: tokens that each sequence may have after its prompt, int64 ``[B]``.
    """

    def __init__(self, budget: Tensor, prompts: Tensor, costs: Tensor, owed: Tensor) -> None:
        super().__init__(budget, owed)
        self.prompts, self.costs = prompts, costs

    @classmethod
    def of(cls, device: Device, lengths: Lengths, levels: Tensor) -> LevelLedger:
        """Return the ledger of sequences of these lengths on a device, by what it charges.

        Args:
            device: with its budget.
            lengths: of the sequences.
            levels: the branches that each computes, bool ``[K + 1, G]``.
        """
        budgets = lengths.each(device.budget, "q99")
        sizes = lengths.prompts.tolist()
        prompts = [BranchCosts.of(device, "q99", prompt).units(levels) for prompt in sizes]
        costs = BranchCosts.of(device, "q99").units(levels)
        once, each_step = (
            whole_units(device.decision(step, "q99")) for step in ("sequence", "step")
        )
        return cls(budgets, torch.stack(prompts) + once, costs + each_step, lengths.new)

    def affordable(self) -> Tensor:
        """Return the levels that each sequence can have from its first token to its last, bool
        ``[B, K + 1]``."""
        return self.prompts + self.owed.unsqueeze(1) * self.costs <= self.budget.unsqueeze(1)

    def standing(self, full_prompt: bool) -> tuple[Tensor, Tensor]:
        """Return the levels that prompts and the tokens after them have where nothing decides for
        each, int64 ``[B]``; ``full_prompt``: prompts are at level 0 where that can be afforded."""
        return self.after_full_prompt() if full_prompt else (self.constant(),) * 2

    def constant(self) -> Tensor:
        """Return the best level that each sequence can afford from its first token to its last,
        int64 ``[B]``; where it cannot afford any, the cheapest."""
        whole = self.prompts + self.owed.unsqueeze(1) * self.costs
        return _best(whole, self.budget)

    def after_full_prompt(self) -> tuple[Tensor, Tensor]:
        """Return levels of the prompt and of the tokens after it, int64 ``[B]``: the best for the
        tokens where the prompt is at level 0, and the constant level for both where that cannot be
        afforded."""
        whole = self.prompts[:, :1] + self.owed.unsqueeze(1) * self.costs
        later, constant = _best(whole, self.budget), self.constant()
        fits = whole.gather(1, later.unsqueeze(1))[:, 0] <= self.budget
        return torch.where(fits, 0, constant), torch.where(fits, later, constant)

    def decide_prompts(self, wish: Tensor) -> Tensor:
        """Choose the levels of the prompts, and charge them.

        Args:
            wish: levels, int64 ``[B]``.

        Returns:
            int64 ``[B]``; ``REFUSED`` where a sequence cannot be afforded.
        """
        room = self.budget - self.used - self.costs.min() * self.owed
        return self._take(wish, self.prompts, room, torch.ones_like(self.refused))

    def decide(self, wish: Tensor, active: Tensor) -> Tensor:
        """Choose the levels of one more token of each sequence, and charge them.

        Args:
            wish: levels, int64 ``[B]``.
            active: bool ``[B]``, the sequences that have a token now.

        Returns:
            int64 ``[B]``; ``REFUSED`` where a sequence has been refused, or is not active. A
            sequence that has had all its tokens is refused one more.
        """
        room = self.budget - self.used - self.costs.min() * (self.owed - 1)
        room = torch.where(self.owed > 0, room, -1)
        taken = self._take(wish, self.costs.expand(len(wish), -1), room, active)
        self.owed -= (taken != REFUSED).long()
        return taken

    def _take(self, wish: Tensor, costs: Tensor, room: Tensor, active: Tensor) -> Tensor:
        running = active & ~self.refused
        allowed = running & (room >= costs.min(1).values)
        self.refused |= running & ~allowed
        wished = wish.clamp(0, costs.shape[1] - 1).unsqueeze(1)
        fits = costs.gather(1, wished)[:, 0] <= room
        level = torch.where(fits, wished[:, 0], _best(costs, room))
        self.clamped += (allowed & ~fits).long()
        self.used += torch.where(allowed, costs.gather(1, level.unsqueeze(1))[:, 0], 0)
        return torch.where(allowed, level, REFUSED)


def mixed_levels(
    ledger: LevelLedger,
    lengths: Lengths,
    prompts: Tensor,
    levels: Tensor,
    tokens: int,
    noise: np.random.Generator,
) -> Tensor:
    """Return levels of tokens to be trained at, int64 ``[B, T]``: tokens after a prompt are at a
    better level than their sequence by chance, as often as the budget pays for.

    Args:
        ledger: of the sequences.
        lengths: of the sequences.
        prompts: levels of the prompts, int64 ``[B]``.
        levels: of the sequences, which their budgets afford, int64 ``[B]``.
        tokens: T.
        noise: what is drawn from.
    """
    costs, new = ledger.costs.double(), lengths.new
    # of the levels above each
    better = torch.stack([costs[: max(k, 1)].mean() for k in range(len(costs))])
    spent = ledger.prompts.gather(1, prompts.unsqueeze(1))[:, 0] + new * ledger.costs[levels]
    wanted = new * (better - costs)[levels]
    chance = ((ledger.budget - spent) / wanted.clamp_min(1)).clamp(0, 1)
    draws = torch.from_numpy(noise.random((2, len(levels), tokens)))
    lifted = lengths.after_prompts(tokens) & (draws[0] < chance.unsqueeze(1))
    return torch.where(lifted, (draws[1] * levels.unsqueeze(1)).long(), levels.unsqueeze(1))


def _best(costs: Tensor, room: Tensor) -> Tensor:
    """Return the first level whose cost is within the room, int64 ``[B]``; the cheapest where none
    is.

    Args:
        costs: int64 ``[B, K + 1]``.
        room: int64 ``[B]``.
    """
    fits = costs <= room.unsqueeze(1)
    return torch.where(fits.any(1), fits.long().argmax(1), costs.argmin(1))


def levels_of(
    ledger: LevelLedger, lengths: Lengths, prompt_wishes: Tensor, wishes: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the level of each token of sequences that are read, int64 ``[B, T]``, -1 for what is
    refused; and which sequences are not refused, bool ``[B]``. Padding has the level that it wishes
    for, and costs nothing.

    Args:
        ledger: of the sequences.
        lengths: of the sequences.
        prompt_wishes: levels of the prompts, int64 ``[B]``.
        wishes: levels of the tokens, int64 ``[B, T]``; those within the prompts are not read.
    """
    first, tokens = ledger.decide_prompts(prompt_wishes), wishes.shape[1]
    places = torch.arange(tokens)
    found = torch.where(places < lengths.prompts.unsqueeze(1), first.unsqueeze(1), wishes)
    rows = torch.arange(len(first))
    for step in range(int(lengths.new.max()) if len(first) else 0):
        active, place = lengths.new > step, (lengths.prompts + step).clamp(max=tokens - 1)
        taken = ledger.decide(wishes[rows, place], active)
        given = taken != REFUSED
        found[rows[given], place[given]] = taken[given]
    granted = ~ledger.refused
    return found.masked_fill(~granted.unsqueeze(1), REFUSED), granted
