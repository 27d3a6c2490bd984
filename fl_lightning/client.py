"""A client: who it is, which examples are its own, and what stays with it between rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Client:
    """One client of the federation.

    Args:
        id: 0 .. num_clients - 1.
        train: indices of its training examples in the data module's training set, int64 ``[n_k]``; may be
            empty.
        val: indices of its validation examples in the same set, disjoint from ``train``; may be empty.
        state: tensors that the method keeps on this client between rounds; never on the wire, saved in
            checkpoints.
    """

    id: int
    train: np.ndarray
    val: np.ndarray
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one sampled client is asked to do this round, after the stressors have had their say.

    Args:
        client: the client.
        work: share of its local steps that it does, in (0, 1]; at least one step is done.
        trains: False when it drops before training: it receives nothing, does nothing and sends nothing.
        returns: False when it trains but its upload is lost: its bytes are wasted.
    """

    client: Client
    work: float = 1.0
    trains: bool = True
    returns: bool = True
