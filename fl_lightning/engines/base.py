"""How a cohort is executed: an engine turns tasks into results; no result depends on which engine
it was."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fl_lightning.aggregation.elsewhere import Received
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.aggregation.masked_round import MaskedRound, add_up_here
from fl_lightning.aggregation.sum_form import SumForm
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.methods import Method
from fl_lightning.metrics import Mean
from fl_lightning.wire import Payload

if TYPE_CHECKING:  # it needs the extra privacy
    from fl_lightning.privacy.secure.simulation import Outcome

Units = list[list[int]]
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ClientTask:
    """What one client of the cohort is to do in one round.

    Args:
        client: who does it.
        round: the number of the round, counted from 1.
        message: the broadcast as bytes; in a worker a view of its parent's.
        labels: int64 ``[n_k]``, the labels it trains on.
        epochs, steps: at most so many passes over its data and optimiser steps.
        returns: whether its upload reaches the server.
    """

    client: Client
    round: int
    message: bytes | memoryview
    labels: Tensor
    epochs: int
    steps: int
    returns: bool = True

    def payload(self) -> Payload:
        """Return the message in tensors of its own, which a reader may keep or change.

        Its checksum is skipped: the message has not left this machine's memory.
        """
        return Payload.from_bytes(self.message, verified=True)


@dataclass(frozen=True, slots=True)
class ClientResult:
    """What one client's work gave.

    Args:
        upload: the upload as bytes.
        state: what the client keeps until it is next sampled.
        losses: the mean of each loss term over the examples that it was taken of, an example once
            per epoch; diagnostics of the simulation, not on the wire.
        steps: optimiser steps.
        verified: the same bytes if they have not left this machine's memory, so that their checksum
            can be skipped; else None.
        status: what is known of a client whose upload is not here: ``dropped``, where its machine
            did not answer in time; ``trained`` or ``rejected``, where it keeps its upload, to send
            it under masks, and that passed its own checks or not. Empty: the upload is here.
        download: bytes that it was sent; None: the task's whole message.
        received: what became of the upload in the process that trained the client, where that has
            added it up; ``upload`` is empty then. None: it is here.
    """

    client: Client
    upload: bytes
    state: dict[str, Tensor]
    losses: dict[str, Mean]
    steps: int
    verified: bytes | None = None
    status: Literal["", "dropped", "trained", "rejected"] = ""
    download: int | None = None
    received: Received | None = None


class ClientSums(NamedTuple):
    """What clients on other machines measured of their models: by batch and metric, as
    :mod:`fl_lightning.evaluation` adds it up.

    Args:
        test: sum and weight on the test examples that are dealt to each client; None: they are
            measured here.
        validation: sum and weight on the clients' validation examples; None: they are measured
            here.
        named: states of the metrics that the user has named, on the test examples.
        test_logs, val_logs: states of what the steps of a LightningModule have logged.
    """

    test: Mapping[str, Tensor] | None = None
    validation: Mapping[str, Tensor] | None = None
    named: Mapping[str, Tensor] = NO_TENSORS
    test_logs: Mapping[str, Tensor] = NO_TENSORS
    val_logs: Mapping[str, Tensor] = NO_TENSORS


class Engine(ABC):
    """What executes a cohort.

    :meth:`start` comes before the first :meth:`train` and :meth:`close` after the last; most
    engines need neither.
    """

    name = ""

    def start(self) -> None:  # noqa: B027
        """Get ready."""

    def units(self, tasks: Sequence[ClientTask]) -> Units:
        """Return positions of the tasks that are done together: cut before they are dealt, so that
        who does what changes no result."""
        return [[position] for position in range(len(tasks))]

    @abstractmethod
    def train(
        self, tasks: Sequence[ClientTask], units: Units | None = None
    ) -> Iterator[ClientResult]:
        """Yield one result for each task, in the order of the tasks.

        Args:
            units: what :meth:`units` gives for these tasks, where it is known already.
        """

    def train_own(
        self, tasks: Sequence[ClientTask], units: Units | None = None, into: Uploads | None = None
    ) -> Iterator[tuple[int, ClientResult]]:
        """Yield position and result of each task that this process is responsible for: with one
        process of all.

        Args:
            units: as :meth:`train` takes them.
            into: what uploads are given to; if it says so, other processes add up what they have
                trained: it gets their sums, and of an upload comes back what became of it. None:
                all come back.
        """
        yield from enumerate(self.train(tasks, units))

    def add_under_masks(self, asked: MaskedRound) -> tuple[SumForm, Outcome]:
        """Have the clients that were just trained add up their uploads under masks.

        Returns:
            The form of all clients' vectors, and what came of the round.
        """
        return add_up_here(asked)

    def evaluate_clients(self, round: int) -> ClientSums:
        """Have clients whose states or validation examples are on other machines measure their
        models after a round; by default there are none."""
        return ClientSums()

    def acknowledge(self, round: int, clients: Sequence[int]) -> None:  # noqa: B027
        """Learn whose uploads of a round counted, by id: what the others kept of it does not."""

    def notes(self) -> dict[str, Any]:
        """Return entries of ``metadata.json`` about where clients are trained, as they are now."""
        return {}

    def rest(self) -> None:  # noqa: B027
        """Learn that no more clients are to be trained, before the run is finished."""

    def close(self) -> None:  # noqa: B027
        """Release what :meth:`start` took; it can be called twice."""


class LossSums:
    """The sum over examples of each loss term that training steps return. It stays on the device
    until :meth:`means`."""

    def __init__(self) -> None:
        self.sums, self.seen = dict[str, Tensor](), dict[str, int]()

    def add(self, outputs: Mapping[str, Tensor], size: int) -> None:
        for name, value in outputs.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach().double() * size
            self.seen[name] = self.seen.get(name, 0) + size

    def means(self) -> dict[str, Mean]:
        """Return each term's mean so far; waits for the device once."""
        totals = torch.stack(list(self.sums.values())).tolist() if self.sums else []
        return {n: Mean(t, self.seen[n]) for n, t in zip(self.sums, totals, strict=True)}


def start_client(method: Method, task: ClientTask) -> None:
    """Make the resident module what this client starts its round from, in training mode."""
    method.round = task.round
    method.unsent.restore()
    method.start_client(task.payload(), task.client, task.labels)
    method.train()


def local_batches(method: Method, data: FederatedData, task: ClientTask) -> Iterator[Any]:
    """Yield the batches of a task, as the method wants them."""
    batches = method.local_batches(
        data, task.client, epochs=task.epochs, labels=task.labels, steps=task.steps
    )
    return iter(batches)


def size_of(batch: Any) -> int:
    """Examples in a batch: the length of its first tensor."""
    return len(tree_leaves(batch)[0])


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Compute on one thread within the block, on a CPU.

    Sums over other numbers of threads are rounded off differently, so every client trains on one,
    whoever trains it.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" and before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
