"""Tiny models of transformers with a tokeniser of bytes, made from configurations and saved:
nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "Llama 3": (
        "Llama",
        {
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "Mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 16}),
    "Gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 8}),
    "SmolLM2": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
}
"""Families by name: the class of transformers, and what their configurations have beside sizes."""
SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
}
"""The configuration of SmolLM2-135M: 134 515 008 weights."""


def tokenizer_of_bytes() -> Any:
    """A tokeniser of transformers with the 256 bytes, ``<s>`` and ``</s>``."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(
        models.BPE({token: number for number, token in enumerate(["<s>", "</s>", *alphabet])}, [])
    )
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, bos_token="<s>", eos_token="</s>"
    )


def save_base(folder: Path, family: str = "Llama 3", **sizes: Any) -> Path:
    """Write a model of the family with new weights, and its tokeniser, as ``save_pretrained``
    does."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    name, own = BASES[family]
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    small |= {"vocab_size": 264, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    small |= {"max_position_embeddings": 512}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**small, **own, **sizes})
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    tokenizer_of_bytes().save_pretrained(folder)
    return folder
