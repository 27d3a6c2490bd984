"""LoRA for language models; it is defined in :mod:`fl_lightning.models.adapters`."""

from __future__ import annotations

from fl_lightning.models.adapters import (
    ALL_LINEAR,
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    LoRALinear,
    add_lora,
    lora_layers,
    merged_lora,
)

__all__ = [
    "ALL_LINEAR",
    "DEFAULT_ALPHA",
    "DEFAULT_RANK",
    "LoRALinear",
    "add_lora",
    "lora_layers",
    "merged_lora",
]
