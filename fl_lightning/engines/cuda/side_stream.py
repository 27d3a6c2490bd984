"""A CUDA stream beside the current one, on which a teacher computes its logits while the student trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch

from fl_lightning.methods.teaching import InTurn

T = TypeVar("T")


class SideStream(InTurn):
    """Queues work on a stream of its own, whose results are wanted later; also within the capture of a CUDA
    graph.

    There is one for each copy of a module: on one stream, the teachers of several would wait for each other,
    and recordings of several would write to one workspace.

    torch's allocator gives a freed block at once to the next one who asks on its stream, though another
    stream may still read it. Here it may not: memory is asked for on this stream only within :meth:`fork`,
    which waits for all that the other stream was asked before, the readers of freed blocks among it; and what
    this stream reads of the other's is held until the join.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None

    def __deepcopy__(self, memo: object) -> SideStream:
        return type(self)()

    @contextmanager
    def fork(self, device: torch.device) -> Iterator[Callable[[], None]]:
        self.stream = self.stream or torch.cuda.Stream(device)
        done = torch.cuda.Event()
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            yield lambda: torch.cuda.current_stream(device).wait_event(done)
            done.record()

    def ahead(self, items: Iterable[T]) -> Iterator[T]:
        items = iter(items)
        held = list(islice(items, 1))
        for item in items:
            yield held.pop()
            held.append(item)
        yield from held
