"""Static gates of branches that are trained by gradient: a baseline of how a ladder is found.

    p_g = 0.05 + 0.9 sigmoid(theta_g),    1 of a branch that is protected
    L = CE(full) + CE(S) + KL(full || S) + lambda (E / E_t - 1)

S has each branch with the chance p_g, one draw a sequence, straight through a relaxed draw at a
temperature of 2/3 (Maddison et al. 2017, arXiv 1611.00712). E is the expected cost of a token and
E_t the target, which falls from the whole network to the smallest budget. This is BHSP of
:mod:`fl_lightning.energy.controllers` on branches, with what broke it repaired: the whole network
is in every step, |theta| <= 3 and both options keep a chance of 0.05, the target falls slowly, and
lambda cannot pass half of CE in 50 steps. Branches that a ladder protects are always computed, as
they are in the draws of the other searches.

``B`` sequences, ``G`` branches.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.energy.budgets.ladder import BranchCosts
from fl_lightning.energy.controllers import HIGH_AT_START
from fl_lightning.energy.gating import TEMPERATURE, bounded
from fl_lightning.energy.switched.branches import BranchWeights

MOST_LOGIT = 3.0
"""Largest size of a gate's logit, where its chance still has a derivative of 0.04."""
LEAST_CHANCE = 0.05
"""Least chance of either option in a draw."""
FIRST_STEPS = 50
"""Local steps in which lambda cannot pass half of the task's loss."""


class GateWeights(BranchWeights):
    """Weights that were drawn, and the chances that each branch was drawn with, ``[B, G]`` or
    ``[G]``; those of protected branches are 1."""

    def __init__(self, weights: Tensor, chances: Tensor) -> None:
        super().__init__(weights)
        self.chances = chances

    def losses(self) -> dict[str, Tensor]:
        """Return what else training minimises, by its name."""
        return {}


class BranchGates(nn.Module):
    """A logit for each branch; all begin at 2, which is a chance of 0.84.

    Args:
        branches: G.
    """

    def __init__(self, branches: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full((branches,), HIGH_AT_START))

    @property
    def chances(self) -> Tensor:
        """The chance that each branch is drawn, ``[G]``, with a gradient."""
        return chances_of(bounded(self.theta, MOST_LOGIT))

    def weights(
        self, prompts: Tensor, noise: np.random.Generator, protected: Tensor
    ) -> GateWeights:
        """Return a draw for each of the sequences with these prompts ``[B]``; see :meth:`drawn`."""
        chances = self.chances.masked_fill(protected.to(self.theta.device), 1.0)
        return GateWeights(self.drawn(len(prompts), noise, protected), chances)

    def drawn(self, sequences: int, noise: np.random.Generator, protected: Tensor) -> Tensor:
        """Return weights of 0 and 1 of each branch in each sequence, float ``[B, G]``, with the
        gradient of a relaxed draw.

        Args:
            sequences: B.
            noise: the client's stream for this step.
            protected: branches that are always computed, bool ``[G]``.
        """
        found = straight_through(self.chances, noise.logistic(size=(sequences, len(self.theta))))
        return found.masked_fill(protected.to(found.device), 1.0)


def chances_of(theta: Tensor) -> Tensor:
    """Return the chances of branches to be drawn, of bounded logits of any shape."""
    return LEAST_CHANCE + (1 - 2 * LEAST_CHANCE) * theta.sigmoid()


def straight_through(chances: Tensor, noise: np.ndarray) -> Tensor:
    """Return 0 or 1 for each draw, with the gradient of a relaxed one, ``[B, N]``.

    Args:
        chances: of 1, ``[B, N]`` or ``[N]``.
        noise: logistic, ``[B, N]``.
    """
    logits = chances.logit() + torch.from_numpy(noise).to(chances)
    soft = (logits / TEMPERATURE).sigmoid()
    return (logits > 0).to(soft) + (soft - soft.detach())


def energy_of(chances: Tensor, costs: BranchCosts, target: float) -> Tensor:
    """Return E / E_t of a token, a scalar with a gradient.

    Args:
        chances: of branches to be computed, ``[B, G]`` or ``[G]``.
        costs: of a step of one token.
        target: E_t as a share of the whole network.
    """
    each = costs.branches.to(chances)
    energy = (chances @ each).mean() + costs.rest
    return energy / (target * (float(costs.branches.sum()) + costs.rest))


def next_price(price: float, energy: float, task: float, budget: float) -> float:
    """Return lambda after a step, never below 0: lambda + CE / 100 (E / E_t - 1) / (1 / b - 1).

    The excess is measured by that of the whole network over the smallest budget b, and cut to it,
    so that 50 steps raise lambda by half of CE at most.

    Args:
        price: lambda so far.
        energy: E / E_t.
        task: CE of all branches in nats.
        budget: b, as a share of the whole network.
    """
    most = 1 / budget - 1 if budget < 1 else 1.0
    return max(price + task / (2 * FIRST_STEPS) * min((energy - 1.0) / most, 1.0), 0.0)
