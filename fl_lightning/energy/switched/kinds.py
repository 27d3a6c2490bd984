"""What adapters a layer has, in the words of tables of costs."""

from __future__ import annotations

from typing import Any

from fl_lightning.energy.switched.merged import MergedLinear
from fl_lightning.models.adapters import (
    AdaLoRALinear,
    AdaptedLinear,
    AdapterKind,
    LoRALinear,
    PiSSALinear,
    SpectralLinear,
    SVFTLinear,
)

MERGED = "merged"
"""In place of a kind of adapter: LoRA that is merged into its base."""


def kind_and_rank(adapted: Any) -> tuple[AdapterKind, int]:
    """Return the kind and the rank of an adapter, ours or peft's."""
    match adapted:
        case SpectralLinear() | SVFTLinear():
            return "spectral" if isinstance(
                adapted, SpectralLinear
            ) else "svft", adapted.left.shape[1]
        case AdaLoRALinear():
            return "adalora", len(adapted.lora_A)
        case LoRALinear():
            ffa = not adapted.lora_A.weight.requires_grad
            kind: AdapterKind = (
                "pissa" if isinstance(adapted, PiSSALinear) else "ffa" if ffa else "lora"
            )
            return kind, adapted.lora_A.out_features
    name = adapted.active_adapters[0]
    if hasattr(adapted, "lora_E"):
        return "adalora", len(adapted.lora_A[name])
    factor = adapted.lora_A[name]
    return "lora" if factor.weight.requires_grad else "ffa", factor.out_features


def adapter_name(adapted: Any) -> str:
    """Return what adapter a layer computes, in words, for tables of costs: ``lora of rank 8``,
    which ``ffa`` and ``pissa`` compute too; ``merged``; empty for what is none of these."""
    if isinstance(adapted, MergedLinear):
        return MERGED
    if not (isinstance(adapted, AdaptedLinear) or hasattr(adapted, "active_adapters")):
        return ""
    kind, rank = kind_and_rank(adapted)
    return f"{'lora' if kind in ('ffa', 'pissa') else kind} of rank {rank}"
