"""LoRA and FFA-LoRA: a frozen linear layer plus a trained product of two thin matrices.

    h = W x + (alpha / r) B A x,    A [r, in],  B [out, r]

Sources: Hu et al. 2022, arXiv 2106.09685 (LoRA); Sun et al. 2024, arXiv 2403.12313 (FFA-LoRA, where
A is frozen and the same for all clients, so that the mean of products is the product of means). The
names of tensors are those of peft's files: ``lora_A.weight``, ``lora_B.weight``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor, nn

from fl_lightning import rng
from fl_lightning.errors import require
from fl_lightning.models.adapters.layer import (
    ALL_LINEAR,
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    AdaptedLinear,
    adapt_linears,
)


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


def add_lora(
    network: nn.Module,
    rank: int = DEFAULT_RANK,
    alpha: float = DEFAULT_ALPHA,
    targets: str | Sequence[str] = ALL_LINEAR,
    ffa: bool = False,
    seed: int | None = None,
) -> nn.Module:
    """Freeze a network and put an adapter on its linear layers.

    Args:
        network: the network; it is changed in place.
        rank: r of every adapter.
        alpha: an adapter's factor is alpha / r.
        targets: ``all-linear``, or the last parts of the layers' names, as ``[qkv_proj, o_proj]``.
        ffa: FFA-LoRA: A is frozen, and B alone is trained and travels.
        seed: A is drawn from the stream (seed, "adapter"); None: from torch's current generator.

    Returns:
        The network; if it is itself a linear layer, the adapted layer in place of it.

    Raises:
        InputError: rank or alpha is not positive, the network has adapters, or no layer has one of
            these names.

    >>> adapted = add_lora(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), rank=2, targets=["2"])
    >>> [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    ['2.lora_A.weight', '2.lora_B.weight']
    """
    require_rank(rank, alpha)
    with nullcontext() if seed is None else rng.torch_stream(seed, "adapter"):
        return adapt_linears(network, targets, lambda _, base: LoRALinear(base, rank, alpha, ffa))


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


def lora_layers(network: nn.Module) -> dict[str, LoRALinear]:
    """Return the layers with LoRA, FFA-LoRA or PiSSA by name, in the order of the network."""
    return {
        name: module for name, module in network.named_modules() if isinstance(module, LoRALinear)
    }
