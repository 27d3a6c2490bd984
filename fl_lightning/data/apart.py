"""Clients whose examples are on other machines.

``N`` training examples, ``K`` clients, ``n`` examples of one client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.data.holdings import Holdings
from fl_lightning.data.partition import check_owners

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

    Raises:
        InputError: an example has no owner.
    """
    numbers = data.train_owner
    if numbers is None:
        numbers = np.zeros(len(data.train_target), np.int64)
    check_owners(numbers)
    owner = first + numbers * step
    num_clients = max([*counts, *owner.tolist()], default=0) + 1
    own = data.hold_out(Holdings.by_owner(owner, num_clients), seed)
    halves = []
    for id in range(num_clients):
        train, val = own.client(id)
        if not len(train) + len(val):
            train = np.zeros(counts.get(id, (0, 0))[0], np.int64)
        halves.append((train, val))
    return Holdings.of_halves(halves)


def holdings_apart(counts: Counts) -> Holdings:
    """Return holdings of clients whose examples are all elsewhere; example 0 stands for each."""
    sizes = np.array([counts.get(id, (0, 0)) for id in range(max(counts) + 1)], np.int64)
    whole = Holdings.of_sizes(np.zeros(int(sizes.sum()), np.int64), sizes.sum(1))
    return Holdings(whole.index, whole.starts, sizes[:, 1].copy())
