"""PiSSA: LoRA whose adapter starts as the leading part of W, and whose base is what is left of W.

    W = U S V^T,    B = U_r S_r^(1/2) c^(-1/2),    A = c^(-1/2) S_r^(1/2) V_r^T,    c = alpha / r
    base = W - c B A

Source: Meng, Wang, Zhang 2024, arXiv 2404.02948; the factor c as in peft. The signs of U are fixed
by :func:`~fl_lightning.models.adapters.svd.signed_svd`: were they not, A and B of two clients could
have opposite signs, and their means would be near zero.
"""

from __future__ import annotations

import torch
from torch import nn

from fl_lightning.models.adapters.lora import LoRALinear
from fl_lightning.models.adapters.svd import signed_svd


class PiSSALinear(LoRALinear):
    """A linear layer split into a trained leading part of rank r and a frozen residual.

    Args:
        base: the linear layer; this class freezes it and takes the leading part from its weights.
        rank: r, at least 1 and at most min(out, in).
        alpha: the adapter's factor is alpha / r.
    """

    removable = False

    @torch.no_grad()
    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        u, s, vt = signed_svd(base.weight, rank)
        super().__init__(base, rank, alpha)
        root = (s / self.scaling).sqrt()
        self.lora_A.weight.copy_(root[:, None] * vt)
        self.lora_B.weight.copy_(u * root)
        left = (
            base.weight.double()
            - self.scaling * self.lora_B.weight.double() @ self.lora_A.weight.double()
        )
        base.weight.copy_(left)
