"""Clients whose examples are on other machines.

``N`` training examples, ``K`` clients, ``n`` examples of one client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.data.holdings import Holdings

if TYPE_CHECKING:
    from fl_lightning.data.base import FederatedData

Counts = Mapping[int, tuple[int, int]]
"""Numbers of training and of validation examples, by client."""


def own_holdings(data: FederatedData, counts: Counts, first: int, step: int, seed: int) -> Holdings:
    """Return the holdings of a node's own clients among those of all; the others' examples are not
    here, and example 0 stands for each of them.

    Args:
        counts: of all clients of the federation; empty before they are known.
        first, step: of the data's clients, the first has the id ``first``, and the others follow in
            steps of ``step``. Data that say nothing of clients are those of one.
        seed: seed of the run, from which validation examples are drawn, by client.
    """
    owner = first + _owner(data) * step
    num_clients = max([*counts, *owner.tolist()], default=0) + 1
    holdings, marked = Holdings.by_owner(owner, num_clients), data.train_held_out
    own = (
        holdings.hold_out(data.val_fraction, seed)
        if marked is None
        else holdings.hold_out_marked(marked)
    )
    parts, held_out = [], own.held_out.copy()
    for id in range(num_clients):
        train, val = own.client(id)
        if not len(train) + len(val):
            train = np.zeros(counts.get(id, (0, 0))[0], np.int64)
        parts.append(np.concatenate([val, train]))
    found = Holdings.of(parts)
    return Holdings(found.index, found.starts, held_out)


def holdings_apart(counts: Counts) -> Holdings:
    """Return holdings of clients whose examples are all elsewhere; example 0 stands for each."""
    sizes = np.array([counts.get(id, (0, 0)) for id in range(max(counts) + 1)], np.int64)
    whole = Holdings.of_sizes(np.zeros(int(sizes.sum()), np.int64), sizes.sum(1))
    return Holdings(whole.index, whole.starts, sizes[:, 1].copy())


def _owner(data: FederatedData) -> np.ndarray:
    owner = data.train_owner
    return np.zeros(len(data.train_target), np.int64) if owner is None else owner
