"""A language model that keeps the energy budget of each sequence in evaluation, and measures what
that has cost: what networks of switched layers and of switched branches have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fl_lightning.energy.budgets.measuring import Measurements
from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.metrics.text import IGNORED
from fl_lightning.models import MeasuredNetwork
from fl_lightning.models.language.generating import Generating
from fl_lightning.models.language.llama import TokenInputs


class BudgetKeeper(MeasuredNetwork, Generating):
    """``B`` sequences of ``T`` tokens, ``G`` groups or branches, ``V`` tokens of the vocabulary."""

    reads_tokens = True
    network: nn.Module

    @property
    def inner(self) -> nn.Module:
        return self.network

    def begin(self) -> None:
        """Forget what was expected and measured, as on another device."""
        self._expected: Tensor | None = None
        self._measured = Measurements()

    @property
    @abstractmethod
    def decider(self) -> nn.Module | None:
        """What chooses within a budget, whose parameters are counted; None where nothing does."""

    @abstractmethod
    def _read(self, inputs: TokenInputs) -> tuple[Tensor, Tensor, Lengths]:
        """Read whole sequences: their prompts, and the labelled tokens after them one by one.
        Return logits ``[B, T, V]``, options int64 ``[B, T, G]`` and lengths."""

    def expect(self, target: Tensor) -> None:
        self._expected, self._measured = target, Measurements()

    def measured(self) -> Mapping[str, Tensor]:
        self._expected = None
        found = self._measured.metrics()
        if self.decider is not None and "energy/joules" in found:
            count = sum(weight.numel() for weight in self.decider.parameters())
            found["energy/controller_parameters"] = torch.full_like(found["energy/joules"], count)
        return found

    @torch.no_grad()
    def options_of(self, inputs: TokenInputs, target: Tensor) -> tuple[Tensor, Lengths]:
        """Return the option of each group or branch at each token of sequences that are read within
        their budgets, int64 ``[B, T, G]``, and their lengths.

        Args:
            inputs: of the network.
            target: labels ``[B, T]``.
        """
        self.expect(target)
        _, choices, lengths = self._read(inputs)
        self._expected = None
        return choices, lengths

    def lengths_of(self, ids: Tensor) -> Lengths:
        """Return the lengths of sequences ``[B, T]`` by the labels that are expected; other
        sequences than these are prompts."""
        target = self._expected
        if target is None or len(target) != len(ids):
            target = torch.full_like(ids, IGNORED)
        return Lengths.of(target, ids.shape[1])


def ids_of(inputs: TokenInputs) -> Tensor:
    """Return the token ids ``[B, T]`` of a network's inputs."""
    return inputs if isinstance(inputs, Tensor) else inputs["input_ids"]
