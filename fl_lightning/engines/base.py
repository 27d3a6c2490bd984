"""How a cohort is executed. An engine turns orders into results and never changes what they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fl_lightning.client import Client


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


@dataclass(frozen=True, slots=True)
class ClientResult:
    """What one client's work gave.

    Args:
        upload: the upload as bytes.
        state: what the client keeps until it is next sampled.
        losses: sums over the examples it saw, by term; diagnostics of the simulation, not on the wire.
        seen: examples seen, an example counting once per epoch.
    """

    client: Client
    upload: bytes
    state: dict[str, Tensor]
    losses: dict[str, float]
    seen: int
    steps: int


class Engine(Protocol):
    def train(self, orders: Sequence[Order]) -> Iterator[ClientResult]:
        """One result for each order, in the order of the orders."""
