"""SVFT: a sparse trained matrix between all or the leading singular directions of W.

    W = U S V^T once,    h = W x + U_R M V_R^T x,    M [R, R] banded: M_ij = 0 where |i - j| > band

Source: Lingam et al. 2024, arXiv 2405.19597, the banded pattern; with band 0 it is the plain one,
which is :mod:`~fl_lightning.models.adapters.spectral`. The entries of the band alone are trained
and travel, ``(2 band + 1) R - band (band + 1)`` a layer. U and V are the same for all clients, so
averaging M is averaging dW. They neither travel nor are saved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import require
from fl_lightning.models.adapters.layer import AdaptedLinear
from fl_lightning.models.adapters.spectral import new_gains
from fl_lightning.models.adapters.svd import signed_svd

DEFAULT_BAND = 1


class SVFTLinear(AdaptedLinear):
    """A frozen linear layer with a trained banded matrix between its leading singular directions.

    The parameter ``svft_m`` holds the diagonals one after the other, from the lowest, offset -band,
    to the highest, offset band; the diagonal of offset k has R - abs(k) values ``M_(i, i + k)``.

    Args:
        base: the linear layer; this class freezes it.
        rank: R, at least 1 and at most min(out, in).
        band: diagonals on each side of the main one, 0 to R - 1.

    Raises:
        InputError: ``band`` is out of its range.
    """

    def __init__(self, base: nn.Linear, rank: int, band: int = DEFAULT_BAND) -> None:
        super().__init__(base)
        require(
            0 <= band < rank,
            f"band={band} of adapter svft of rank {rank}",
            "a matrix of R x R has 0 to R - 1 diagonals on each side of the main one",
            f"write band {min(DEFAULT_BAND, rank - 1)}, or a higher rank",
        )
        u, _, vt = signed_svd(base.weight, rank)
        self.left: Tensor
        self.right: Tensor
        self.register_buffer("left", u.to(base.weight).contiguous(), persistent=False)
        self.register_buffer("right", vt.to(base.weight).contiguous(), persistent=False)
        self.offsets = range(-band, band + 1)
        self.svft_m = nn.Parameter(new_gains(base.weight, sum(rank - abs(k) for k in self.offsets)))

    def _diagonals(self) -> list[Tensor]:
        rank = len(self.right)
        return list(self.svft_m.split([rank - abs(offset) for offset in self.offsets]))

    def added(self, x: Tensor) -> Tensor:
        """Return U_R M V_R^T x, ``[..., out]``, of inputs ``[..., in]``."""
        z = F.linear(x, self.right)
        rank, mixed = len(self.right), None
        for k, diagonal in zip(self.offsets, self._diagonals(), strict=True):
            part = F.pad(diagonal * z[..., max(k, 0) : rank + min(k, 0)], (max(-k, 0), max(k, 0)))
            mixed = part if mixed is None else mixed + part
        assert mixed is not None
        return F.linear(mixed.to(self.left.dtype), self.left)

    def matrix(self) -> Tensor:
        """Return M, ``[R, R]``."""
        pairs = zip(self.offsets, self._diagonals(), strict=True)
        return torch.stack([torch.diag_embed(diagonal, k) for k, diagonal in pairs]).sum(0)

    def product(self) -> Tensor:
        """Return U_R M V_R^T, ``[out, in]``."""
        return (self.left @ self.matrix().to(self.left.dtype)) @ self.right

    def low_rank(self) -> tuple[Tensor, Tensor, float]:
        return self.right, self.left @ self.matrix().to(self.left.dtype), 1.0
