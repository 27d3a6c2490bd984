"""A linear layer on the first inputs of an example: the networks of FedMosaic's toy."""

from __future__ import annotations

from torch import Tensor, nn

from fl_lightning.errors import InputError


class FirstInputs(nn.Module):
    """W x of the first ``inputs`` values of x, without a bias.

    Args:
        num_classes: number of outputs.
        inputs: values of an example that are read, at least 1.
    """

    def __init__(self, num_classes: int, inputs: int = 4) -> None:
        super().__init__()
        if inputs < 1:
            raise InputError(
                f"FirstInputs(inputs={inputs})", "it reads 1 or more", "write inputs: 4"
            )
        self.inputs = inputs
        self.linear = nn.Linear(inputs, num_classes, bias=False)

    def forward(self, examples: Tensor) -> Tensor:
        """Map examples ``[B, D]``, D at least ``inputs``, to outputs ``[B, num_classes]``."""
        return self.linear(examples[:, : self.inputs])
