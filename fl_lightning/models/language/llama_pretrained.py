"""``LlamaPretrained``: a model of the Llama family from the hub or a folder, as a network of the
project's.

Its blocks are those of :class:`~fl_lightning.models.language.llama.Llama`, so that all that works
on ``llama_tiny`` works on it: branches that are left out within an energy budget, adapters of the
project's own kinds, many clients at once by ``torch.func``. It needs the optional extra
``fl_lightning[language]`` to be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.config.packaged import HF_PREFIX
from fl_lightning.errors import require
from fl_lightning.models.adapters import (
    ALL_LINEAR,
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    AdapterKind,
    add_chosen,
    kind_of,
    largest_rank,
)
from fl_lightning.models.language.hf import check_adapters, check_vocabulary, load
from fl_lightning.models.language.llama import USUAL, Llama, Variant

FAMILY = ("llama", "mistral")
"""Architectures of transformers whose blocks these are."""


class LlamaPretrained(Llama):
    """A model of the Llama family, such as SmolLM2, Llama 3 or Mistral, with adapters on a frozen
    base.

    Its weights are float32, and its logits those of transformers. Linear layers are ``qkv_proj``,
    ``o_proj``, ``gate_up_proj`` and ``down_proj``, as in ``llama_tiny``.

    Args:
        num_classes: number of tokens of the data, at most the model's.
        name: name on the Hugging Face hub; a folder that ``save_pretrained`` wrote, or
            ``package:NAME``, an installed Python package that carries the model, for which nothing
            is fetched.
        rank: r of the adapters; 0: no adapters, all weights are trained. A list: client i has entry
            i modulo its length, where ``adapter_average`` takes that.
        alpha: an adapter's factor is alpha / r.
        targets: ``all-linear``, all linear layers but the output layer, or names of linear layers.
        ffa: FFA-LoRA: A is frozen, and B alone is trained and travels; the same as ``adapter:
            ffa``.
        gguf_file: the file in the folder, where the weights are GGUF.
        adapter: kind of the adapters: lora, ffa, pissa, adalora, svft or spectral.

    Raises:
        InputError: the extra is not installed, the model cannot be loaded or is of another family,
            its vocabulary is too small, or a setting of the adapters is refused.
    """

    def __init__(
        self,
        num_classes: int,
        name: str,
        rank: int | list[int] = DEFAULT_RANK,
        alpha: float = DEFAULT_ALPHA,
        targets: str | Sequence[str] = ALL_LINEAR,
        ffa: bool = False,
        gguf_file: str | None = None,
        adapter: AdapterKind = "lora",
    ) -> None:
        kind = kind_of(adapter, ffa)
        check_adapters(name, largest_rank(rank, kind), alpha)
        model = load(
            name, "float32", "CausalLM", **({} if gguf_file is None else {"gguf_file": gguf_file})
        )
        config = model.config
        _check_family(name, config)
        check_vocabulary(f"network LlamaPretrained of {name}", config, num_classes)
        rotary = model.model.rotary_emb
        variant = Variant(
            key_heads=config.num_key_value_heads,
            head_width=config.head_dim or config.hidden_size // config.num_attention_heads,
            epsilon=config.rms_norm_eps,
            tied=config.tie_word_embeddings,
            longest=config.max_position_embeddings,
            positions=dict(config.rope_parameters),
            frequencies=rotary.inv_freq.float(),
            rotary_scale=float(rotary.attention_scaling),
            special_tokens={name: getattr(config, name) for name in USUAL.special_tokens},
        )
        with torch.device("meta"):
            super().__init__(
                config.vocab_size,
                config.hidden_size,
                config.num_hidden_layers,
                config.num_attention_heads,
                config.intermediate_size,
                variant,
            )
        weights = model.state_dict()
        del model, rotary
        self.load_state_dict(_own_weights(self, weights), assign=True)
        self.source = "" if gguf_file else name
        if targets == ALL_LINEAR:
            inside = [layer for layer, one in self.named_modules() if isinstance(one, nn.Linear)]
            targets = [layer for layer in inside if layer != "lm_head"]
        add_chosen(self, kind, rank, alpha=alpha, targets=targets)


def _check_family(name: str, config: Any) -> None:
    """Refuse a model whose logits these blocks would not have."""
    given = f"network LlamaPretrained of {name}"
    use = f"write --model.network {HF_PREFIX}{name}, which any architecture can be given by"
    require(
        config.model_type in FAMILY,
        f"{given}, a model of the architecture {config.model_type}",
        f"its blocks are those of {' and '.join(FAMILY)}",
        use,
    )
    biased = any(getattr(config, part, False) for part in ("attention_bias", "mlp_bias"))
    window = getattr(config, "sliding_window", None)
    rope = config.rope_parameters["rope_type"]
    other = {
        "biases in linear layers": biased,
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
        f"a sliding window of {window} tokens": window is not None,
        f"rotary positions that depend on the length ({rope})": rope in ("dynamic", "longrope"),
    }
    found = [what for what, there in other.items() if there]
    require(
        not found, f"{given}, which has {' and '.join(found)}", "the project's Llama has none", use
    )


def _own_weights(network: Llama, weights: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    """Return the weights of transformers by the names of a network's parameters; ``weights`` is
    emptied meanwhile, so that a model is in memory once."""
    found = {}
    for name, shape in [(name, own.shape) for name, own in network.named_parameters()]:
        parts = [weights.pop(part) for part in network.rows_in_transformers(name, shape[0])]
        found[name] = nn.Parameter(parts[0] if len(parts) == 1 else torch.cat(parts))
    return found
