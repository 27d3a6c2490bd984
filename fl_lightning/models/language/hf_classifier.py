"""Networks ``hf:NAME_OR_FOLDER`` on data of labelled text: models of transformers that classify
sequences.

They need the optional extra ``fl_lightning[language]``. ``B`` sequences of ``T`` tokens, ``C``
classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from warnings import catch_warnings, filterwarnings, simplefilter

import torch
from torch import Tensor, nn

from fl_lightning.config.near_names import require_choice
from fl_lightning.config.packaged import HF_PREFIX
from fl_lightning.errors import require
from fl_lightning.models.adapters import ALL_LINEAR, DEFAULT_ALPHA, DEFAULT_RANK, AdapterKind
from fl_lightning.models.language import hf


class TransformersClassifier(nn.Module):
    """A model of transformers for the classification of sequences, with adapters on a frozen base.

    The head (all layers outside the base model) is trained whole, also beside adapters. Where the
    weights have none for so many classes, it is drawn from torch's current generator, as adapters
    are. ``model`` is peft's ``PeftModel``, or without adapters the ``PreTrainedModel``.

    Args:
        num_classes: number of outputs C.
        name: name on the Hugging Face hub; a folder that ``save_pretrained`` wrote, or
            ``package:NAME``. A language model, such as BERT, becomes a classifier.
        rank: r of the adapters; 0: no adapters, all weights are trained.
        alpha: an adapter's factor is alpha / r.
        targets: ``all-linear`` layers of the base, or names of layers as peft takes them.
        dtype: precision of the weights. Adapters on a narrower base are float32.
        gradient_checkpointing: whether activations are computed again in the backward pass, which
            takes less memory and more time.
        adapter: kind of the adapters, see :class:`~fl_lightning.models.language.hf.TransformersLM`.

    Raises:
        InputError: the extra is not installed, the model cannot be loaded, or no layer has a name
            of ``targets``.
    """

    def __init__(
        self,
        num_classes: int,
        name: str,
        rank: int = DEFAULT_RANK,
        alpha: float = DEFAULT_ALPHA,
        targets: str | Sequence[str] = ALL_LINEAR,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        gradient_checkpointing: bool = False,
        adapter: AdapterKind = "lora",
    ) -> None:
        super().__init__()
        hf.check_adapters(name, rank, alpha)
        require_choice(dtype, hf.PRECISIONS, "dtype")
        model = hf.load(
            name,
            dtype,
            "SequenceClassification",
            num_labels=num_classes,
            ignore_mismatched_sizes=True,
            # vmap has no batching rule for fused kernels; they save 4 % of a step of 16 x 128
            # tokens
            attn_implementation="eager",
        )
        causal = any(getattr(module, "is_causal", False) for module in model.modules())
        windows = [
            getattr(model.config, key, None) for key in ("sliding_window", "local_attention")
        ]
        self.is_causal = causal and not model.config.is_encoder_decoder
        self.takes_whole_masks = model._supports_sdpa and not causal and not any(windows)
        if model.config.pad_token_id is None:
            ends = getattr(model.config, "eos_token_id", None) or 0  # Llama 3 has a list of them
            model.config.pad_token_id = ends[0] if isinstance(ends, list) else ends
        self.pad, self.name, self.positions = model.config.pad_token_id, name, _positions(model)
        with catch_warnings():  # as for TransformersLM
            simplefilter("ignore", FutureWarning)
            filterwarnings("ignore", "fan_in_fan_out is set to")
            if gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            if rank > 0:
                layers = _linear_layers(model) if targets == ALL_LINEAR else targets
                model = hf.adapt(model, name, adapter, rank, alpha, layers, _heads(model))
            self.model: Any = model

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits ``[B, C]``, which padding does not change.

        Args:
            inputs: ``input_ids`` int64 ``[B, T]`` and ``attention_mask`` bool ``[B, T]``, which is
                true where a token is no padding; padding stands on the right.

        Raises:
            InputError: there are more tokens than the model has positions.
        """
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        length = ids.shape[1]
        require(
            self.positions is None or length <= self.positions,
            f"{HF_PREFIX}{self.name} on sequences of {length} tokens",
            f"it has learned {self.positions} positions",
            f"write --data.max_length {self.positions}, or take a model with more",
        )
        # a causal model reads the last token that is no padding
        ids = ids.masked_fill(~mask, self.pad)
        if self.is_causal:  # no token sees the padding, which comes after it
            return self.model(input_ids=ids, use_cache=False).logits
        if self.takes_whole_masks:  # transformers makes these of a mask [B, T], but not under vmap
            hidden = ~mask[:, None, None, :].expand(-1, 1, length, -1)
            dtype = self.base.dtype
            mask = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
        return self.model(input_ids=ids, attention_mask=mask).logits

    @property
    def base(self) -> Any:
        """The ``PreTrainedModel``, whose layers hold the adapters."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model


def _heads(model: Any) -> list[str]:
    """Return the names of the layers with weights outside the base model."""
    return [
        name
        for name, child in model.named_children()
        if child is not model.base_model and next(child.parameters(), None) is not None
    ]


def _linear_layers(model: Any) -> list[str]:
    """Return the names of the linear layers of the base model."""
    from transformers.pytorch_utils import Conv1D

    return [
        f"{model.base_model_prefix}.{name}"
        for name, module in model.base_model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    ]


def _positions(model: nn.Module) -> int | None:
    """Return the number of positions that a model has learned; None where they are computed."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in (
            "position_embeddings",
            "wpe",
        ):
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - first
    return None
