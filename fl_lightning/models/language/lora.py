"""LoRA: a frozen linear layer plus a trained product of two thin matrices.

    h = W x + (alpha / r) B A x,    A [r, in],  B [out, r]

Sources: Hu et al. 2022, arXiv 2106.09685 (LoRA); Sun et al. 2024, arXiv 2403.12313 (FFA-LoRA, where A is
frozen and the same for all clients, so that the mean of products is the product of means). The names of
tensors are those of peft's files: ``lora_A.weight``, ``lora_B.weight``, ``base_layer.weight``.

Nothing below the first adapter of a network needs a gradient, so torch keeps none of its activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from fl_lightning import rng
from fl_lightning.errors import InputError, require

ALL_LINEAR = "all-linear"
DEFAULT_RANK = 8
DEFAULT_ALPHA = 16.0


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter. A is drawn as peft draws it, B is zero.

    Args:
        base: the linear layer; this class freezes it.
        rank: r, at least 1.
        alpha: the adapter's factor is alpha / r.
        ffa: whether A is frozen too.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, ffa: bool = False) -> None:
        super().__init__()
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, **like)
        nn.init.zeros_(self.lora_B.weight)
        self.lora_A.requires_grad_(not ffa)
        self.scaling = alpha / rank
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs ``[..., in]`` to outputs ``[..., out]``."""
        if self.merged:
            return self.base_layer(x)
        return self.base_layer(x) + self.lora_B(self.lora_A(x) * self.scaling)  # 3 % of a step less

    def product(self) -> Tensor:
        """Return what the adapter adds to W, ``(alpha / r) B A`` ``[out, in]``."""
        return self.scaling * (self.lora_B.weight @ self.lora_A.weight)


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
        InputError: rank or alpha is not positive, the network has adapters, or no layer has one of these
            names.

    >>> adapted = add_lora(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), rank=2, targets=["2"])
    >>> [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    ['2.lora_A.weight', '2.lora_B.weight']
    """
    require(
        rank >= 1 and alpha > 0,
        f"rank={rank}, alpha={alpha}",
        "an adapter has a rank of 1 or more and a positive alpha",
        f"write rank {DEFAULT_RANK} and alpha {DEFAULT_ALPHA:g}",
    )
    require(
        not lora_layers(network),
        f"{type(network).__name__} with adapters",
        "a network is adapted once",
        "give the network without them",
    )
    network.requires_grad_(False)
    with nullcontext() if seed is None else rng.torch_stream(seed, "adapter"):
        for name in _targeted(network, targets):
            base = network.get_submodule(name)
            assert isinstance(base, nn.Linear)
            adapted = LoRALinear(base, rank, alpha, ffa)
            if not name:
                return adapted
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, adapted)
    return network


def _targeted(network: nn.Module, targets: str | Sequence[str]) -> list[str]:
    """Return the names of the linear layers that ``targets`` means, in the order of the network.

    Raises:
        InputError: a target names no linear layer.
    """
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if wanted == [ALL_LINEAR] and linear:
        return linear
    found = {
        target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in wanted if target
    }
    missing = [target for target in wanted if not found.get(target)]
    if missing or not wanted:
        known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear)) or "none"
        raise InputError(
            f"targets={targets!r} for {type(network).__name__}",
            f"a target is {ALL_LINEAR} or the last part of a linear layer's name, here {known}",
            f"write {ALL_LINEAR}",
        )
    return [name for name in linear if any(name in names for names in found.values())]


def lora_layers(network: nn.Module) -> dict[str, LoRALinear]:
    """Return the adapted layers by name, in the order of the network."""
    return {name: module for name, module in network.named_modules() if isinstance(module, LoRALinear)}


@contextmanager
def merged_lora(network: nn.Module) -> Iterator[None]:
    """Replace W by ``W + (alpha / r) B A`` within the block, where the adapters rest.

    Evaluation and generation take fewer products so. Afterwards W has the bits from before the block.

    Args:
        network: network with adapters; one without them is as it was.
    """
    layers = [layer for layer in lora_layers(network).values() if not layer.merged]
    kept = [layer.base_layer.weight.detach().clone() for layer in layers]
    try:
        with torch.no_grad():
            for layer in layers:
                layer.base_layer.weight += layer.product()
                layer.merged = True
        yield
    finally:
        with torch.no_grad():
            for layer, weight in zip(layers, kept, strict=True):
                layer.base_layer.weight.copy_(weight)
                layer.merged = False
