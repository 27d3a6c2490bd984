"""What turns a function on tensors that stay where they are into something that can be played again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim import SGD, Optimizer

WARM_UPS = 3
"""Runs before a capture, on a stream of their own: libraries choose and allocate in them, which a capture
must not see."""


class Recorder(Protocol):
    """Records work that reads and writes tensors in place, and nothing else."""

    def refuses(self, optimizer: Optimizer) -> str:
        """Return why the steps of this optimiser cannot be recorded; empty when they can. It may set what
        recording needs on it."""

    def record(self, work: Callable[[], None], pool: Any = None) -> tuple[Callable[[], None], Any]:
        """Return what does ``work`` again when called, and the memory pool that it uses. ``work`` may be run
        on the way, any number of times.

        Args:
            pool: of an earlier recording that is still there and never plays at the same time.
        """

    def forget(self) -> None:
        """None of its recordings will be played again."""


class CudaGraphs:
    """``torch.cuda.CUDAGraph``: all kernels of ``work`` with one launch.

    Untested on a card so far; whoever uses it compares the first replay with the work itself
    (:mod:`fl_lightning.engines.cuda.graphs`).

    A graph's matrix products write to cuBLAS's workspace of the stream that captured them. So graphs that may
    play at the same time need recorders of their own, each with a stream, where torch's default is one for
    all. And a graph that dies frees that workspace under the others of its stream (pytorch issue 193402): the
    graphs of a recorder live until all of them are forgotten.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side: torch.cuda.Stream | None = None
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def refuses(self, optimizer: Optimizer) -> str:
        for group in optimizer.param_groups:
            if isinstance(optimizer, SGD):
                continue
            if not group.get(
                "fused"
            ):  # the others count their steps on the host, or round differently once they do not
                return f"{type(optimizer).__name__} that is not fused"
            group["capturable"] = (
                True  # a fused one has everything on the device in any case: this changes no result
            )
        optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]  # its eager steps are meant
        return ""

    def record(self, work: Callable[[], None], pool: Any = None) -> tuple[Callable[[], None], Any]:
        """Warm up on a side stream, then capture once, as PyTorch's notes on CUDA graphs demand."""
        self.side = self.side or torch.cuda.Stream(self.device)
        current, side = torch.cuda.current_stream(self.device), self.side
        torch.cuda.synchronize(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side), no_synchronisation():
            for _ in range(WARM_UPS):
                work()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            work()
        self.graphs.append(graph)
        return graph.replay, graph.pool()

    def forget(self) -> None:
        for graph in self.graphs:
            graph.reset()  # now, and not when the last one who knows it lets go
        self.graphs.clear()


class Rerun:
    """Plays by doing the work again: all but the capture itself, for machines without a card."""

    def refuses(self, optimizer: Optimizer) -> str:
        return ""

    def record(self, work: Callable[[], None], pool: Any = None) -> tuple[Callable[[], None], Any]:
        for _ in range(WARM_UPS):
            work()
        return work, pool

    def forget(self) -> None: ...


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Within the block an operation that waits for the device raises. (In a capture it would leave the
    generator and the allocator in a state that PyTorch does not promise to mend.)"""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # is a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
