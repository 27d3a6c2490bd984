"""Terms that several methods share."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_divergence(p: Tensor, log_q: Tensor, log_p: Tensor | None = None) -> Tensor:
    """Return KL(p || q) of distributions ``[B, C]``, the mean over the batch.

    torch's own ``kl_div`` has no batching rule for ``vmap``.

    Args:
        p: probabilities.
        log_q: logarithms of the other probabilities.
        log_p: logarithm of p, where it is known to more digits than from p.
    """
    entropy = torch.xlogy(p, p) if log_p is None else p * log_p
    return (entropy - p * log_q).sum(dim=1).mean()
