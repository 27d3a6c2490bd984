"""Gates of branches that read the states of their own block: TABS on branches, a baseline.

    theta_b = v_b + <w_b, h_l - E h_l>,    |theta_b| <= 3
    m = argmax_m sum_b m_b theta_b    over the subsets m with all protected branches
                                      that E_max affords

h_l is the mean over the prompt of the states that enter block l, the block of branch b, at length
d^-1/2, and E h_l, which is regressed on it, its mean over sequences. So v_b is what a gate is
expected to be. Each sequence has one subset. Training is that of
:mod:`fl_lightning.energy.budgets.gates`, where the gates are free numbers: TABS of
:mod:`fl_lightning.energy.controllers` with the same repairs.

In use a block's gates are known when it is entered, and then the subset is chosen anew among those
that agree with the blocks before; gates still to come count as what they are expected to be. So a
budget is never exceeded. The gates' own joules, G products of d numbers a sequence, are not
counted.

``B`` sequences of ``T`` tokens, ``G`` branches, ``M`` subsets, ``d`` features.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.energy.budgets.gates import (
    MOST_LOGIT,
    BranchGates,
    GateWeights,
    chances_of,
    straight_through,
)
from fl_lightning.energy.budgets.ladder import BranchCosts, all_masks
from fl_lightning.energy.budgets.levels import LevelLedger
from fl_lightning.energy.controllers import HIGH_AT_START
from fl_lightning.energy.gating import bounded
from fl_lightning.energy.regret import prompt_states
from fl_lightning.energy.switched.branches import PARTS


class LayerGates(nn.Module):
    """Two gates a block that read the states which enter it. w = 0, v = 2 and E h = 0 at the start.

    Args:
        branches: G.
        width: d.
    """

    def __init__(self, branches: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(branches, width))
        self.theta = nn.Parameter(torch.full((branches,), HIGH_AT_START))
        """v: what each gate's logit is expected to be."""
        self.means = nn.Parameter(torch.zeros(branches // len(PARTS), width))

    def read(self, states: Tensor, prompts: Tensor) -> Tensor:
        """Return h, ``[B, d]``, of the states that enter a block; no gradient goes into them.

        Args:
            states: ``[B, T, d]``.
            prompts: tokens of each prompt, int64 ``[B]``.
        """
        found = F.normalize(prompt_states(states.detach(), prompts).to(self.weight), dim=-1)
        return found / found.shape[-1] ** 0.5

    def logits(self, block: int, read: Tensor) -> Tensor:
        """Return the logits ``[B, 2]`` of the branches of block l, of what they read there, ``[B,
        d]``."""
        rows, centred = rows_of(block), read - self.means[block].detach()
        return bounded(F.linear(centred, self.weight[rows], self.theta[rows]), MOST_LOGIT)

    def weights(
        self, prompts: Tensor, noise: np.random.Generator, protected: Tensor
    ) -> DrawnInBlocks:
        """Return weights that are drawn for each sequence as its blocks are entered.

        Args:
            prompts: tokens of each prompt, int64 ``[B]``.
            noise: the client's stream for this step.
            protected: branches that are always computed, bool ``[G]``.
        """
        return DrawnInBlocks(
            self, prompts, noise.logistic(size=(len(prompts), len(self.theta))), protected
        )

    def chosen(self, ledger: LevelLedger, prompts: Tensor, masks: Tensor) -> ChosenInBlocks:
        """Return weights that are chosen for each sequence within its budget as its blocks are
        entered.

        Args:
            ledger: of the sequences, over these subsets.
            prompts: tokens of each prompt, int64 ``[B]``.
            masks: the subsets, bool ``[M, G]``.
        """
        return ChosenInBlocks(self, prompts, masks, ledger.affordable())


class _InBlocks(GateWeights):
    """Weights of which two columns more are known with each block that is entered."""

    def __init__(self, gates: LayerGates, prompts: Tensor) -> None:
        self.gates, self.prompts = gates, prompts
        self.columns: list[Tensor] = []

    def times(self, branch: int, output: Tensor) -> Tensor:
        column = self.columns[branch // len(PARTS)][:, branch % len(PARTS)]
        return column.reshape(-1, 1, 1).to(output) * output


class DrawnInBlocks(_InBlocks):
    """Weights of 0 and 1 with the gradient of a relaxed draw; see :meth:`LayerGates.weights`."""

    def __init__(
        self, gates: LayerGates, prompts: Tensor, noise: np.ndarray, protected: Tensor
    ) -> None:
        super().__init__(gates, prompts)
        self.noise, self.protected = noise, protected
        self.logits: list[Tensor] = []
        self.read: list[Tensor] = []

    def enter(self, block: int, x: Tensor) -> None:
        rows, read = rows_of(block), self.gates.read(x, self.prompts)
        theta = self.gates.logits(block, read)
        drawn = straight_through(chances_of(theta), self.noise[:, rows])
        self.columns.append(drawn.masked_fill(self.protected[rows].to(drawn.device), 1.0))
        self.logits.append(theta)
        self.read.append(read.mean(0))

    @property
    def chances(self) -> Tensor:  # type: ignore[override]
        """The chances that each branch was drawn with, ``[B, G]``, when all blocks have been
        entered."""
        found = chances_of(torch.cat(self.logits, dim=1))
        return found.masked_fill(self.protected.to(found.device), 1.0)

    def losses(self) -> dict[str, Tensor]:
        """Return ``loss_means``, half the squared distance of E h from the mean of what was
        read."""
        return {"loss_means": (self.gates.means - torch.stack(self.read)).square().sum() / 2}


class ChosenInBlocks(_InBlocks):
    """The weights of the best subset of those that are still possible; see
    :meth:`LayerGates.chosen`.

    Attributes:
        levels: which subset each sequence has, int64 ``[B]``, when all blocks have been entered.
    """

    def __init__(self, gates: LayerGates, prompts: Tensor, masks: Tensor, possible: Tensor) -> None:
        super().__init__(gates, prompts)
        self.masks, self.possible = masks, possible
        expected = bounded(gates.theta.detach().cpu(), MOST_LOGIT)
        self.theta = expected.expand(len(prompts), -1).clone()
        self.levels = torch.zeros(len(prompts), dtype=torch.int64)

    def enter(self, block: int, x: Tensor) -> None:
        rows = rows_of(block)
        found = self.gates.logits(block, self.gates.read(x, self.prompts))
        self.theta[:, rows] = found.detach().cpu().to(self.theta)
        scores = self.theta @ self.masks.T.to(self.theta)
        self.levels = scores.masked_fill(~self.possible, -torch.inf).argmax(1)
        mine = self.masks[self.levels][:, rows]
        self.possible = self.possible & (self.masks[:, rows] == mine.unsqueeze(1)).all(-1)
        self.columns.append(mine)


def rows_of(block: int) -> slice:
    """Return the places of a block's branches."""
    return slice(len(PARTS) * block, len(PARTS) * (block + 1))


def masks_by_cost(costs: BranchCosts, least: Tensor) -> Tensor:
    """Return all subsets that have the branches of ``least [G]``, the dearest first, bool ``[M,
    G]``."""
    masks = all_masks(len(least))
    masks = masks[(masks | ~least).all(1)]
    return masks[costs.units(masks).argsort(descending=True, stable=True)]


def gates_for(search: str, branches: int, width: int) -> BranchGates | LayerGates | None:
    """Return the gates that a search trains, or None where it has none."""
    if search == "tabs":
        return LayerGates(branches, width)
    return BranchGates(branches) if search == "gates" else None
