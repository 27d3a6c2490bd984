"""The shipped byte models: their weights, and the networks ``llama_tiny`` and
``llama_tiny_deep``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file
from torch import nn

from fl_lightning.errors import InputError, RunStopped, require
from fl_lightning.models.adapters import (
    ALL_LINEAR,
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    AdapterKind,
    add_chosen,
    kind_of,
)
from fl_lightning.models.language.llama import USUAL, Llama, Variant

BYTE_VOCABULARY = 259
"""The 256 bytes, then BOS (256), EOS (257) and PAD (258)."""
OF_BYTES = Variant(special_tokens={"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258})
WEIGHTS_FILE = Path(__file__).with_name("llama_tiny.safetensors")


class LlamaTiny(Llama):
    """The byte model of 96 features, 4 blocks and 468 096 weights, with adapters on a frozen base.

    ``benchmarks/language_base.py`` made the base. Its linear layers are ``qkv_proj``, ``o_proj``,
    ``gate_up_proj`` and ``down_proj``. With LoRA of rank 8 on all of them, 49 152 values travel.
    The smaller side of each is 96, the highest rank of ``pissa``, ``svft`` and ``spectral``.

    Args:
        num_classes: number of tokens of the data, 259 for bytes.
        rank: r of the adapters; 0: no adapters, all weights are trained. A list: client i has entry
            i modulo its length, where ``adapter_average`` takes that.
        alpha: an adapter's factor is alpha / r.
        targets: ``all-linear``, or names of linear layers.
        ffa: FFA-LoRA: A is frozen, and B alone is trained and travels; the same as ``adapter:
            ffa``.
        pretrained: whether to start from the shipped weights; if not, from weights of torch's
            current generator, for a vocabulary of any size.
        adapter: kind of the adapters: lora, ffa, pissa, adalora, svft or spectral.
        blocks: places of the blocks that are kept, from 0 and in their order; the others are not
            part of the network, which is shallower. None: all.

    Raises:
        InputError: the shipped weights are for another vocabulary, a setting of the adapters is
            refused, or a block is named that there is not.
        RunStopped: the file of the shipped weights is missing or damaged.
    """

    block_costs = "llama_tiny_branches"
    depth: ClassVar[int] = 4
    weights_file: ClassVar[Path] = WEIGHTS_FILE

    def __init__(
        self,
        num_classes: int,
        rank: int | list[int] = DEFAULT_RANK,
        alpha: float = DEFAULT_ALPHA,
        targets: str | Sequence[str] = ALL_LINEAR,
        ffa: bool = False,
        pretrained: bool = True,
        adapter: AdapterKind = "lora",
        blocks: list[int] | None = None,
    ) -> None:
        require(
            num_classes == BYTE_VOCABULARY or not pretrained,
            f"{self.weights_file.stem} on data of {num_classes} tokens",
            f"its weights are for bytes, {BYTE_VOCABULARY} tokens with BOS, EOS and PAD",
            "write pretrained: false, or a network with the data's tokeniser, as hf:NAME",
        )
        variant = OF_BYTES if num_classes == BYTE_VOCABULARY else USUAL
        super().__init__(num_classes, depth=self.depth, variant=variant)
        if pretrained:
            load_base(self, self.weights_file)
        if blocks is not None:
            self.layers = nn.ModuleList(self.layers[index] for index in self._kept(blocks))
        add_chosen(self, kind_of(adapter, ffa), rank, alpha=alpha, targets=targets)

    def _kept(self, blocks: list[int]) -> list[int]:
        blocks = list(blocks)
        require(
            blocks and sorted({*blocks} & {*range(len(self.layers))}) == blocks,
            f"blocks {blocks} of a network that has {len(self.layers)}",
            "blocks are kept by their places, counted from 0, each once and in their order",
            f"write {[0, *range(2, len(self.layers))]}, or leave it out",
        )
        return blocks


class LlamaTinyDeep(LlamaTiny):
    """The byte model of 96 features, 8 blocks and 911 232 weights, with adapters on a frozen base.

    Its base was made as that of :class:`LlamaTiny`, but each sequence of a step lacked each
    attention and each feed-forward layer with the chance 0.2: LayerDrop (Fan et al., ICLR 2020,
    arXiv 1909.11556) over branches. With LoRA of rank 8 on all linear layers, 98 304 values travel.
    Its settings are those of :class:`LlamaTiny`.
    """

    depth = 8
    weights_file = WEIGHTS_FILE.with_name("llama_tiny_deep.safetensors")


def load_base(network: Llama, path: Path = WEIGHTS_FILE) -> None:
    """Set the weights of a network without adapters from a file, in the network's own precision.

    Raises:
        InputError: the file lacks a tensor, has one more, or one of another shape.
        RunStopped: the file cannot be read.
    """
    try:
        weights = load_file(path)
    except Exception as error:  # safetensors and the operating system have errors of their own
        raise RunStopped(
            f"{path.name}: {error}",
            "the shipped weights are part of the package",
            "install the package again",
        ) from None
    own = network.state_dict()
    wrong = sorted(
        name
        for name in own.keys() | weights.keys()
        if name not in own or name not in weights or own[name].shape != weights[name].shape
    )
    if wrong:
        raise InputError(
            f"{path.name}: {', '.join(wrong)}",
            "a file has each tensor of the network in its shape, and no other",
            "make it with benchmarks/language_base.py",
        )
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(weights[name])
