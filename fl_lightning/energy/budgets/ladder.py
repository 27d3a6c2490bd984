"""A ladder of branches: which are left out at each level, found by backward elimination on
validation losses.

    full = S_0 > S_1 > ... > S_K,    S_k+1 = S_k without argmin_b (L(S_k - b) - L(S_k)) / c_b

L is a loss on validation examples and c_b the joules of branch b in a step of one token. Where the
loss of a subset is the sum over what it lacks, every S_k has the least loss of all subsets that
cost no more (Everett, Operations Research 1963). Searching subsets in one network that was trained
under all of them is the idea of Once-for-all (Cai et al., ICLR 2020, arXiv 1908.09791); leaving out
branches in training is LayerDrop's (Fan et al., ICLR 2020, arXiv 1909.11556).

``G`` branches, ``K`` levels below the full network, ``M`` masks. A mask is bool ``[G]``, True where
a branch is computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.ledger import whole_units
from fl_lightning.energy.options import HIGH

LARGEST_LOSS = 100.0
"""Losses of subsets count as no more, in nats a token; a guess among 259 bytes has 5.6."""
PROTECTED_TIMES = 2.0
"""A branch is protected whose loss alone is above so many times the median over the branches."""


@dataclass(frozen=True)
class BranchCosts:
    """Joules of a step of one token, by branch.

    Args:
        rest: of what no plan changes: embedding, last norm and head.
        branches: of each branch, float64 ``[G]``.
        deciding: of the controller where it chooses the level of each token, beside the network.
    """

    rest: float
    branches: Tensor
    deciding: float = 0.0

    @classmethod
    def of(cls, device: Device, kind: str = "mean", tokens: int = 1) -> BranchCosts:
        """Return the costs of a step of so many tokens on a device, by the ``mean`` or the
        ``q99``."""
        branches = device.prompt_costs(tokens, kind)[:, HIGH, -1]
        return cls(device.fixed(tokens, kind), branches, device.decision("step", kind))

    def share(self, masks: Tensor) -> Tensor:
        """Return what subsets cost, as a share of the full network, float64 ``[M]`` of masks ``[M,
        G]``."""
        whole = float(self.branches.sum()) + self.rest
        return (masks.double() @ self.branches + self.rest + self.deciding) / whole

    def units(self, masks: Tensor) -> Tensor:
        """Return what a ledger charges for a step, int64 ``[M]`` units of 2^-40 J of masks ``[M,
        G]``."""
        return (masks.long() * whole_units(self.branches)).sum(1) + int(whole_units(self.rest))


def without_each(mask: Tensor) -> Tensor:
    """Return the mask itself, and the masks that lack one branch more each, bool ``[G + 1, G]``;
    the row of a branch that is off already is the mask itself.

    >>> without_each(torch.tensor([True, False, True])).int().tolist()
    [[1, 0, 1], [0, 0, 1], [1, 0, 1], [1, 0, 0]]
    """
    each = mask & ~torch.eye(len(mask), dtype=torch.bool)
    return torch.cat((mask.unsqueeze(0), each))


def protected_by(losses: Tensor) -> Tensor:
    """Return the branches that are never to be left out, bool ``[G]``: those without which the loss
    is above ``PROTECTED_TIMES`` the median over the branches.

    Args:
        losses: of the full network, and without each branch, ``[G + 1]``.
    """
    alone = losses[1:].double()
    return alone > PROTECTED_TIMES * alone.quantile(0.5)


def next_mask(mask: Tensor, losses: Tensor, costs: Tensor, protected: Tensor) -> tuple[Tensor, int]:
    """Return the mask without the branch whose joules are bought at the least loss, and which one
    that is; of branches that cost no loss, the dearest. Where all that are left are protected, the
    mask stays, and the branch is -1.

    Args:
        mask: bool ``[G]``.
        losses: of the mask, and without each branch, ``[G + 1]``.
        costs: joules of each branch, ``[G]``.
        protected: bool ``[G]``.
    """
    free = mask & ~protected
    if not bool(free.any()):
        return mask, -1
    more = (losses[1:].double() - float(losses[0])).clamp_min(0)
    price = more / costs.double().clamp_min(1e-300)  # one may cost nothing
    best = free & (price == price[free].min())
    branch = int(costs.double().masked_fill(~best, -torch.inf).argmax())
    return without(mask, branch), branch


def without(mask: Tensor, branch: int) -> Tensor:
    """Return a mask without one branch more."""
    found = mask.clone()
    found[branch] = False
    return found


def all_masks(branches: int) -> Tensor:
    """Return the masks of all subsets, bool ``[2^G, G]``, the full one last."""
    return ((torch.arange(2**branches).unsqueeze(1) >> torch.arange(branches)) & 1).bool()


def best_within(fits: Tensor, shares: Tensor, losses: Tensor) -> int:
    """Return which of M subsets has the least loss among those that a budget affords; of equally
    good ones the cheapest. Where it affords none, the cheapest of all.

    Args:
        fits: which it affords, bool ``[M]``.
        shares: of the full network's cost, ``[M]``.
        losses: ``[M]``.
    """
    if not bool(fits.any()):
        return int(shares.argmin())
    least = losses.masked_fill(~fits, torch.inf).min()
    return int(shares.masked_fill(~fits | (losses > least), torch.inf).argmin())


def drawn_mask(
    noise: np.random.Generator, costs: BranchCosts, protected: Tensor, lowest: float
) -> Tensor:
    """Draw the mask of one sequence, bool ``[G]``: branches are left out in a random order until
    the rest costs no more than a share that is uniform in ``[lowest, 1]``, as far as protected ones
    allow.

    Args:
        noise: what is drawn from.
        costs: by branch.
        protected: branches that are not left out, bool ``[G]``.
        lowest: the smallest share of the full network's cost; 1: the mask is full.
    """
    each, total = costs.branches.tolist(), float(costs.branches.sum()) + costs.rest
    share, order = noise.uniform(lowest, 1.0), noise.permutation(len(each)).tolist()
    mask, left = torch.ones(len(each), dtype=torch.bool), total
    for branch in order:
        if left > share * total and not bool(protected[branch]):
            mask[branch], left = False, left - each[branch]
    return mask


def drawn_masks(
    noise: np.random.Generator, costs: BranchCosts, protected: Tensor, lowest: float, sequences: int
) -> Tensor:
    """Return a mask of :func:`drawn_mask` for each sequence, bool ``[B, G]``."""
    return torch.stack([drawn_mask(noise, costs, protected, lowest) for _ in range(sequences)])


def distinct(ladder: Tensor) -> Tensor:
    """Return the levels of a ladder ``[K + 1, G]`` in their order, those that repeat the one before
    left out."""
    same = (ladder[1:] == ladder[:-1]).all(1)
    return ladder[torch.cat((torch.tensor([True]), ~same))].bool()
