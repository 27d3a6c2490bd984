"""The logits of a teacher that does not change while a client trains, computed before the steps that need
them.

Where every epoch shows the same inputs (no augmentation), an example's logits are computed in the first epoch
and looked up in the others: at E epochs the teacher costs 1/E. On a GPU it sees many batches at once, since a
pass over 64 small images takes there about as long as one over 512. In evaluation mode an example's logits do
not depend on its batch, but for the rounding of float32 (``TOLERANCE``).

On CUDA the teacher has a stream :class:`Beside` the student's: it is at the next batches, or at this step's,
while the student trains.

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
    """Whether logits beforehand are cheaper than logits within the steps."""
    return device.type != "cpu" or (epochs > 1 and not augmented)


def has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


class Beside:
    """A stream beside the current one, for work whose result is wanted later; on a CPU it is done in turn.

    Also within the capture of a CUDA graph. One for each copy of a module: on one stream, the teachers of
    several would wait for each other, and recordings of several write to one workspace.

    torch's allocator gives a freed block at once to the next one who asks on its stream, though the other
    stream may still read it. Here it may not: memory is asked for on this stream only within :meth:`fork`,
    which waits for all that the other was asked before, the readers of freed blocks among it; and what this
    stream reads of the other's is let go of only after the join.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None

    def __deepcopy__(self, memo: object) -> Beside:
        return Beside()

    @contextmanager
    def fork(self, device: torch.device) -> Iterator[Callable[[], None]]:
        """Within the block work is queued here. What it yields is to be called before the results are
        used."""
        if not has_streams(device):
            yield lambda: None
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        done = torch.cuda.Event()
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            yield lambda: torch.cuda.current_stream(device).wait_event(done)
            done.record()


def taught(
    teacher: nn.Module, batches: Iterable[tuple[Any, Tensor]], labels: Tensor, *, repeats: bool, ahead: int,
    beside: Beside | None = None,
) -> Iterator[tuple[Any, Tensor, Tensor]]:  # fmt: skip
    """Inputs, target int64 ``[B]`` and the teacher's logits ``[B, C]``.

    Args:
        batches: inputs and the positions int64 ``[B]`` of the examples in ``labels``; the first epoch has
            every one of them.
        labels: int64 ``[n]``.
        repeats: whether an example looks the same whenever it comes.
        ahead: batches that the teacher sees at once.
        beside: the teacher's stream.
    """
    answers = _answers(teacher, batches, labels, repeats, ahead, beside or Beside())
    for group, logits, join in _one_early(answers) if has_streams(labels.device) else answers:
        join()
        for (inputs, where), z in zip(group, logits.split([len(where) for _, where in group]), strict=True):
            yield inputs, labels[where], z


def _answers(
    teacher: nn.Module,
    batches: Iterable[tuple[Any, Tensor]],
    labels: Tensor,
    repeats: bool,
    ahead: int,
    beside: Beside,
) -> Iterator[tuple[Sequence[tuple[Any, Tensor]], Tensor, Callable[[], None]]]:
    """Batches, the logits of all of them, and what waits for these."""
    batches, seen = iter(batches), 0
    known: Tensor | None = None
    while group := list(islice(batches, ahead)):
        with torch.no_grad(), beside.fork(labels.device) as join:
            position = torch.cat([where for _, where in group])
            if known is None or not repeats or seen < len(labels):
                logits = teacher(
                    tree_map(lambda *leaves: torch.cat(leaves), *(inputs for inputs, _ in group))
                )
                if repeats:
                    known = logits.new_zeros(len(labels), logits.shape[1]) if known is None else known
                    known[position] = logits
            else:
                logits = known[position]
        seen += len(position)
        yield group, logits, join


def _one_early(items: Iterable[T]) -> Iterator[T]:
    """The same, each asked for before the one before it is used."""
    items = iter(items)
    held = list(islice(items, 1))
    for item in items:
        yield held.pop()
        held.append(item)
    yield from held
