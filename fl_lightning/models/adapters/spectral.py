"""Spectral: the R leading singular directions of W are kept, and their gains alone are trained.

    W = U S V^T once,    h = W x + U_R diag(m) V_R^T x,    m [R], zero at the start

R values a layer are trained and travel. U and V follow from the frozen W and are the same for all clients, so
the mean of dW is the dW of the mean of m, exactly in real numbers. The directions are buffers that neither
travel nor are saved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.models.adapters.layer import AdaptedLinear
from fl_lightning.models.adapters.svd import signed_svd


class SpectralLinear(AdaptedLinear):
    """A frozen linear layer with trained gains of its leading singular directions.

    The gains are float32 or wider, also on a narrower base. The directions are those of the weights that the
    base has when it is adapted.

    Args:
        base: the linear layer; this class freezes it.
        rank: R, at least 1 and at most min(out, in).
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__(base)
        u, _, vt = signed_svd(base.weight, rank)
        self.left: Tensor
        self.right: Tensor
        self.register_buffer("left", u.to(base.weight).contiguous(), persistent=False)
        self.register_buffer("right", vt.to(base.weight).contiguous(), persistent=False)
        self.spectral_m = nn.Parameter(new_gains(base.weight, rank))

    def added(self, x: Tensor) -> Tensor:
        """Return U_R diag(m) V_R^T x, ``[..., out]``, of inputs ``[..., in]``."""
        inner = F.linear(x, self.right) * self.spectral_m
        return F.linear(inner.to(self.left.dtype), self.left)

    def product(self) -> Tensor:
        """Return U_R diag(m) V_R^T, ``[out, in]``."""
        return (self.left * self.spectral_m).to(self.left.dtype) @ self.right


def new_gains(weight: Tensor, count: int) -> Tensor:
    """Return zeros ``[count]`` on the device of a weight, in its precision or in float32 if that is wider."""
    return weight.new_zeros(count, dtype=torch.promote_types(weight.dtype, torch.float32))
