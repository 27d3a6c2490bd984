"""What uploads of Fed-VEMoE add to the server's sums, and the rows that become of them.

Two forms: the mean of what an expert's trainers ended with, or where messages are clipped and get
noise, sums of updates in one unit.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.methods.experts.responsibilities import SHARE_UNITS
from fl_lightning.methods.experts.wire import Trained

log = logging.getLogger("fl_lightning")

NOISE_FLOOR = 4.0
"""Standard deviations of a private sum's noise below which a count is taken for 0."""


def means(
    trained: Trained, starts: Tensor, weight: int, most: int, every_slot: bool
) -> dict[str, Addend]:
    """Return a client's addends, w_ik W_ik for each slot and w_ik = n_i share_ik.

    Args:
        trained: what the client sent.
        starts: rows that the round started from, ``[K + 1, P + d]``.
        weight, most: n_i, and the largest that there can be.
        every_slot: whether slots that it did not train are there too, with weight 0.
    """
    mass, addends = torch.zeros(len(starts)), {}
    for slot in range(len(starts)) if every_slot else sorted(trained.rows):
        units = weight * round(trained.shares.get(slot, 0.0) * SHARE_UNITS)
        mass[slot] = units / (most * SHARE_UNITS)
        row = trained.rows.get(slot, starts[slot])
        addends[f"expert/{slot}"] = Addend(row.float(), units, most * SHARE_UNITS, starts[slot])
    return {**addends, "mass": Addend(mass), "votes": Addend(_votes(trained))}


def updates(trained: Trained, starts: Tensor, scale: float) -> dict[str, Addend]:
    """Return a client's addends of weight 1: share_ik (W_ik - W_k), and the shares and votes times
    ``scale``.

    Args:
        trained: what the client sent.
        starts: rows that the round started from, ``[K + 1, P + d]``.
        scale: c.
    """
    mass, update = torch.zeros(len(starts)), torch.zeros_like(starts)
    for slot, row in trained.rows.items():
        mass[slot] = trained.shares[slot]
        update[slot] = trained.shares[slot] * (row - starts[slot])
    return {
        "update": Addend(update.flatten()),
        "mass": Addend(scale * mass),
        "votes": Addend(scale * _votes(trained)),
    }


def _votes(trained: Trained) -> Tensor:
    return torch.tensor([1.0, trained.rejects, trained.own is not None])


def counts(sums: Sums, scale: float) -> tuple[Tensor, tuple[float, float, float]]:
    """Return the use of each slot ``[K + 1]``, and how many clients returned, rejected all experts
    and seed one; 0 what noise could have made.

    Args:
        sums: over the clients.
        scale: c of :func:`updates`; 1 for :func:`means`.
    """
    floor = least_count(sums, scale)
    mass, votes = (sums.total(name) / scale for name in ("mass", "votes"))
    clients, rejects, seeds = torch.where(votes > floor, votes, 0.0).tolist()
    return torch.where(mass > floor, mass, 0.0), (clients, rejects, seeds)


def least_count(sums: Sums, scale: float) -> float:
    """Return up to which number noise could have made a count of clients, 4 z C / c; 0 without
    noise."""
    return NOISE_FLOOR * sums.deviation / scale


def warn_of_noise(least: float, clients: int, births: bool) -> None:
    """Log what noise keeps from ever happening in a run.

    Args:
        least: counts up to this one are taken for 0.
        clients: that are asked in a round.
        births: whether experts are born; about one client seeds one, however many there are.
    """
    noise = f"trainer.privacy takes counts up to {least:.3g} for noise"
    if least >= clients:
        log.warning(
            "%s, and a round has %d clients, so that no adapter ever moves; take more clients, a smaller "
            "noise_multiplier or a larger --model.mass_scale",
            noise, clients,
        )  # fmt: skip
    elif least >= 1 and births:
        log.warning(
            "%s, and about one client seeds an expert, so that none is born; write --model.birth never, and "
            "--model.k_init for as many experts as you want",
            noise,
        )  # fmt: skip


def next_rows(sums: Sums, starts: Tensor, mass: Tensor, lr: float) -> Tensor:
    """Return the rows after a round, ``[K + 1, P + d]``: W_k + lr (mean over its trainers - W_k).
    Those that nobody trained stay."""
    rows = starts.clone()
    for slot in torch.nonzero(mass).flatten().tolist():
        start = starts[slot].double()
        if "update" in sums:
            update = sums.total("update").view(starts.shape)[slot]
            rows[slot] = (start + lr * update / mass[slot]).float()
        elif lr == 1:
            rows[slot] = sums.mean(f"expert/{slot}")
        else:
            rows[slot] = (start + lr * (sums.mean(f"expert/{slot}").double() - start)).float()
    return rows
