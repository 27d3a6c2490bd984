"""A client of the federation, and its assignment in one round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Client:
    """One client of the federation with its examples and its state.

    Args:
        id: 0 .. num_clients - 1.
        train: indices of its training examples in the data module's training set, int64 ``[n_k]``;
            may be empty.
        val: indices of its validation examples in the same set, disjoint from ``train``; may be
            empty.
        state: tensors that the method keeps on this client between rounds, of the last round in
            which its upload counted; they are saved in checkpoints and never sent to the server. Of
            several processes, rank 0 and the one that trained the client last have them; elsewhere
            it is empty.
    """

    id: int
    train: np.ndarray
    val: np.ndarray
    state: dict[str, Tensor] = field(default_factory=dict)

    def apart(self) -> Client:
        """Return this client with a copy of its state, for what is measured beside its round."""
        return replace(self, state={name: tensor.clone() for name, tensor in self.state.items()})


@dataclass(frozen=True, slots=True)
class Assignment:
    """What is asked of one sampled client in this round: whether it trains, how much, whether it
    returns.

    Args:
        client: the client.
        work: share of its local steps that it makes, in (0, 1]; it makes at least one step.
        trains: False if it drops before training: it receives nothing, does nothing and sends
            nothing.
        returns: False if it trains but its upload is lost: its bytes are wasted.
        leaves_before: the phase of a secure sum before which it drops out: ``keys``, ``shares``,
            ``masked`` or ``unmask``; empty if it stays. Where there is no secure sum ``trains`` and
            ``returns`` say it.
    """

    client: Client
    work: float = 1.0
    trains: bool = True
    returns: bool = True
    leaves_before: str = ""
