"""Spectral: the R leading singular directions of W are kept, and their gains alone are trained.

    W = U S V^T once,    h = W x + U_R diag(m) V_R^T x,    m [R], zero at the start

R values a layer are trained and travel. U and V follow from the frozen W and are the same for all
clients, so the mean of dW is the dW of the mean of m, exactly in real numbers. The directions are
buffers that neither travel nor are saved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.models.adapters.layer import AdaptedLinear
from fl_lightning.models.adapters.svd import signed_svd
from fl_lightning.models.tensors import under_autocast


class SpectralLinear(AdaptedLinear):
    """A frozen linear layer with trained gains of its leading singular directions.

    The gains are float32 or wider, also on a narrower base. The directions are those of the weights
    that the base has when it is adapted.

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

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs ``[..., in]`` to outputs ``[..., out]``; while gradients are recorded, in one
        product with W + dW where that takes fewer operations, which is equal up to rounding."""
        if self.merged or not self._one_product_is_cheaper(x):
            return super().forward(x)
        return F.linear(x, self.full_weight(), self.base_layer.bias)

    def _one_product_is_cheaper(self, x: Tensor) -> bool:
        """Return whether a step of training takes fewer multiplications with W + dW than with W and
        dW apart.

        With N tokens, forward and backward: of W + dW, 3 N in out + 2 R in out; of W and dW apart,
        2 N in out + 2 N R (in + out). A narrow type would round dW away.
        """
        if not torch.is_grad_enabled() or under_autocast(x):
            return False
        if x.dtype != torch.float32 or self.left.dtype != torch.float32:
            return False
        (outputs, inputs), rank = self.base_layer.weight.shape, len(self.spectral_m)
        tokens = x.numel() // inputs
        merged = (tokens + 2 * rank) * inputs * outputs
        apart = 2 * tokens * rank * (inputs + outputs)
        return merged < apart

    def added(self, x: Tensor) -> Tensor:
        """Return U_R diag(m) V_R^T x, ``[..., out]``, of inputs ``[..., in]``."""
        inner = F.linear(x, self.right) * self.spectral_m
        return F.linear(inner.to(self.left.dtype), self.left)

    def product(self) -> Tensor:
        """Return U_R diag(m) V_R^T, ``[out, in]``."""
        return (self.left * self.spectral_m).to(self.left.dtype) @ self.right

    def low_rank(self) -> tuple[Tensor, Tensor, float]:
        return self.right, (self.left * self.spectral_m).to(self.left.dtype), 1.0


def new_gains(weight: Tensor, count: int) -> Tensor:
    """Return zeros ``[count]`` on the device of a weight, in its precision or in float32 if that is
    wider."""
    return weight.new_zeros(count, dtype=torch.promote_types(weight.dtype, torch.float32))
