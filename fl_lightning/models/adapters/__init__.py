"""Adapters of frozen linear layers, one file each, behind one switch: :func:`add_adapter`.

    h = W x + dW x

| kind | dW | trained and sent, values of a layer ``[out, in]`` |
|---|---|---|
| ``lora`` | (alpha / r) B A | r (in + out) |
| ``ffa`` | (alpha / r) B A, A frozen | r out |
| ``pissa`` | (alpha / r) B A, which starts as W's leading part | r (in + out) |
| ``adalora`` | (alpha / r) P diag(lambda) Q | r (in + out + 1) |
| ``svft`` | U_R M V_R^T, M banded | (2 band + 1) R - band (band + 1) |
| ``spectral`` | U_R diag(m) V_R^T | R |
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

from fl_lightning import rng
from fl_lightning.config.near_names import require_choice
from fl_lightning.errors import require
from fl_lightning.models.adapters.adalora import (
    AdaLoRALinear,
    Importance,
    adalora_layers,
    budget_at,
    choose_masks,
    factor_names,
    orthogonality,
)
from fl_lightning.models.adapters.layer import (
    ALL_LINEAR,
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    AdaptedLinear,
    adapt_linears,
    adapter_layers,
    merged_lora,
    plain_weights,
)
from fl_lightning.models.adapters.lora import LoRALinear, largest_rank, require_rank
from fl_lightning.models.adapters.pissa import PiSSALinear
from fl_lightning.models.adapters.spectral import SpectralLinear
from fl_lightning.models.adapters.svd import require_directions, signed_svd
from fl_lightning.models.adapters.svft import DEFAULT_BAND, SVFTLinear

AdapterKind: TypeAlias = Literal["lora", "ffa", "pissa", "adalora", "svft", "spectral"]
ADAPTERS: tuple[AdapterKind, ...] = get_args(AdapterKind)
OF_SINGULAR_DIRECTIONS = ("pissa", "svft", "spectral")


def add_adapter(
    network: nn.Module,
    kind: AdapterKind,
    rank: int = DEFAULT_RANK,
    *,
    alpha: float = DEFAULT_ALPHA,
    targets: str | Sequence[str] = ALL_LINEAR,
    band: int | None = None,
    seed: int | None = None,
) -> nn.Module:
    """Freeze a network and put an adapter of one kind on its linear layers.

    At the start the outputs are those of the network without adapters bit for bit, with ``pissa``
    up to rounding.

    Args:
        network: the network; it is changed in place.
        kind: one of ``ADAPTERS``.
        rank: r of every adapter, the number of directions; of ``pissa``, ``svft`` and ``spectral``
            at most the smaller side of each layer.
        alpha: the factor of ``lora``, ``ffa``, ``pissa`` and ``adalora`` is alpha / r; others have
            none.
        targets: ``all-linear``, or the last parts of the layers' names, as ``[qkv_proj, o_proj]``.
        band: diagonals of ``svft`` on each side of the main one; None: 1, and none of rank 1.
        seed: what is random is drawn from the stream (seed, "adapter"); None: from torch's current
            generator. ``pissa``, ``svft`` and ``spectral`` draw nothing.

    Returns:
        The network; if it is itself a linear layer, the adapted layer in place of it.

    Raises:
        InputError: there is no such kind, rank or alpha is not positive, the rank is too high for a
            layer, the network has adapters, or no layer has one of these names.

    >>> adapted = add_adapter(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), "spectral", rank=2)
    >>> [(name, len(m)) for name, m in adapted.named_parameters() if m.requires_grad]
    [('0.spectral_m', 2), ('2.spectral_m', 2)]
    """
    require_choice(kind, ADAPTERS, "adapter")
    require_rank(rank, alpha)

    def make(name: str, base: nn.Linear) -> AdaptedLinear:
        if kind in OF_SINGULAR_DIRECTIONS:
            require_directions(kind, name, base, rank)
        match kind:
            case "pissa":
                return PiSSALinear(base, rank, alpha)
            case "adalora":
                return AdaLoRALinear(base, rank, alpha)
            case "svft":
                sides = min(DEFAULT_BAND, rank - 1) if band is None else band
                return SVFTLinear(base, rank, sides)
            case "spectral":
                return SpectralLinear(base, rank)
        return LoRALinear(base, rank, alpha, ffa=kind == "ffa")

    with nullcontext() if seed is None else rng.torch_stream(seed, "adapter"):
        return adapt_linears(network, targets, make)


def add_chosen(
    network: Any,
    kind: AdapterKind,
    rank: int | list[int],
    *,
    alpha: float,
    targets: str | Sequence[str],
) -> None:
    """Add what the settings of a network mean: adapters of the largest rank, and ``client_ranks``,
    those of the clients where ``rank`` is a list; rank 0: none.

    Raises:
        InputError: as :func:`add_adapter` and :func:`largest_rank`.
    """
    largest = largest_rank(rank, kind)
    network.client_ranks = rank if isinstance(rank, list) else []
    if largest != 0:
        add_adapter(network, kind, largest, alpha=alpha, targets=targets)


def kind_of(adapter: AdapterKind, ffa: bool) -> AdapterKind:
    """Return the kind that the settings ``adapter`` and ``ffa`` of a network mean together.

    Raises:
        InputError: there is no such kind, or ``ffa`` is set beside a kind without a factor A.
    """
    require_choice(adapter, ADAPTERS, "adapter")
    require(
        not ffa or adapter in ("lora", "ffa"),
        f"adapter {adapter} with ffa true",
        "ffa freezes the factor A of LoRA",
        f"write adapter ffa, or adapter {adapter} with ffa false",
    )
    return "ffa" if ffa else adapter
