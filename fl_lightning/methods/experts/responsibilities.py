"""The client's choice of experts by losses on probe examples, the same examples for every expert.

``N`` probe examples, ``K`` slots for experts. All of it is float64 on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_PRIOR = 1e-12
SHARE_UNITS = 2**10
"""The server counts shares of experts in units of 1 / 1024."""


@dataclass(frozen=True, slots=True)
class Paired:
    """A mean of N paired differences.

    Args:
        mean: in nats.
        error: its standard error, the root of variance / N; 0 for fewer than two examples.
    """

    mean: float
    error: float

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> Paired:
        """Return mean and standard error of ``first - second``, each ``[N]``."""
        difference = first - second
        several = len(difference) > 1
        error = float(difference.std() / len(difference) ** 0.5) if several else 0.0
        return cls(float(difference.mean()), error)


def responsibilities(
    nats: Tensor, prior: Tensor, active: Tensor, tau: float, kappa: float
) -> tuple[Tensor, float]:
    """Return r = softmax over the active slots of (log pi_k - L_k / tau'), exactly 0 elsewhere,
    ``[K]``, and tau' = max(tau, kappa se).

    L_k is the mean of the probe losses, and se the standard error of the paired difference between
    the two best experts, so that a client is never surer than its probes can tell. Without probes r
    is the prior.

    Args:
        nats: loss of each example under each expert, ``[N, K]``; those of free slots are not read.
        prior: pi, ``[K]``, at least 1e-12 on active slots.
        active: which slots have an expert, bool ``[K]``, one at least.
        tau: temperature in nats, above 0.
        kappa: 0 or more.
    """
    free = ~active
    score = prior.clamp_min(LEAST_PRIOR).log().masked_fill(free, -torch.inf)
    if not len(nats):
        return score.softmax(0), tau
    mean = nats.mean(0).masked_fill(free, torch.inf)
    if int(active.sum()) > 1:
        best, second = mean.argsort(stable=True)[:2].tolist()
        tau = max(tau, kappa * Paired.of(nats[:, second], nats[:, best]).error)
    return torch.where(active, score - mean / tau, -torch.inf).softmax(0), tau


def seated(r: Tensor, active: Tensor, seats: int) -> tuple[list[int], Tensor]:
    """Return the slots of the at most ``seats`` largest responsibilities, the lower slot of equals
    first, and their shares r / sum r. An expert whose share the server would count as 0 gets no
    seat.

    Args:
        r: responsibilities ``[K]``.
        active: which slots have an expert, bool ``[K]``.
        seats: at least 1.
    """
    order = r.masked_fill(~active, -1.0).argsort(descending=True, stable=True)
    slots = sorted(order[: min(seats, int(active.sum()))].tolist())
    shares = r[slots] / r[slots].sum()
    counted = (shares * SHARE_UNITS).round() > 0
    kept = [slot for slot, counts in zip(slots, counted.tolist(), strict=True) if counts]
    return kept, shares[counted] / shares[counted].sum()


def is_worse_than_own(nats: Tensor, own: Tensor, active: Tensor, gap: float, z: float) -> bool:
    """Return whether the best expert is worse for a client than what the client learned alone.

    The best expert k has the least mean loss. The client rejects all experts where the paired
    difference d_s = l_sk - l_s,own has a mean above ``gap`` and above z standard errors.

    Args:
        nats: as for :func:`responsibilities`.
        own: loss of each example under the client's own adapter, ``[N]``.
        active: which slots have an expert, bool ``[K]``.
        gap: nats that a client is ready to lose.
        z: standard errors.
    """
    if len(own) < 2:
        return False
    best = int(nats.mean(0).masked_fill(~active, torch.inf).argmin())
    lost = Paired.of(nats[:, best], own)
    return lost.mean > gap and lost.mean > z * lost.error
