"""Causal language models and their adapters. Outputs are the logits ``[B, T, V]`` of the next
token."""

from fl_lightning.models.adapters import LoRALinear, merged_lora
from fl_lightning.models.language.llama import Llama, TokenInputs
from fl_lightning.models.language.llama_pretrained import LlamaPretrained
from fl_lightning.models.language.tiny import BYTE_VOCABULARY, LlamaTiny, LlamaTinyDeep
