"""Batches that are bounded by their number of tokens, padding included.

A batch of ``b`` sequences is as wide as its longest, so it has ``b`` times that many tokens. How
many batches an epoch has, and of which sizes, follows from the lengths alone: steps are counted
before an order is drawn.

``n`` sequences of a client, ``S`` sequences of its round.
"""

from __future__ import annotations

import numpy as np

from fl_lightning.data.batches import Pass
from fl_lightning.rng import stream


def token_batch_sizes(length: np.ndarray, batch_size: int, batch_tokens: int) -> list[int]:
    """Return the sizes of the batches of one epoch, the largest first.

    The sequences are packed in the order of their lengths, the shortest first, each into the last
    batch while that stays within both bounds.

    Args:
        length: tokens of each sequence, int64 ``[n]``, each at most ``batch_tokens``.
        batch_size: largest number of sequences of a batch.
        batch_tokens: largest number of tokens of a batch.

    >>> token_batch_sizes(np.array([10, 2, 3, 3, 2]), 4, 12), token_batch_sizes(np.array([5, 5]), 1, 12)
    ([4, 1], [1, 1])
    """
    sizes: list[int] = []
    for tokens in np.sort(length).tolist():
        if sizes and sizes[-1] < batch_size and (sizes[-1] + 1) * tokens <= batch_tokens:
            sizes[-1] += 1
        else:
            sizes.append(1)
    return sizes  # a batch is never larger than the one before it: its sequences are longer


def draw_token_pass(
    length: np.ndarray,
    batch_size: int,
    batch_tokens: int,
    *,
    seed: int,
    round: int,
    client: int,
    epochs: int,
    steps: int | None,
) -> Pass:
    """Draw the batches of a client in one round, a function of (seed, round, client) alone.

    In every epoch each batch takes, beginning with the largest, the first sequences of a drawn
    order that are short enough for it. Those that are too long for a batch are then left for
    smaller ones, in which they have a place. The order of the batches is drawn too.

    Args:
        length: tokens of each of the client's sequences, int64 ``[n]``.
        batch_size: largest number of sequences of a batch.
        batch_tokens: largest number of tokens of a batch.
        seed, round, client, epochs, steps: as of :func:`~fl_lightning.data.batches.draw_pass`.
    """
    sizes = token_batch_sizes(length, batch_size, batch_tokens)
    rng = stream(seed, "batches", round, client)
    batches: list[np.ndarray] = []
    for _ in range(epochs):
        left, epoch = rng.permutation(len(length)), []
        for size in sizes:
            taken = np.flatnonzero(size * length[left] <= batch_tokens)[:size]
            epoch.append(left[taken])
            left = np.delete(left, taken)
        batches += [epoch[place] for place in rng.permutation(len(sizes))]
    batches = batches[:steps]
    return Pass(
        np.concatenate([np.empty(0, np.int64), *batches]), [len(batch) for batch in batches], None
    )
