"""What the server makes of uploads, by formulas that share no code with the methods."""

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
class Sent:
    """What clients are sent.

    Args:
        entry: name of the broadcast's entry that holds it.
        formula: its values, from the history, the examples of every client, the method with the server as it
            was when the last uploads came, and the client's id.
    """

    entry: str
    formula: Callable[[History, Sequence[int], Method, int], Tensor]


def mean_of_weights(history: History, sizes: Sequence[int], method: Method, client: int) -> Tensor:
    """sum_k n_k w_k / sum_k n_k over the clients of the last round; w_k as the method decodes it."""
    return _mean({id: method.decode(upload) for id, upload in history[-1].items()}, sizes)


def mean_of_soft_labels(history: History, sizes: Sequence[int], method: Method, client: int) -> Tensor:
    """p = sum_k n_k p_k / sum_k n_k over the clients of the last round, or softmax(p / tau) where it is
    sharpened."""
    mean = _mean({id: upload.tensor("soft_labels") for id, upload in history[-1].items()}, sizes)
    return sharpened(mean, method.sharpen)  # type: ignore[arg-type]


def mean_by_relevance(history: History, sizes: Sequence[int], method: Method, client: int) -> Tensor:
    """sum_j w_j (P_j, Q_j) over all others ever heard of, w = softmax(cos(sketch, sketch_j) / tau); equal w
    before a first sketch."""
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
    """Entropy reduction of rows of probabilities; null: none."""
    return p if tau is None else torch.softmax(p / tau, dim=-1)


def _mean(values: Mapping[int, Tensor], sizes: Sequence[int]) -> Tensor:
    total = sum(sizes[id] for id in values)
    return torch.stack([sizes[id] / total * value.double() for id, value in values.items()]).sum(0)
