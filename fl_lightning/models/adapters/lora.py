"""LoRA and FFA-LoRA: a frozen linear layer plus a trained product of two thin matrices.

    h = W x + (alpha / r) B A x,    A [r, in],  B [out, r]

Sources: Hu et al. 2022, arXiv 2106.09685 (LoRA); Sun et al. 2024, arXiv 2403.12313 (FFA-LoRA, where
A is frozen and the same for all clients, so that the mean of products is the product of means). The
names of tensors are those of peft's files: ``lora_A.weight``, ``lora_B.weight``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fl_lightning.errors import require
from fl_lightning.models.adapters.layer import DEFAULT_ALPHA, DEFAULT_RANK, AdaptedLinear


class LoRALinear(AdaptedLinear):
    """A frozen linear layer with an adapter. A is drawn as peft draws it, B is zero.

    Args:
        base: the linear layer; this class freezes it.
        rank: r, at least 1.
        alpha: the adapter's factor is alpha / r.
        ffa: whether A is frozen too.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, ffa: bool = False) -> None:
        super().__init__(base)
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **like)
        nn.init.zeros_(self.lora_B.weight)
        self.lora_A.requires_grad_(not ffa)
        self.scaling = alpha / rank

    def added(self, x: Tensor) -> Tensor:
        """Return (alpha / r) B A x, ``[..., out]``, of inputs ``[..., in]``."""
        # 3 % of a step less than scaling what B gives
        return self.lora_B(self.lora_A(x) * self.scaling)

    def product(self) -> Tensor:
        """Return what the adapter adds to W, ``(alpha / r) B A`` ``[out, in]``."""
        return self.scaling * (self.lora_B.weight @ self.lora_A.weight)

    def low_rank(self) -> tuple[Tensor, Tensor, float]:
        return self.lora_A.weight, self.lora_B.weight, self.scaling


def require_rank(rank: int, alpha: float) -> None:
    """Refuse a rank or an alpha that is not positive."""
    require(
        rank >= 1 and alpha > 0,
        f"rank={rank}, alpha={alpha}",
        "an adapter has a rank of 1 or more and a positive alpha",
        f"write rank {DEFAULT_RANK} and alpha {DEFAULT_ALPHA:g}",
    )


def largest_rank(rank: int | Sequence[int], kind: str = "lora") -> int:
    """Return the rank of a network whose clients have these ranks: client i has entry i modulo
    their number.

    A client of a lower rank has the first rows of A and columns of B, and c = alpha / r of the
    largest rank, so that what adapters add can be added up.

    Raises:
        InputError: the list is empty, a rank in it is not positive, or the adapters are not LoRA.
    """
    if isinstance(rank, int):
        return rank
    require(
        rank and min(rank) >= 1 and kind == "lora",
        f"rank={list(rank)} of adapter {kind}",
        "a list has a rank of 1 or more for each client, of adapters of kind lora",
        f"write rank {DEFAULT_RANK}, or [2, 4, 8]",
    )
    return max(rank)
