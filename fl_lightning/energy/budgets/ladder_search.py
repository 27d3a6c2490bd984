"""When a federation's ladder is searched, and what the server makes of the losses that its clients
report.

Rounds are those of three stages: A, all branches; B, random subsets; C, the ladder. In the first
round of B the loss without each branch says which are protected, and each of the last K rounds of B
adds a level.

``G`` branches, ``K`` levels below the full network, ``M`` candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.ladder import (
    LARGEST_LOSS,
    BranchCosts,
    all_masks,
    best_within,
    next_mask,
    protected_by,
    without,
    without_each,
)
from fl_lightning.energy.budgets.levels import LevelLedger
from fl_lightning.energy.budgets.passes import Lengths

log = logging.getLogger("fl_lightning")

Search: TypeAlias = Literal["elimination", "random", "enumeration", "gates", "tabs"]
"""How a ladder is found: by what the next branch loses for its joules; by chance; of all subsets;
or by gates that are trained by gradient, of the branches alone or of the states that enter their
blocks."""
GATED: tuple[Search, ...] = ("gates", "tabs")
"""The searches by gates."""


@dataclass(frozen=True)
class Budgeted:
    """The sequences that a ladder is for, on devices with budgets of their own.

    A prompt is one step, and what a step of many tokens costs is measured: a subset that fits a
    budget token by token need not fit it with its prompt.

    Args:
        devices: of the clients.
        lengths: of the sequences, each once.
        counts: how many sequences have each of them, int64 ``[B]``.
    """

    devices: Sequence[Device]
    lengths: Lengths
    counts: Tensor

    @classmethod
    def of(cls, devices: Sequence[Device], lengths: Lengths) -> Budgeted:
        """Return what there is where sequences have these lengths; without any, one token."""
        pairs = torch.stack((lengths.prompts, lengths.new), 1)
        each, counts = (pairs if len(pairs) else torch.tensor([[1, 0]])).unique(
            dim=0, return_counts=True
        )
        return cls(devices, Lengths(each[:, 0], each[:, 1]), counts)

    def refused(self, masks: Tensor, budget: float) -> Tensor:
        """Return how many sequences cannot be afforded with each subset, where devices grant the
        least, on those whose budget is at least this one; int64 ``[M]`` of masks ``[M, G]``."""
        found = torch.zeros(len(masks), dtype=torch.int64)
        for device in self.devices:
            if device.share >= budget:
                refused = ~LevelLedger.of(device, self.lengths, masks).affordable()
                found = torch.maximum(found, (refused * self.counts.unsqueeze(1)).sum(0))
        return found


@dataclass(frozen=True)
class LadderSearch:
    """The rounds of a search, and its decisions.

    Args:
        kind: how the ladder is found.
        first_subsets: the first round of stage B.
        first_ladder: the first round of stage C.
        levels: K.
        budgets: of the clients, as shares.
        kept: the first branches that are never left out, because levels are decided by what they
            compute.
        step: branches that a level leaves out more than the one before.
    """

    kind: Search
    first_subsets: int
    first_ladder: int
    levels: int
    budgets: Sequence[float]
    kept: int = 0
    step: int = 1

    def start(self, branches: int) -> dict[str, Tensor]:
        """Return what a server knows before the search: ``ladder`` uint8 ``[K + 1, G]``, each level
        as the last that is known, their losses ``ladder_losses [K + 1]``, and which branches are
        ``protected``, uint8 ``[G]``."""
        return {
            "ladder": torch.ones(self.levels + 1, branches, dtype=torch.uint8),
            "ladder_losses": torch.zeros(self.levels + 1),
            "protected": self._kept(branches).to(torch.uint8),
        }

    def _kept(self, branches: int) -> Tensor:
        return torch.arange(branches) < self.kept

    def level_of(self, round: int) -> int:
        """Return which level a round adds, from 1 to K; 0: none."""
        level = round - (self.first_ladder - self.levels) + 1
        return level if 1 <= level <= self.levels else 0

    def asks(self, round: int) -> bool:
        """Return whether clients report the losses of candidates in a round."""
        if self.kind == "enumeration":
            return round in (self.first_subsets, self.first_ladder - 1)
        return round == self.first_subsets or (
            self.kind == "elimination" and self.level_of(round) > 0
        )

    def candidates(self, base: Tensor, round: int) -> Tensor:
        """Return the masks whose losses are reported in a round, bool ``[M, G]``.

        Args:
            base: the ladder's last level so far, bool ``[G]``.
            round: the round.
        """
        if self.kind == "enumeration" and round != self.first_subsets:
            return all_masks(len(base))
        return without_each(base)

    def lowest_share(self, round: int) -> float:
        """Return s_t: from 1 to the smallest budget over the first half of stage B, then that."""
        half = max((self.first_ladder - self.first_subsets) / 2, 1.0)
        fallen = min((round - self.first_subsets) / half, 1.0)
        return 1.0 - fallen * (1.0 - min(*self.budgets, 1.0))

    def next_entries(
        self,
        known: Mapping[str, Tensor],
        losses: Tensor | None,
        round: int,
        budgeted: Budgeted,
        noise: np.random.Generator,
        gates: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return what a server knows after a round, of the entries of :meth:`start` those that
        changed.

        Args:
            known: these entries.
            losses: of the round's candidates ``[M]``; None where none were asked for.
            round: the round.
            budgeted: what the ladder is for; a branch is chosen by the joules of its first device.
            noise: what ``random`` draws from.
            gates: logits of the branches ``[G]``, where there are gates.
        """
        if round == self.first_subsets:
            assert losses is not None, "the first round of stage B asks for losses"
            protected = protected_by(losses)
            return {"protected": (protected | self._kept(len(protected))).to(torch.uint8)}
        level = self.level_of(round)
        if not level or (self.kind == "enumeration" and losses is None):
            return {}
        # whose gates choose among all subsets that have the protected branches
        if self.kind == "tabs":
            least = known["protected"].expand(self.levels, -1)
            found = {"ladder": torch.cat((known["ladder"][:1], least))}
        elif self.kind == "enumeration":
            assert losses is not None
            found = self._best(known, losses, budgeted)
        else:
            found = self._next(known, losses, level, budgeted, noise, gates)
        if round == self.first_ladder - 1:
            last = found["ladder"][-1:].bool()
            if refused := int(budgeted.refused(last, min(self.budgets))):
                share = float(BranchCosts.of(budgeted.devices[0], "q99").share(last))
                log.warning(
                    "the ladder ends at %.2f of the full network's energy, and under the budget %g %d of %d "
                    "sequences of the test set, read and answered, are refused: write more --model.levels, "
                    "or a larger budget",
                    share,
                    min(self.budgets),
                    refused,
                    int(budgeted.counts.sum()),
                )
        return found

    def _next(
        self,
        known: Mapping[str, Tensor],
        losses: Tensor | None,
        level: int,
        budgeted: Budgeted,
        noise: np.random.Generator,
        gates: Tensor | None,
    ) -> dict[str, Tensor]:
        """Return the ladder with one level more: branches are left out of the last one, as long as
        some sequence is refused with it under some budget."""
        costs = BranchCosts.of(budgeted.devices[0])
        mask, protected = known["ladder"][-1].bool(), known["protected"].bool()
        left_out: list[int] = []
        while len(left_out) < self.step:
            free = (mask & ~protected).nonzero()[:, 0].tolist()
            if not free or not budgeted.refused(mask.unsqueeze(0), min(self.budgets)):
                break
            if gates is not None:
                branch = min(free, key=gates.tolist().__getitem__)
            elif losses is None:
                branch = free[int(noise.integers(len(free)))]
            else:
                _, branch = next_mask(mask, losses, costs.branches, protected)
            mask = without(mask, branch)
            left_out.append(branch)
        ladder, of_levels = known["ladder"].clone(), known["ladder_losses"].clone()
        ladder[level:] = mask.to(torch.uint8)
        if losses is not None:
            if bool(known["ladder"][-1].all()):
                of_levels[:level][of_levels[:level] == 0] = losses[0]
            of_levels[level:] = _loss_without(left_out, losses)
        return {"ladder": ladder, "ladder_losses": of_levels}

    def _best(
        self, known: Mapping[str, Tensor], losses: Tensor, budgeted: Budgeted
    ) -> dict[str, Tensor]:
        """Return the ladder of the best subset for each budget; it need not be nested."""
        every = all_masks(known["ladder"].shape[1])
        possible = every[:, : self.kept].all(1)
        masks, losses = every[possible], losses[possible]
        shares = BranchCosts.of(budgeted.devices[0], "q99").share(masks)
        ladder = known["ladder"].clone()
        of_levels = torch.full_like(known["ladder_losses"], float(losses[-1]))
        wanted = sorted({share for share in self.budgets if share < 1}, reverse=True)
        for level, budget in enumerate(wanted[: self.levels], start=1):
            best = best_within(budgeted.refused(masks, budget) == 0, shares, losses.double())
            ladder[level:], of_levels[level:] = masks[best].to(torch.uint8), losses[best]
        return {"ladder": ladder, "ladder_losses": of_levels}


def _loss_without(branches: Sequence[int], losses: Tensor) -> Tensor:
    """Return the loss of a subset that lacks some branches more than the one that was measured: of
    several, what each adds by itself is added up.

    Args:
        branches: which ones.
        losses: of that subset, and without each branch, ``[G + 1]``.
    """
    if len(branches) < 2:
        return losses[branches[0] + 1 if branches else 0]
    each = losses[torch.tensor(branches) + 1]
    return (losses[0] + (each - losses[0]).sum()).clamp(0, LARGEST_LOSS)
