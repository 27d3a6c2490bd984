"""The network that is exported, and what is said of it beside its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fl_lightning.data import FederatedData
from fl_lightning.data.text.tokens import HuggingFaceTokenizer


@dataclass(frozen=True)
class TrainedModel:
    """A trained network on the CPU, in evaluation mode.

    Args:
        network: the network.
        data: what it was trained on; of them come the form of inputs, names of classes and a
            tokeniser.
        about: where it comes from, ready for JSON: method, run, round, client ...
        base_moved: whether the frozen weights under adapters are no longer those of the model that
            is named.
    """

    network: nn.Module
    data: FederatedData
    about: dict[str, Any] = field(default_factory=dict)
    base_moved: bool = False

    @property
    def reads_tokens(self) -> bool:
        """Whether examples are sequences of token ids, the network a language model."""
        return self.data.task.of_tokens

    @property
    def example(self) -> Any:
        """Two examples on the CPU, of the test set where it has as many: token ids int64 ``[2,
        T]``, or what the data show a network."""
        inputs = self.data.example_inputs()
        if len(self.data.test_target) >= 2:
            inputs = self.data.inputs("test", torch.arange(2, device=self.data.device))
        inputs = tree_map(Tensor.cpu, inputs)
        return inputs["input_ids"] if self.reads_tokens and isinstance(inputs, dict) else inputs

    @torch.no_grad()
    def outputs(self, inputs: Any) -> Tensor:
        """Return what the network makes of inputs."""
        return self.network(inputs)

    @property
    def tokenizer(self) -> Any:
        """The tokeniser of transformers that the data were read with; None if there is none."""
        tokenizer = getattr(self.data, "tokenizer", None)
        return tokenizer.tokenizer if isinstance(tokenizer, HuggingFaceTokenizer) else None

    def preprocessing(self) -> dict[str, Any]:
        """Return what a program has to know of inputs and outputs, ready for JSON."""
        form = self.data.form()
        outputs = self.data.num_classes
        if self.reads_tokens:  # a language model may have more tokens than its data
            outputs = self.outputs(self.example).shape[-1]
        found: dict[str, Any] = {
            "example_shape": list(self.data.example_shape),
            "num_outputs": outputs,
            "classes": [str(name) for name in form.classes],
        }
        if form.moments:
            mean, std = form.moments
            found["pixels"] = {"divided_by": 255, "mean": list(mean), "std": list(std)}
        if form.columns:
            found["columns"] = columns = dict(form.columns)
            target = getattr(self.data, "target", None)
            if target is not None and not self.data.task.has_classes:
                mean, std = columns.pop(target, (0.0, 1.0))  # as it is, where it has none
                found["target"] = {"name": target, "mean": mean, "std": std}
        return found
