"""Several states of a method's server, side by side.

``method.server`` holds the state of the mean model under the usual names, and that of node 7 under
``peer/7/weights`` and the like: so checkpoints, hashes and ranks have all of them, and what
evaluates or exports a run finds the mean model where it looks for the one model of a star.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from fl_lightning.aggregation.server import SummingServer, set_next_state
from fl_lightning.wire import LedgerEntry

State = Mapping[str, Tensor]
PUBLIC = "public"
"""The entry of a node's state that holds the weights which others know of it, ``[P]``, where its
uploads are read with these."""


class Nodes:
    """The states of all nodes.

    Args:
        method: whose server's half the nodes run, after ``build``.
        ids: of the nodes, in order.
        kind: what they are called, such as ``peer``.
        extra: further entries that every node begins with, which the method does not know, by name.
    """

    def __init__(
        self, method: SummingServer, ids: Sequence[int], kind: str, extra: State | None = None
    ) -> None:
        self.method, self.ids, self.kind = method, list(ids), kind
        self.names, self.extra = [*method.server], [*(extra or {})]
        everything = {**method.server, **(extra or {})}
        method.server = dict(method.server) | {
            self._key(id, name): tensor for id in self.ids for name, tensor in everything.items()
        }

    def _key(self, id: int, name: str) -> str:
        return f"{self.kind}/{id}/{name}"

    def of(self, id: int) -> dict[str, Tensor]:
        """Return the state of a node, without ``extra``."""
        return {name: self.method.server[self._key(id, name)] for name in self.names}

    def get(self, id: int, name: str) -> Tensor:
        """Return one entry of a node."""
        return self.method.server[self._key(id, name)]

    def mean(self) -> dict[str, Tensor]:
        """Return the state of the mean model."""
        return {name: self.method.server[name] for name in self.names}

    @contextmanager
    def at(self, state: State) -> Iterator[None]:
        """Let the method's server have this state within the block, whatever becomes of it
        there."""
        before = self.method.server
        self.method.server = dict(state)
        try:
            yield
        finally:
            self.method.server = before

    def next(
        self, state: State, round: int, entries: Sequence[LedgerEntry], make: Callable[[], None]
    ) -> tuple[dict[str, Tensor], bool]:
        """Return what the method makes of a node's state in a round, and whether it did: the state
        stays where the next one would not be finite."""
        with self.at(state):
            made = set_next_state(self.method, round, entries, make)
            return {name: self.method.server[name] for name in self.names}, made

    def put(self, mean: State, states: Mapping[int, State]) -> None:
        """Replace the state of the mean model, and entries of some nodes."""
        changed = {
            self._key(id, name): t for id, state in states.items() for name, t in state.items()
        }
        self.method.server = {**self.method.server, **mean, **changed}

    def distance(self) -> float:
        """Return the mean over nodes of ||x_i - x||^2, x the mean model: their distance from
        consensus."""
        parameters = slice(self.method.trained_values)
        centre = self.method.server["weights"][parameters].double()
        square = partial(_square, centre)
        return sum(square(self.get(id, "weights")[parameters]) for id in self.ids) / len(self.ids)


def _square(centre: Tensor, weights: Tensor) -> float:
    return float((weights.double() - centre).square().sum())


def mean_of(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean in float64, added up in this order, of the type of the tensors;
    integers are rounded. The mean of equal tensors is that tensor, bit for bit."""
    if all(tensor is tensors[0] for tensor in tensors):
        return tensors[0]
    first, total = tensors[0], torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        total += tensor.double() * weight
    total /= sum(weights)
    return (total if first.is_floating_point() else total.round()).to(first.dtype)
