"""The two small federations on which methods run: images, and text for methods of language
models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.conformance.toy import Sizes, images, sgd, small_group_network, small_network
from fl_lightning.data import FederatedData
from fl_lightning.data.text.federation import TextData, TextExamples
from fl_lightning.data.text.tokens import padded
from fl_lightning.energy import CostLine, CostTable, MeasuredCost
from fl_lightning.methods import Method
from fl_lightning.models.adapters import add_adapter
from fl_lightning.models.language import Llama

SIZES = (30, 20, 40, 1, 25)
"""Training and validation examples of the first five of six clients."""


@dataclass(frozen=True)
class ToyFederation:
    """A federation of six clients with a few examples each.

    Args:
        name: of what the clients hold.
        data: makes the data set.
        network: makes the network, given the number of classes.
        overwrite: changes inputs and labels of the training examples at ``index``, int64 ``[n]``,
            and of all test examples.
    """

    name: str
    data: Callable[[], FederatedData]
    network: Callable[[int], nn.Module]
    overwrite: Callable[[Any, Tensor], None]

    def prepare(self, method: Method) -> Method:
        """Give the method the network and the optimiser of this federation, and return it."""
        method.network_spec, method.optimizer_spec = self.network, sgd(0.05)
        return method


class Sentences(TextData):
    """Sequences of 4 to 12 random letters; the first two are no targets."""

    dataset = "sentences"

    def __init__(self) -> None:
        self.groups = ("letters",)
        super().__init__(num_clients=6, partition=Sizes(*SIZES), batch_size=16, context=12)

    def read(self) -> tuple[TextExamples, TextExamples]:
        train, test = (self._examples(count, seed) for seed, count in enumerate((160, 20)))
        return train, test

    def _examples(self, count: int, seed: int) -> TextExamples:
        random = np.random.default_rng(seed)
        letters = np.frombuffer(b"abcdefgh", np.uint8)
        rows = [
            (random.choice(letters, size).tolist(), 2) for size in random.integers(4, 13, count)
        ]
        sequences = padded(rows, self.tokenizer.pad, self.context, cut=0)
        return TextExamples(sequences, np.zeros(count, np.int64), owner=None)


GROUPS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""The linear layers of a block."""


def small_llama(vocab_size: int) -> nn.Module:
    """Return a Llama of one block with 8 features and adapters of rank 2."""
    return add_adapter(Llama(vocab_size, width=8, depth=1, heads=2), "lora", rank=2)


def small_adalora(vocab_size: int) -> nn.Module:
    """Return a Llama of two blocks with 8 features and AdaLoRA with 3 directions for one layer of
    each."""
    network = Llama(vocab_size, width=8, depth=2, heads=2)
    return add_adapter(network, "adalora", rank=3, targets=["self_attn.o_proj"])


def measured(a: float, b: float) -> MeasuredCost:
    """Return a cost of a + b n millijoules."""
    return MeasuredCost(CostLine(1e-3 * a, 1e-3 * b), CostLine(1.5e-3 * a, 1.5e-3 * b))


def small_costs() -> CostTable:
    """Return costs of the layers of :func:`small_llama`, as a + b n millijoules: off 1 + 2 n, int8
    8 + n, high 2 + 6 n, and everything else 10 + n."""

    options = {"off": measured(1, 2), "int8": measured(8, 1), "high": measured(2, 6)}
    groups = dict.fromkeys((f"layers.0.{name}" for name in GROUPS), options)
    return CostTable(
        "modelled: CPU seconds x 15 W", "made up", "adapter", 12, groups, measured(10, 1)
    )


def small_branch_costs() -> CostTable:
    """Return costs of the branches of :func:`small_llama`, as a + b n millijoules: 4 + 2 n, and
    everything else 1 + n."""

    options = {"off": measured(0, 0), "int8": measured(4, 2), "high": measured(4, 2)}
    groups = dict.fromkeys(("layers.0.self_attn", "layers.0.mlp"), options)
    return CostTable(
        "modelled: CPU seconds x 15 W", "made up", "branch", 12, groups, measured(1, 1)
    )


def _overwrite_images(data: Any, index: Tensor) -> None:
    data.train_images[index] = 255 - data.train_images[index]
    data.train_target[index] = other_labels(data.train_target[index], data.num_classes)
    data.test_images[:] = 255 - data.test_images
    data.test_target[:] = other_labels(data.test_target, data.num_classes)


def _overwrite_text(data: Any, index: Tensor) -> None:
    for split, rows in (("train", index), ("test", slice(None))):
        sequences = data._sequences[split]
        for tokens in (sequences.input_ids, sequences.target):
            tokens[rows] = other_labels(tokens[rows], data.num_classes)


def other_labels(labels: Tensor, num_classes: int) -> Tensor:
    """Return the next class in place of each, and what is no class as it is.

    >>> other_labels(torch.tensor([0, 2, -100]), 3).tolist()
    [1, 0, -100]
    """
    return torch.where(labels < 0, labels, (labels + 1) % num_classes)


IMAGES = ToyFederation("images", images, small_network, _overwrite_images)
IMAGES_IN_GROUPS = replace(IMAGES, network=small_group_network)
TEXT = ToyFederation("text", Sentences, small_llama, _overwrite_text)
TEXT_OF_ADALORA = replace(TEXT, network=small_adalora)
