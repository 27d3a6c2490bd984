"""A network that measures what its own passes cost, such as their energy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn


class MeasuredNetwork(nn.Module):
    """A network that is told what it is evaluated on, and says afterwards what that has cost."""

    def in_use(self) -> AbstractContextManager[None]:
        """Make the network, within the block, what a device answers with."""
        return nullcontext()

    @property
    def inner(self) -> nn.Module:
        """What computes outputs where nothing is measured, and no budget holds."""
        return self

    @abstractmethod
    def expect(self, target: Tensor) -> None:
        """Begin to measure the passes over a batch.

        Args:
            target: of the batch, ``[B, ...]``.
        """

    @abstractmethod
    def measured(self) -> Mapping[str, Tensor]:
        """Return what the passes since :meth:`expect` have cost: by metric, a value of each example
        ``[B]``.

        A metric's name begins with its family, as in ``energy/joules``.
        """


def without_budget(network: nn.Module) -> nn.Module:
    """Return what computes a network's outputs where nothing is measured, and no budget holds."""
    return network.inner if isinstance(network, MeasuredNetwork) else network
