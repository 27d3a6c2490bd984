"""Terms that several methods share."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_divergence(p: Tensor, log_q: Tensor, log_p: Tensor | None = None) -> Tensor:
    """KL(p || q) of distributions ``[B, C]``, mean over the batch. torch's ``kl_div`` has no batching rule
    for ``vmap``.

    Args:
        log_p: where it is known better than from p.
    """
    entropy = torch.xlogy(p, p) if log_p is None else p * log_p
    return (entropy - p * log_q).sum(dim=1).mean()
