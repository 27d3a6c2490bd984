"""A multilayer perceptron for examples of any shape: the default network of tables."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Annotated

from torch import Tensor, nn

from fl_lightning.config.constraints import at_least
from fl_lightning.config.recorded import Recorded


class MLP(Recorded, nn.Module):
    """Linear layers with ReLU between them on examples that are flattened.

    Args:
        num_classes: number of outputs.
        example_shape: shape of one example; the data give it.
        width: features of a hidden layer, at least 1.
        depth: number of hidden layers; 0 is a linear model.
    """

    def __init__(
        self,
        num_classes: int,
        example_shape: tuple[int, ...] = (1,),
        width: Annotated[int, at_least(1)] = 64,
        depth: Annotated[int, at_least(0)] = 2,
    ) -> None:
        super().__init__()
        sizes = [prod(example_shape), *[width] * depth]
        hidden = [layer for n, m in pairwise(sizes) for layer in (nn.Linear(n, m), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], num_classes))

    def forward(self, examples: Tensor) -> Tensor:
        """Map examples ``[B, *example_shape]``, of any kind of number, to outputs ``[B,
        num_classes]``."""
        return self.layers(examples if examples.is_floating_point() else examples.float())
