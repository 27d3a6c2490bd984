"""The server's slots for experts: how much each is used, and how experts are pruned, merged and
born.

``K + 1`` slots, of which slot 0 is the shared adapter; ``P`` values of an adapter, ``d`` of a
router.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fl_lightning.config.constraints import check_fields, within
from fl_lightning.methods.experts.merging import AdapterSpace

FREE = -1


@dataclass(frozen=True)
class Rules:
    """When a slot changes hands.

    Args:
        momentum: beta, the weight of this round's use in the prior.
        smoothing: a, what is added to the use of each active expert, as a share of all use.
        birth_rounds: rounds in which clients reject all experts before one is born.
        birth_share: share of the clients that have to reject.
        prune_share: an expert with a smaller share of the use starves.
        prune_rounds: rounds of starving after which it goes, and which it has to be older than.
        merge_cosine: experts are alike from this cosine of what they add to the weights.
        merge_rounds: rounds of being alike after which two become one.
        merge_loss: largest share of the energy that a merge may lose.
    """

    settings_alone: ClassVar[bool] = True
    """In a configuration it is its settings, without a class path."""

    settings_shown: ClassVar = ("--model.rules.{name} {value}", "{value}")

    momentum: Annotated[float, within("(0, 1]", "it is a weight in (0, 1]", 0.5)] = 0.5
    smoothing: Annotated[float, within("(0, 1)", "it is a share in (0, 1)", 1e-3)] = 1e-3
    birth_rounds: Annotated[int, within("[1, inf)", "it is 1 round or more", 2)] = 2
    birth_share: Annotated[float, within("[0, 1]", "it is a share in [0, 1]", 0.05)] = 0.05
    prune_share: Annotated[float, within("[0, 1)", "it is a share in [0, 1)", 0.02)] = 0.02
    prune_rounds: Annotated[int, within("[1, inf)", "it is 1 round or more", 3)] = 3
    merge_cosine: Annotated[
        float, within("(-1, inf]", "it is a cosine; above 1: nothing is merged", 0.95)
    ] = 0.95
    merge_rounds: Annotated[int, within("[1, inf)", "it is 1 round or more", 2)] = 2
    merge_loss: Annotated[float, within("[0, 1]", "it is a share in [0, 1]", 0.1)] = 0.1

    def __post_init__(self) -> None:
        check_fields(self)


RULES = Rules()


@dataclass(frozen=True)
class Slots:
    """What the server knows of its experts. Tensors are replaced, never written into.

    Args:
        experts: float32 ``[K + 1, P]``.
        routers: float32 ``[K + 1, d]``.
        prior: pi, float64 ``[K + 1]``; 0 for slot 0 and free ones.
        active: bool ``[K + 1]``; False for slot 0.
        born: round in which a slot's expert was born, int64 ``[K + 1]``; -1 where it is free.
        starving: consecutive rounds of starving, int64 ``[K + 1]``.
        alike: consecutive rounds in which two experts were alike, int64 ``[K + 1, K + 1]``, j < k.
        unserved: consecutive rounds in which enough clients rejected all experts, int64 ``[]``.
        mass: use of each slot in the last round, V, float64 ``[K + 1]``.
        rejecters: clients that rejected all experts in the last round, float64 ``[]``.
        changes: experts that were born, pruned and merged away in the last round, int64 ``[3]``.
    """

    experts: Tensor
    routers: Tensor
    prior: Tensor
    active: Tensor
    born: Tensor
    starving: Tensor
    alike: Tensor
    unserved: Tensor
    mass: Tensor
    rejecters: Tensor
    changes: Tensor

    @classmethod
    def start(cls, experts: Tensor, features: int, count: int) -> Slots:
        """Return slots of which the first ``count`` after slot 0 have an expert.

        Args:
            experts: ``[K + 1, P]``.
            features: d.
            count: at least 1 where there are slots.
        """
        size = len(experts)
        active = torch.zeros(size, dtype=torch.bool)
        active[1 : count + 1] = True
        zeros = torch.zeros(size, dtype=torch.int64)
        return cls(
            experts=experts,
            routers=torch.zeros(size, features),
            prior=active.double() / max(1, count),
            active=active,
            born=torch.where(active, 0, FREE),
            starving=zeros,
            alike=torch.zeros(size, size, dtype=torch.int64),
            unserved=torch.tensor(0),
            mass=torch.zeros(size, dtype=torch.float64),
            rejecters=torch.tensor(0.0, dtype=torch.float64),
            changes=torch.zeros(3, dtype=torch.int64),
        )

    @property
    def rows(self) -> Tensor:
        """Adapter and router of each slot, ``[K + 1, P + d]``."""
        return torch.cat([self.experts, self.routers], dim=1)

    def with_rows(self, rows: Tensor) -> Slots:
        """Return the slots with other adapters and routers, ``[K + 1, P + d]``."""
        experts, routers = rows.split([self.experts.shape[1], self.routers.shape[1]], dim=1)
        return replace(self, experts=experts.contiguous(), routers=routers.contiguous())

    def used(self, mass: Tensor, rules: Rules) -> Slots:
        """Return the slots after a round in which they were used so much: the prior, and who
        starves.

        pi_k <- (1 - beta) pi_k + beta (V_k + a) / sum over active j of (V_j + a). No free slot gets
        anything.

        Args:
            mass: V ``[K + 1]``, not negative; that of slot 0 does not count.
            rules: momentum, smoothing, ``prune_share``.
        """
        of_experts = torch.where(self.active, mass, 0.0)
        total = of_experts.sum()
        smoothed = torch.where(self.active, of_experts + rules.smoothing * total, 0.0)
        prior = self.prior
        if total > 0:
            prior = (1 - rules.momentum) * prior + rules.momentum * smoothed / smoothed.sum()
        starves = self.active & (of_experts < rules.prune_share * total)
        return replace(
            self,
            prior=prior,
            mass=mass,
            starving=torch.where(starves, self.starving + 1, 0),
            changes=torch.zeros(3, dtype=torch.int64),
        )

    def pruned(self, round: int, rules: Rules) -> Slots:
        """Return the slots without experts that starved for ``prune_rounds`` and are older than
        that. The most used one stays."""
        old = round - self.born > rules.prune_rounds
        gone = self.active & old & (self.starving >= rules.prune_rounds)
        if bool(self.active.any()) and bool((gone == self.active).all()):
            gone[int(torch.where(self.active, self.mass, -1.0).argmax())] = False
        return self._freed(gone)._changed(1, int(gone.sum()))

    def merged(self, space: AdapterSpace, rules: Rules) -> Slots:
        """Return the slots after at most one merge, of the two experts that are most alike, into
        the lower slot."""
        slots = torch.nonzero(self.active).flatten().tolist()
        pairs = {
            (j, k): space.cosine(self.experts[j], self.experts[k])
            for place, j in enumerate(slots)
            for k in slots[place + 1 :]
        }
        alike = torch.zeros_like(self.alike)
        for (j, k), cosine in pairs.items():
            if cosine >= rules.merge_cosine:
                alike[j, k] = self.alike[j, k] + 1
        after = replace(self, alike=alike)
        for j, k in sorted(pairs, key=lambda pair: -pairs[pair]):
            if alike[j, k] < rules.merge_rounds:
                continue
            weights = self.prior[[j, k]] / self.prior[[j, k]].sum()
            expert, lost = space.merged(self.experts[[j, k]], weights)
            if lost <= rules.merge_loss:
                return after._joined(j, k, expert, weights)
        return after

    def _joined(self, j: int, k: int, expert: Tensor, weights: Tensor) -> Slots:
        experts, routers, prior = self.experts.clone(), self.routers.clone(), self.prior.clone()
        experts[j] = expert
        routers[j] = (weights.unsqueeze(1) * self.routers[[j, k]]).sum(0)
        prior[j] += prior[k]
        gone = torch.zeros_like(self.active)
        gone[k] = True
        after = replace(self, experts=experts, routers=routers, prior=prior)
        return after._freed(gone)._changed(2, 1)

    def with_birth(
        self,
        seed: Tensor | None,
        free: Tensor,
        rejects: float,
        clients: float,
        round: int,
        rules: Rules,
    ) -> Slots:
        """Return the slots after a round in which clients rejected all experts: a free slot gets
        the seed once enough of them did for ``birth_rounds``. The count begins anew then, which
        leaves time for the expert that others have left to become that of those who stay. Its prior
        is the share of the clients that reject, but at most N / (N + 1): an old expert without any
        prior would lose all its clients to a new one that suits few of them.

        Args:
            seed: mean of the own adapters of the clients that won the lottery, ``[P]``; None:
                nobody did.
            free: slots that were free before this round, bool ``[K + 1]``.
            rejects: clients that reject all experts.
            clients: clients that returned.
            round: of the birth.
            rules: ``birth_rounds``, ``birth_share``.
        """
        enough = rejects >= max(1.0, rules.birth_share * clients)
        unserved = torch.where(torch.tensor(enough), self.unserved + 1, 0)
        after = replace(
            self, unserved=unserved, rejecters=torch.tensor(rejects, dtype=torch.float64)
        )
        places = torch.nonzero(free).flatten().tolist()
        if seed is None or not places or int(unserved) < rules.birth_rounds:
            return after
        slot, share = places[0], min(rejects / clients, clients / (clients + 1))
        experts, routers = self.experts.clone(), self.routers.clone()
        active, born, prior = self.active.clone(), self.born.clone(), (1 - share) * self.prior
        experts[slot], routers[slot] = seed, 0.0
        active[slot], born[slot], prior[slot] = True, round, share
        return replace(
            after,
            experts=experts,
            routers=routers,
            active=active,
            born=born,
            prior=prior,
            unserved=torch.tensor(0),
        )._changed(0, 1)

    def _freed(self, gone: Tensor) -> Slots:
        prior = torch.where(gone, 0.0, self.prior)
        total = prior.sum()
        return replace(
            self,
            prior=prior / total if total > 0 else prior,
            active=self.active & ~gone,
            born=torch.where(gone, FREE, self.born),
            starving=torch.where(gone, 0, self.starving),
            alike=torch.where(gone | gone.unsqueeze(1), 0, self.alike),
            experts=torch.where(gone.unsqueeze(1), 0.0, self.experts),
            routers=torch.where(gone.unsqueeze(1), 0.0, self.routers),
        )

    def _changed(self, what: int, count: int) -> Slots:
        changes = self.changes.clone()
        changes[what] += count
        return replace(self, changes=changes)
