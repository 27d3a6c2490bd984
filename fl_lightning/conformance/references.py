"""Formulas for the broadcast that follows from given uploads; they share no code with the methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.methods import Method
from fl_lightning.wire import Payload

History = Sequence[Mapping[int, Payload]]
"""The uploads of each finished round by client id, oldest round first."""


@dataclass(frozen=True)
class BroadcastFormula:
    """The formula of one entry of the broadcast.

    Args:
        entry: name of the entry.
        formula: returns the values of the entry. Its arguments are the history, the number of examples of
            every client, the method with the server's state at the arrival of the last uploads, and the id
            of the client that receives the broadcast.
    """

    entry: str
    formula: Callable[[History, Sequence[int], Method, int], Tensor]


def mean_of_weights(history: History, sizes: Sequence[int], method: Method, client: int) -> Tensor:
    """Return sum_k n_k w_k / sum_k n_k over the clients of the last round, float64 ``[size]``.

    w_k are the weights that the method decodes from the upload of client k.
    """
    return _mean({id: method.decode(upload) for id, upload in history[-1].items()}, sizes)


def mean_of_soft_labels(history: History, sizes: Sequence[int], method: Method, client: int) -> Tensor:
    """Return p = sum_k n_k p_k / sum_k n_k over the clients of the last round, float64 ``[|P|, C]``.

    A method that sharpens sends softmax(p / tau) instead.
    """
    mean = _mean({id: upload.tensor("soft_labels") for id, upload in history[-1].items()}, sizes)
    return sharpened(mean, method.sharpen)  # type: ignore[arg-type]


def mean_by_relevance(history: History, sizes: Sequence[int], method: Method, client: int) -> Tensor:
    """Return sum_j w_j (P_j, Q_j) over all other clients that ever sent an upload.

    w = softmax(cos(sketch, sketch_j) / tau). The w_j are equal for a client that has sent no sketch yet.
    """
    newest = {id: upload for uploads in history for id, upload in uploads.items()}
    others = {id: upload for id, upload in newest.items() if id != client or method.include_self}
    mine = newest[client].tensor("sketch").double() if client in newest else None
    weights = {}
    for id, upload in others.items():
        theirs = upload.tensor("sketch").double()
        alike = (
            0.0
            if mine is None
            else float(mine @ theirs) / math.sqrt(float(mine @ mine) * float(theirs @ theirs))
        )
        weights[id] = math.exp(alike / float(method.tau))  # type: ignore[arg-type]
    total = sum(weights.values())
    mixed = [weights[id] / total * upload.tensor("adapters").double() for id, upload in others.items()]
    return torch.stack(mixed).sum(0)


def sharpened(p: Tensor, tau: float | None) -> Tensor:
    """Return softmax(p / tau) of rows of probabilities, or p itself if tau is None."""
    return p if tau is None else torch.softmax(p / tau, dim=-1)


def _mean(values: Mapping[int, Tensor], sizes: Sequence[int]) -> Tensor:
    total = sum(sizes[id] for id in values)
    return torch.stack([sizes[id] / total * value.double() for id, value in values.items()]).sum(0)
