"""The order in which clients see their examples in a round, and the sizes of their batches.

``n`` examples of a client, ``S`` examples of its round, ``B`` batch, ``K`` clients, ``D``
augmentation numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fl_lightning.rng import stream

Draws = Callable[[np.random.Generator, int, int], "np.ndarray | None"]


def batch_sizes(n: int, batch_size: int) -> list[int]:
    """Return the sizes of the batches of one epoch over ``n`` examples.

    BatchNorm cannot normalise one value, so no batch has a single example: a single last example
    joins the batch before it, and the only example of a client is taken twice. With a batch size of
    1 all batches have one example.

    >>> batch_sizes(9, 4), batch_sizes(10, 4), batch_sizes(1, 4), batch_sizes(0, 4)
    ([4, 5], [4, 4, 2], [2], [])
    """
    sizes = [batch_size] * (n // batch_size) + ([n % batch_size] if n % batch_size else [])
    if batch_size > 1 and sizes and sizes[-1] == 1:
        sizes[-2:] = [sum(sizes[-2:])] if len(sizes) > 1 else [2]
    return sizes


@dataclass(frozen=True, slots=True)
class Pass:
    """A client's examples in the order of its round.

    Args:
        position: positions in ``client.train``, int64 ``[S]``.
        sizes: sizes of the batches; they add up to S.
        draws: augmentation of each example, int64 ``[S, D]``; None: no augmentation.
    """

    position: np.ndarray
    sizes: list[int]
    draws: np.ndarray | None


def draw_pass(
    n: int,
    batch_size: int,
    *,
    seed: int,
    round: int,
    client: int,
    epochs: int,
    steps: int | None,
    draws: Draws | None,
) -> Pass:
    """Draw the order and augmentation of a client's examples in one round.

    They are a function of (seed, round, client) alone. The order is a new one in every epoch, and
    the first epochs do not depend on the number of epochs.

    Args:
        n: number of the client's examples.
        batch_size: examples of a batch.
        seed: seed of the run.
        round: number of the round.
        client: id of the client.
        epochs: number of epochs.
        steps: largest number of batches; None: all.
        draws: draws the augmentation, given a generator, ``epochs`` and ``n``; None: no
            augmentation.
    """
    sizes = (batch_sizes(n, batch_size) * epochs)[:steps]
    rng = stream(seed, "batches", round, client)
    position = np.concatenate([np.empty(0, np.int64), *(rng.permutation(n) for _ in range(epochs))])
    twice = n == 1 and batch_size > 1
    position = (position.repeat(2) if twice else position)[: sum(sizes)]
    drawn = draws(stream(seed, "augment", round, client), epochs, n) if draws else None
    if drawn is not None:
        epoch = np.arange(epochs).repeat(2 * n if twice else n)[: sum(sizes)]
        drawn = drawn[epoch, position]
    return Pass(position, sizes, drawn)
