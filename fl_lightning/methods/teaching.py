"""The logits of a teacher that does not change while a client trains, computed before the steps that need
them.

Where every epoch shows the same inputs (no augmentation), an example's logits are computed in the first epoch
and looked up in the others: at E epochs the teacher costs 1/E. On a GPU it sees many batches at once, since a
pass over 64 small images takes there about as long as one over 512. In evaluation mode an example's logits do
not depend on its batch, but for the rounding of float32 (``TOLERANCE``).

``B`` batch, ``C`` classes, ``n`` examples of the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

T = TypeVar("T")
TOLERANCE = 1e-4
"""Relative to the largest logit of the batch."""
AHEAD = 8
"""Batches that a teacher on a GPU sees at once; on a CPU one, which stays in its cache."""


def pays(device: torch.device, epochs: int, augmented: bool) -> bool:
    """Return whether logits beforehand are cheaper than logits within the steps."""
    return device.type != "cpu" or (epochs > 1 and not augmented)


class InTurn:
    """Where a teacher computes its logits: on the current stream, before they are used.

    :class:`fl_lightning.engines.cuda.side_stream.SideStream` puts it beside the student instead.
    """

    @contextmanager
    def fork(self, device: torch.device) -> Iterator[Callable[[], None]]:
        """Queue the teacher's work within the block; call what is yielded before its results are used."""
        yield lambda: None

    def ahead(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the same items; another stream has each asked for before the one before it is used."""
        return iter(items)


def with_logits(
    teacher: nn.Module, batches: Iterable[tuple[Any, Tensor]], labels: Tensor, *, repeats: bool, ahead: int,
    stream: InTurn,
) -> Iterator[tuple[Any, Tensor, Tensor]]:  # fmt: skip
    """Yield inputs, target int64 ``[B]`` and the teacher's logits ``[B, C]``.

    Args:
        batches: inputs and the positions int64 ``[B]`` of the examples in ``labels``; the first epoch has
            every one of them.
        labels: int64 ``[n]``.
        repeats: whether an example looks the same whenever it comes.
        ahead: batches that the teacher sees at once.
        stream: where the teacher computes.
    """
    answers = _answers(teacher, batches, labels, repeats, ahead, stream)
    for group, logits, join in stream.ahead(answers):
        join()
        for (inputs, where), z in zip(group, logits.split([len(where) for _, where in group]), strict=True):
            yield inputs, labels[where], z


def _answers(
    teacher: nn.Module,
    batches: Iterable[tuple[Any, Tensor]],
    labels: Tensor,
    repeats: bool,
    ahead: int,
    stream: InTurn,
) -> Iterator[tuple[Sequence[tuple[Any, Tensor]], Tensor, Callable[[], None]]]:
    """Batches, the logits of all of them, and what waits for these."""
    batches, seen = iter(batches), 0
    known: Tensor | None = None
    while group := list(islice(batches, ahead)):
        with torch.no_grad(), stream.fork(labels.device) as join:
            position = torch.cat([where for _, where in group])
            if known is None or not repeats or seen < len(labels):
                logits = teacher(
                    tree_map(lambda *leaves: torch.cat(leaves), *(inputs for inputs, _ in group))
                )
                if repeats and logits.ndim == 2:  # of sequences each batch has a length of its own
                    known = logits.new_zeros(len(labels), logits.shape[1]) if known is None else known
                    known[position] = logits
            else:
                logits = known[position]
        seen += len(position)
        yield group, logits, join
