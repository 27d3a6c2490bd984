"""Which client each example of the global test set turns up at."""

from __future__ import annotations

import numpy as np
import torch

from fl_lightning.data.arrays import sha256_of
from fl_lightning.data.base import FederatedData, group_by_target
from fl_lightning.data.partition import Natural
from fl_lightning.rng import stream


def deal_test_set(data: FederatedData) -> np.ndarray:
    """Return the client that each test example is dealt to, int64 ``[n]``: the one whose test set
    it is in, where clients have some; with the natural partition the one whose it is, where the
    data say so; else drawn in proportion to the examples of its group (its class, where the data
    have no other) that clients hold, evenly where nobody holds any, or where the data have a
    ``train_group`` of their own and no ``test_group``. It is the same in every round and for every
    method."""
    if data.test_holdings is not None:
        return np.repeat(np.arange(data.num_clients), data.test_holdings.sizes)
    group, held = data.test_group.cpu().numpy(), data.group_counts().astype(np.float64)
    if not _same_groups(data):
        group, held = np.zeros_like(group), np.ones_like(held)
    rng, owner = stream(data.seed, "test_owners"), np.empty(len(group), np.int64)
    for value in np.unique(group):
        share = held[:, value] if held[:, value].any() else np.ones(len(held))
        owner[group == value] = rng.choice(
            len(held), size=int((group == value).sum()), p=share / share.sum()
        )
    its_own = data.test_owner if isinstance(data.partition, Natural) and not data.apart else None
    return owner if its_own is None else np.where(its_own < 0, owner, its_own)


def _same_groups(data: FederatedData) -> bool:
    """Return whether the groups of the test examples are of those of the training examples."""
    kind, base = type(data), FederatedData
    if kind.train_group is base.train_group or kind.test_group is not base.test_group:
        return True
    return torch.equal(data.train_group, group_by_target(data.train_target))


def owners_sha256(data: FederatedData) -> str:
    """Return the SHA-256 of what data say of the client and the group of each test example; empty
    where they say nothing."""
    owner = torch.empty(0) if data.test_owner is None else torch.as_tensor(data.test_owner)
    grouped = data._groups or type(data).test_group is not FederatedData.test_group
    if data.test_owner is None and not grouped:
        return ""
    return sha256_of([owner, *([data.test_group] if grouped else [])])
