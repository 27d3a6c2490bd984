"""Which option each token takes at each layer of a network, and where all layers read it.

``B`` sequences, ``T`` tokens of each, ``G`` switched layers, 3 options in the order of ``OPTIONS``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_lightning.energy.options import OPTIONS
from fl_lightning.errors import MisuseError


class TokenPlan(ABC):
    """What says which option each token takes at each layer, when the layer is reached.

    Layers ask for weights first, and for choices where there are none. Both may follow from the
    layer's own input.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """B, T and G."""

    def weights_at(self, group: int, x: Tensor) -> Tensor | None:
        """Return the weights of one layer's options ``[B, T, 3]``; None where there are choices.

        Args:
            group: g, the layer.
            x: its input ``[B, T, in]``.
        """
        return None

    @abstractmethod
    def choices_at(self, group: int, x: Tensor) -> tuple[Tensor, Sequence[int]]:
        """Return the choices of one layer, int64 ``[B, T]``, and how many tokens take each option.

        Args:
            group: g, the layer.
            x: its input ``[B, T, in]``.
        """


def counted(choices: Tensor) -> list[int]:
    """Return how many of some choices, int64 of any shape, are each of the options."""
    return torch.bincount(choices.flatten(), minlength=len(OPTIONS)).tolist()


@dataclass(frozen=True, slots=True)
class Plan(TokenPlan):
    """The options of all tokens at all layers: weights for training, or choices for evaluation.

    Args:
        weights: float ``[B, T, G, 3]``; a layer's output is the sum of its options' outputs times
            them, and they get a gradient. Straight-through weights are one-hot in the forward pass.
        choices: int64 ``[B, T, G]``, 0 to 2; an option computes those tokens alone that chose it.

    Raises:
        MisuseError: there are both or neither, a shape is wrong, or a choice is none of the
            options.
    """

    weights: Tensor | None = None
    choices: Tensor | None = None
    counts: list[list[int]] = field(init=False, default_factory=list)
    """Number of tokens that chose each option at each layer, ``[G][3]``; empty for a plan of
    weights."""
    by_group: list[Tensor] = field(init=False, default_factory=list, repr=False)
    """Choices of each layer, ``[B, T]``: one call for all layers takes less time than one at
    each."""

    def __post_init__(self) -> None:
        given = [tensor for tensor in (self.weights, self.choices) if tensor is not None]
        shape = tuple(given[0].shape) if len(given) == 1 else None
        right = shape is not None and (
            (len(shape) == 4 and shape[3] == len(OPTIONS))
            if self.choices is None
            else len(shape) == 3
        )
        if not right:
            raise MisuseError(
                f"a plan of {len(given)} tensors of shapes {[tuple(tensor.shape) for tensor in given]}",
                "a plan has weights [B, T, G, 3], or choices [B, T, G]",
                "give one of them",
            )
        if self.choices is not None:
            options = torch.arange(len(OPTIONS), device=self.choices.device)
            counts = (self.choices.flatten(0, 1).unsqueeze(-1) == options).sum(0).tolist()
            if any(sum(row) != self.choices.shape[0] * self.choices.shape[1] for row in counts):
                raise MisuseError(
                    f"choices from {int(self.choices.min())} to {int(self.choices.max())}",
                    f"0 is {OPTIONS[0]}, 1 is {OPTIONS[1]} and 2 is {OPTIONS[2]}",
                    "give indices of OPTIONS",
                )
            self.counts.extend(counts)
            self.by_group.extend(self.choices.unbind(2))

    @property
    def shape(self) -> tuple[int, ...]:
        """B, T and G."""
        tensor = self.choices if self.weights is None else self.weights
        assert tensor is not None
        return tensor.shape[:3]

    def weights_at(self, group: int, x: Tensor) -> Tensor | None:
        return None if self.weights is None else self.weights[:, :, group]

    def choices_at(self, group: int, x: Tensor) -> tuple[Tensor, Sequence[int]]:
        assert self.choices is not None, "the plan has weights"
        return self.by_group[group].to(x.device), self.counts[group]


class Switchboard:
    """The plan that all switched layers of a network read.

    Args:
        groups: G, number of switched layers.
    """

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self._plan: TokenPlan | None = None

    @property
    def plan(self) -> TokenPlan | None:
        """The plan of the tokens that are computed next; None: every layer is the adapted one.

        Raises:
            MisuseError: on setting a plan for another number of layers.
        """
        return self._plan

    @plan.setter
    def plan(self, plan: TokenPlan | None) -> None:
        if plan is not None and plan.shape[2] != self.groups:
            raise MisuseError(
                f"a plan for {plan.shape[2]} layers on a network of {self.groups} switched layers",
                "a plan has options for each of them",
                f"give weights [B, T, {self.groups}, 3] or choices [B, T, {self.groups}]",
            )
        self._plan = plan

    @contextmanager
    def using(self, plan: TokenPlan | None) -> Iterator[None]:
        """Set a plan within the block; afterwards it is the one from before."""
        before, self.plan = self.plan, plan
        try:
            yield
        finally:
            self.plan = before
