"""How a cohort is executed. An engine turns orders into results and never changes what they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.methods import Method
from fl_lightning.wire import Payload

Units = list[list[int]]


@dataclass(frozen=True, slots=True)
class Order:
    """What one client of the cohort is to do.

    Args:
        message: the broadcast as bytes.
        labels: int64 ``[n_k]``, the labels it trains on.
        epochs, steps: at most so many passes over its data and optimiser steps.
    """

    client: Client
    message: bytes
    labels: Tensor
    epochs: int
    steps: int

    def received(self) -> Payload:
        """The message in tensors of their own, which a reader may keep or change. It has not left this
        machine's memory and is not checked."""
        return Payload.from_bytes(self.message, verified=True)


@dataclass(frozen=True, slots=True)
class ClientResult:
    """What one client's work gave.

    Args:
        upload: the upload as bytes.
        state: what the client keeps until it is next sampled.
        losses: sums over the examples that a term was taken of, by term; diagnostics of the simulation, not
            on the wire.
        seen: the number of those examples, by term; an example counts once per epoch.
        steps: optimiser steps.
        intact: the upload as it was made, if it has not left this machine's memory since: nobody need look at
            the checksum of that very object.
    """

    client: Client
    upload: bytes
    state: dict[str, Tensor]
    losses: dict[str, float]
    seen: dict[str, int]
    steps: int
    intact: bytes | None = None


class Engine(ABC):
    """:meth:`start` before the first :meth:`train`, :meth:`close` after the last; most engines need
    neither."""

    name = ""

    def start(self) -> None:  # noqa: B027
        """Get ready."""

    def units(self, orders: Sequence[Order]) -> Units:
        """Positions of the orders that are done together: cut before they are dealt, so that who does what
        changes no result."""
        return [[position] for position in range(len(orders))]

    @abstractmethod
    def train(self, orders: Sequence[Order], units: Units | None = None) -> Iterator[ClientResult]:
        """One result for each order, in the order of the orders; ``units`` of these orders, where they are
        known already."""

    def close(self) -> None:  # noqa: B027
        """Let go of what :meth:`start` took; can be called twice."""


class Losses:
    """Sums over examples of each loss term that training steps return. Stays on the device until
    :meth:`totals`."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.seen: dict[str, int] = {}

    def add(self, outputs: Mapping[str, Tensor], size: int) -> None:
        for name, value in outputs.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach().double() * size
            self.seen[name] = self.seen.get(name, 0) + size

    def totals(self) -> dict[str, float]:
        return (
            dict(zip(self.sums, torch.stack(list(self.sums.values())).tolist(), strict=True))
            if self.sums
            else {}
        )


def local_batches(method: Method, data: FederatedData, order: Order) -> Iterator[Any]:
    """The batches of an order, as the method wants them."""
    return iter(
        method.local_batches(data, order.client, epochs=order.epochs, labels=order.labels, steps=order.steps)
    )


def size_of(batch: Any) -> int:
    """Examples in a batch: the length of its first tensor."""
    return len(tree_leaves(batch)[0])


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU a client trains on one thread, whoever trains it: sums over other numbers of threads are
    rounded differently."""
    before = torch.get_num_threads()
    if device.type == "cpu" and before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
