"""Formulas for the broadcast that follows from given uploads; they share no code with the
methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.conformance.formulas import num_sent
from fl_lightning.conformance.verdicts import NotApplicable
from fl_lightning.methods import Method
from fl_lightning.wire import Payload

History = Sequence[Mapping[int, Payload]]
"""The uploads of each finished round by client id, oldest round first."""


@dataclass(frozen=True)
class BroadcastFormula:
    """The formula of one entry of the broadcast.

    Args:
        entry: name of the entry.
        formula: returns the values of the entry. Its arguments are the history, the weight n_k of
            every client (0 without examples), the method with the server's state at the arrival of
            the last uploads, and the id of the client that receives the broadcast.
    """

    entry: str
    formula: Callable[[History, Sequence[int], Method, int], Tensor]


def mean_of_weights(history: History, sizes: Sequence[int], method: Method, client: int) -> Tensor:
    """Return sum_k n_k w_k / sum_k n_k over the clients of the last round, float64 ``[size]``.

    w_k are the weights that the method decodes from the upload of client k.
    """
    return _mean({id: method.decode(upload) for id, upload in history[-1].items()}, sizes)


def sum_of_changes(history: History, sizes: Sequence[int], method: Method, client: int) -> Tensor:
    """Return c = 1/N sum of the changes that all clients have sent in all rounds, float64
    ``[P]``."""
    changes = [
        upload.tensor("change").double() for uploads in history for upload in uploads.values()
    ]
    return torch.stack(changes).sum(0) / sum(size > 0 for size in sizes)


def normalised_mean(history: History, sizes: Sequence[int], method: Method, client: int) -> Tensor:
    """Return x + tau sum_k p_k (w_k - x) / a_k, float64 ``[size]``, with the closed forms of Wang
    et al. (NeurIPS 2020) for a_k of plain SGD, of momentum and of a proximal term.

    Statistics of BatchNorm, which follow the parameters, are averaged.

    Raises:
        NotApplicable: there are momentum and a proximal term, for which the paper has no form.
    """
    (group,) = method.configure_optimizers().param_groups
    r, pull = float(group["momentum"]), float(group["lr"]) * float(method.mu)  # type: ignore[arg-type]
    if r and pull:
        raise NotApplicable("the paper has no form for momentum with a proximal term")
    steps = {id: float(upload.tensor("steps")) for id, upload in history[-1].items()}
    work = {
        id: (1 - (1 - pull) ** K) / pull if pull else (K - r * (1 - r**K) / (1 - r)) / (1 - r)
        for id, K in steps.items()
    }
    start, P = method.server["weights"].double(), num_sent(method, trained=True)
    moved = {id: method.decode(upload).double() - start for id, upload in history[-1].items()}
    total = sum(sizes[id] for id in moved)
    tau = sum(sizes[id] / total * (steps if pull else work)[id] for id in moved)
    for id in moved:
        moved[id][:P] *= tau / work[id]
    return start + _mean(moved, sizes)


def mean_of_soft_labels(
    history: History, sizes: Sequence[int], method: Method, client: int
) -> Tensor:
    """Return p = sum_k n_k p_k / sum_k n_k over the clients of the last round, float64 ``[|P|,
    C]``.

    A method that sharpens sends softmax(p / tau) instead.
    """
    mean = _mean({id: upload.tensor("soft_labels") for id, upload in history[-1].items()}, sizes)
    return sharpened(mean, method.sharpen)  # type: ignore[arg-type]


def mean_of_prototypes(
    history: History, sizes: Sequence[int], method: Method, client: int
) -> Tensor:
    """Return P_c = sum_k n_kc z_kc / sum_k n_kc over the last round with the class, float64 ``[C,
    d]``; zeros of one that nobody has had."""
    last = torch.zeros_like(method.server["prototypes"], dtype=torch.float64)
    for uploads in history:
        counts = torch.stack([upload.tensor("counts").double() for upload in uploads.values()])
        means = torch.stack([upload.tensor("prototypes").double() for upload in uploads.values()])
        total = counts.sum(0).unsqueeze(1)
        last = torch.where(total > 0, (counts.unsqueeze(2) * means).sum(0) / total, last)
    return last


def mean_by_relevance(
    history: History, sizes: Sequence[int], method: Method, client: int
) -> Tensor:
    """Return sum_j w_j (P_j, Q_j) over all other clients that ever sent an upload.

    w = softmax(cos(sketch, sketch_j) / tau). The w_j are equal for a client that has sent no sketch
    yet.
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
    mixed = [
        weights[id] / total * upload.tensor("adapters").double() for id, upload in others.items()
    ]
    return torch.stack(mixed).sum(0)


def sharpened(p: Tensor, tau: float | None) -> Tensor:
    """Return softmax(p / tau) of rows of probabilities, or p itself if tau is None."""
    return p if tau is None else torch.softmax(p / tau, dim=-1)


def _mean(values: Mapping[int, Tensor], sizes: Sequence[int]) -> Tensor:
    total = sum(sizes[id] for id in values)
    return torch.stack([sizes[id] / total * value.double() for id, value in values.items()]).sum(0)
