"""The logits of a teacher that does not change while a client trains, computed before the steps
that need them.

Where every epoch shows the same inputs (no augmentation), an example's logits are computed in the
first epoch and looked up in the others: at E epochs the teacher costs 1/E. On a GPU it sees many
batches at once, since a pass over 64 small images takes there about as long as one over 512. In
evaluation mode an example's logits do not depend on its batch, but for the rounding of float32,
within 1e-4 of the batch's largest logit.

``B`` batch, ``C`` classes, ``n`` examples of the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

AHEAD = 8
"""Batches that a teacher on a GPU sees at once; on a CPU one, which stays in its cache."""


def pays(device: torch.device, epochs: int, augmented: bool) -> bool:
    """Return whether logits beforehand are cheaper than logits within the steps."""
    return device.type != "cpu" or (epochs > 1 and not augmented)


def with_logits(
    teacher: nn.Module,
    batches: Iterable[tuple[Any, Tensor]],
    labels: Tensor,
    *,
    repeats: bool,
    ahead: int,
) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield inputs, target int64 ``[B]`` and the teacher's logits ``[B, C]``.

    Args:
        batches: inputs and the positions int64 ``[B]`` of the examples in ``labels``; the first
            epoch has every one of them.
        labels: int64 ``[n]``.
        repeats: whether an example looks the same whenever it comes.
        ahead: batches that the teacher sees at once.
    """
    batches, seen = iter(batches), 0
    known: Tensor | None = None
    while group := list(islice(batches, ahead)):
        position = torch.cat([where for _, where in group])
        if known is None or not repeats or seen < len(labels):
            with torch.no_grad():
                logits = teacher(
                    tree_map(lambda *leaves: torch.cat(leaves), *(inputs for inputs, _ in group))
                )
            if repeats and logits.ndim == 2:  # of sequences each batch has a length of its own
                known = logits.new_zeros(len(labels), logits.shape[1]) if known is None else known
                known[position] = logits
        else:
            logits = known[position]
        seen += len(position)
        for (inputs, where), z in zip(
            group, logits.split([len(where) for _, where in group]), strict=True
        ):
            yield inputs, labels[where], z
