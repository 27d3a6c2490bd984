"""A residual MLP of any width and depth for small images.

Federations whose clients have networks of different sizes take all of them from this family.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from fl_lightning.config.constraints import at_least
from fl_lightning.config.recorded import Recorded

GRID_SIDE = 8  # side of the grid of pixels that the first layer sees


class ResidualMLP(Recorded, nn.Module):
    """A linear layer, residual blocks and a linear layer on images averaged to an 8x8 grid.

    Args:
        num_classes: number of logits.
        width: features between the blocks; inside a block twice as many.
        depth: number of blocks.
        example_shape: shape of one image, whose first number is its channels; the data give it.
            None: 3 channels.
    """

    def __init__(
        self,
        num_classes: int,
        width: Annotated[int, at_least(1)] = 64,
        depth: Annotated[int, at_least(1)] = 4,
        example_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        channels = example_shape[0] if example_shape else 3
        self.stem = nn.Linear(channels * GRID_SIDE**2, width)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[B, channels, H, W]`` of 8x8 pixels or more to logits ``[B, C]``."""
        height, width = images.shape[-2:]
        stride = (height // GRID_SIDE, width // GRID_SIDE)
        # this kernel makes the grid exactly 8x8 for every image size
        kernel = (height - (GRID_SIDE - 1) * stride[0], width - (GRID_SIDE - 1) * stride[1])
        pixels = avg_pool2d(images, kernel, stride).flatten(1)
        return self.classifier(self.norm(self.blocks(self.stem(pixels))))


class ResidualBlock(nn.Module):
    """The residual block ``x + W2 gelu(W1 norm(x))``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)
