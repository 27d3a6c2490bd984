"""Clients whose examples are on other machines, and the form that data have in common wherever they lie.

``N`` training examples, ``K`` clients, ``n`` examples of one client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.data.holdings import Holdings
from fl_lightning.errors import InputError

if TYPE_CHECKING:
    from fl_lightning.data.base import FederatedData

Counts = Mapping[int, tuple[int, int]]
"""Numbers of training and of validation examples, by client."""


@dataclass(frozen=True)
class Form:
    """What the data of one run have in common.

    Args:
        classes: names of the classes 0, 1, ...; empty where there are none, or where numbers name them.
        moments: mean and standard deviation of each channel by which images are normalised, 2 x C; empty
            where inputs are taken as they are.
        columns: of a table, by the name of each column that is learnt from or learnt: the mean and standard
            deviation of numbers, or the categories in order.
    """

    classes: Sequence[Any] = ()
    moments: Sequence[Sequence[float]] = ()
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def numbers(self, names: Iterable[Any], place: str) -> dict[Any, int]:
        """Return the number of each class of the run.

        Args:
            names: classes that data of a node have.

        Raises:
            InputError: the run lacks one of them.
        """
        numbers = {name: number for number, name in enumerate(self.classes)}
        for name in names:
            if name not in numbers:
                some = ", ".join(map(str, self.classes[:10])) + (" ..." if len(self.classes) > 10 else "")
                raise InputError(
                    place, f"its class {name} is none of the run's: {some}", "leave it out, or rename it"
                )
        return numbers


def own_holdings(data: FederatedData, counts: Counts, first: int, step: int, seed: int) -> Holdings:
    """Return the holdings of a node's own clients among those of all; the others' examples are not here, and
    example 0 stands for each of them.

    Args:
        counts: of all clients of the federation; empty before they are known.
        first, step: of the data's clients, the first has the id ``first``, and the others follow in steps of
            ``step``. Data that say nothing of clients are those of one.
        seed: seed of the run, from which validation examples are drawn, by client.
    """
    owner = first + _owner(data) * step
    num_clients = max([*counts, *owner.tolist()], default=0) + 1
    holdings, marked = Holdings.by_owner(owner, num_clients), data.train_held_out
    own = holdings.hold_out(data.val_fraction, seed) if marked is None else holdings.hold_out_marked(marked)
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
