"""The batches of many clients, step by step, gathered in one operation for each step.

``n`` examples of one client, ``K`` clients, ``B`` batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fl_lightning.client import Client
from fl_lightning.config.overriding import overrides
from fl_lightning.data.batches import Pass
from fl_lightning.data.example_batches import ExampleBatches


def can_stack(data: ExampleBatches, clients: Sequence[Client], labels: Sequence[Tensor]) -> bool:
    """Return whether :func:`stacked_batches` yields the same batches as ``data.train_batches``."""
    examplewise = vars(type(data)).get("examplewise", False)
    own = not overrides(data, ExampleBatches, "train_batches")
    whole = all(
        len(given) == len(client.train) for given, client in zip(labels, clients, strict=True)
    )
    return (
        examplewise
        and own
        and whole
        and len({(given.dtype, given.shape[1:]) for given in labels}) == 1
    )


def stacked_batches(
    data: ExampleBatches,
    clients: Sequence[Client],
    *,
    round: int,
    epochs: Sequence[int],
    labels: Sequence[Tensor],
    steps: Sequence[int],
) -> Iterator[list[tuple[list[int], tuple[Any, Tensor]]]]:
    """Yield the batches of many clients step by step, if :func:`can_stack` allows it: those of
    ``data.train_batches``.

    Args:
        data: whose clients they are.
        clients: the clients.
        round: number of the round.
        epochs: number of epochs of each client.
        labels: labels of each client, int64 ``[n]``.
        steps: largest number of batches of each client.

    Yields:
        For each step, groups of clients whose batches have the same size. A group holds the
        positions of its clients in ``clients``, and inputs and targets ``[K, B, ...]`` in the same
        order.
    """
    draws_of = data.draws if data.augments else None
    passes = [
        data.pass_of(*one, round, draws_of) for one in zip(clients, epochs, steps, strict=True)
    ]
    index = data.to_device(
        np.concatenate([c.train[one.position] for c, one in zip(clients, passes, strict=True)])
    )
    first = np.cumsum([0, *map(len, labels)])
    position = np.concatenate(
        [begin + one.position for begin, one in zip(first, passes, strict=False)]
    )
    target = torch.cat(list(labels))[data.to_device(position)]
    drawn = [one.draws for one in passes if one.draws is not None]
    draws = data.to_device(np.concatenate(drawn)) if drawn else None
    for groups in side_by_side(passes):
        step = []
        for where, place in groups:
            place_KB = data.to_device(place)
            flat = place_KB.reshape(-1)
            inputs = data.inputs("train", index[flat], None if draws is None else draws[flat])
            inputs = data.with_labels(inputs, target[flat])
            stacked = tree_map(lambda leaf, shape=place.shape: leaf.unflatten(0, shape), inputs)
            step.append((where, (stacked, target[place_KB])))
        yield step


def side_by_side(passes: Sequence[Pass]) -> Iterator[list[tuple[list[int], np.ndarray]]]:
    """Yield for each step the clients that still have a batch, in groups of equal batch size.

    A group holds the positions of its clients in ``passes``, and the positions of their examples in
    the concatenation of all passes, int64 ``[K, B]``.
    """
    start = np.concatenate([[0], np.cumsum([len(one.position) for one in passes])])[:-1]
    for step in range(max((len(one.sizes) for one in passes), default=0)):
        groups: dict[int, list[int]] = defaultdict(list)
        for at, one in enumerate(passes):
            if step < len(one.sizes):
                groups[one.sizes[step]].append(at)
        yield [(where, start[where][:, None] + np.arange(size)) for size, where in groups.items()]
        for size, where in groups.items():
            start[where] += size
