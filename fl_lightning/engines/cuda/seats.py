"""Several clients at once on one device, each on a *seat*: a copy of the method's module, with steps and a
stream of its own.

A client is begun: all its steps are asked for, and nothing is waited for. It is ended, its upload read and
encoded, when its seat is needed again or its result is next. So as many clients as there are seats are on the
device, while the host encodes what is ready.

As with the forks of :mod:`~fl_lightning.engines.pool`, the client's half of a method sees of the server's the
message and ``round``, and clients of a cohort are different ones. Beyond that it must bear ``deepcopy``: a
hook that a method hangs on a module may not hold on to the method through a closure, which all copies share.
Each seat records its steps for itself: graphs that may play at the same time share nothing.

No card was at hand to see it: the tests have streams in name only, and watch who reads and writes what on
which of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Protocol

import torch
from lightning.fabric import Fabric

from fl_lightning.data import FederatedData
from fl_lightning.engines.base import ClientResult, ClientTask, Engine, Units, one_thread
from fl_lightning.engines.cuda.graphs import make_steps
from fl_lightning.engines.sequential import RunningClient, SequentialEngine
from fl_lightning.engines.steps import Steps
from fl_lightning.methods import Method


class Stream(Protocol):
    """Where a device queues work."""

    def current(self) -> AbstractContextManager[None]:
        """Within the block work is queued here, after all that was queued before the block where it was
        then."""

    def synchronize(self) -> None:
        """Wait until all of it is done."""


class CudaStream:
    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def synchronize(self) -> None:
        self.stream.synchronize()


class AtOnce:
    """A CPU does what it is asked for before it answers."""

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None: ...


def make_stream(device: torch.device) -> Stream:
    return CudaStream(device) if device.type == "cuda" else AtOnce()


class Seat:
    """One client at a time.

    torch's allocator gives a freed block at once to the next one who asks on the stream that it was asked for
    on, whoever else may still have to read it. Here that is safe: what a seat makes is read on its own
    stream, or after :meth:`end`, which has waited for it. What it reads of others (labels, what the client
    kept) is held until then. The data module's tensors outlive all seats.
    """

    def __init__(self, engine: SequentialEngine, stream: Stream) -> None:
        self.engine, self.stream = engine, stream
        self.begun: RunningClient | None = None
        self.held: list[Any] = []

    def begin(self, task: ClientTask) -> None:
        self.held = [task, *task.client.state.values()]
        with one_thread(self.engine.fabric.device), self.stream.current():
            self.begun = self.engine.begin(task)

    def end(self) -> ClientResult:
        assert self.begun is not None
        with one_thread(self.engine.fabric.device), self.stream.current():
            result = self.engine.end(self.begun)
        self.stream.synchronize()
        self.begun, self.held = None, []
        return result


class SeatsEngine(Engine):
    """Trains several clients at once on one device, each on a seat of its own.

    Args:
        seats: how many clients are on the device at once.
        make_steps: what takes the steps of a seat's clients, for its copy of the module.
    """

    name = "sequential"  # and so are its results, bit for bit

    def __init__(
        self,
        fabric: Fabric,
        method: Method,
        data: FederatedData,
        seats: int,
        *,
        make_steps: Callable[[Fabric, Method], Steps] = make_steps,
        make_stream: Callable[[torch.device], Stream] = make_stream,
    ) -> None:
        self.fabric, self.method, self.data, self.size = fabric, method, data, seats
        self.make_steps, self.make_stream = make_steps, make_stream
        self.seats: list[Seat] = []

    def start(self) -> None:
        if len(self.data.public):
            _ = (
                self.data.public_index
            )  # moved once, by who asks first: not by a seat, whose stream the others do not wait for
        self.seats = [self._seat() for _ in range(self.size)]

    def _seat(self) -> Seat:
        stream = self.make_stream(self.fabric.device)
        shared = {id(it): it for it in (self.data, *self.method.server.values())}
        with stream.current():
            method = deepcopy(self.method, shared)
        stream.synchronize()
        return Seat(
            SequentialEngine(self.fabric, method, self.data, self.make_steps(self.fabric, method)), stream
        )

    def train(self, tasks: Sequence[ClientTask], units: Units | None = None) -> Iterator[ClientResult]:
        if not self.seats:  # closed by an error
            self.start()
        try:
            for at, task in enumerate(tasks):
                seat = self.seats[at % self.size]
                result = seat.end() if seat.begun else None
                seat.begin(task)
                if result:  # not before: who asks for results may take long with each
                    yield result
            for at in range(max(0, len(tasks) - self.size), len(tasks)):
                yield self.seats[at % self.size].end()
        finally:
            if any(seat.held for seat in self.seats):  # someone raised: what they are at is of no use
                self.close()

    def close(self) -> None:
        for seat in self.seats:
            seat.stream.synchronize()
        self.seats = []
