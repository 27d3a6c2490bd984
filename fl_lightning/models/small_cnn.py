"""A small convolutional network for small images: 34 000 weights, milliseconds a step on a CPU."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from fl_lightning.errors import InputError
from fl_lightning.models.channels_last import gradient_channels_last

Norm = Literal["group", "batch", "none"]
GRID = 4  # side of the grid of features that the linear layer sees


class SmallCNN(nn.Module):
    """Three 3x3 convolutions (strides 2, 2, 1), features averaged to a 4x4 grid, one linear layer. Images of
    16 pixels or more.

    Strides and plain average pooling, because their backward passes are deterministic on every device; a grid
    instead of one mean over all positions, because averaged clients learn far slower through the latter.

    Args:
        num_classes: number of logits.
        norm: after each convolution: group (no statistics to average over clients), batch or none.
        width: channels of the first convolution; the others have 2 and 4 times as many.
    """

    def __init__(self, num_classes: int, norm: Norm = "group", width: int = 16) -> None:
        super().__init__()
        if norm not in ("group", "batch", "none"):
            raise InputError(f"norm={norm!r}", "one of group, batch, none", "write group, the default")
        if width < 4 or width % 4:
            raise InputError(
                f"width={width}", "a positive multiple of 4, the number of groups", "write e.g. 16"
            )
        layers: list[nn.Module] = []
        channels = 3
        for factor, stride in ((1, 2), (2, 2), (4, 1)):
            layers.append(
                nn.Conv2d(channels, factor * width, 3, stride=stride, padding=1, bias=norm == "none")
            )
            channels = factor * width
            if norm != "none":
                layers.append(nn.GroupNorm(4, channels) if norm == "group" else nn.BatchNorm2d(channels))
            layers.append(nn.ReLU())
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels * GRID**2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 3, H, W]`` to logits ``[B, C]``."""
        maps = self.features(images)
        height, width = maps.shape[-2:]
        stride = (height // GRID, width // GRID)
        # a kernel that covers what the stride leaves over gives exactly 4x4 whatever the size
        kernel = (height - (GRID - 1) * stride[0], width - (GRID - 1) * stride[1])
        return self.classifier(gradient_channels_last(avg_pool2d(maps, kernel, stride)).flatten(1))
