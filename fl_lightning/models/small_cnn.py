"""A convolutional network for small images with 34 000 weights; a step takes milliseconds on a
CPU."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import InputError
from fl_lightning.models.channels_last import gradient_channels_last

Norm = Literal["group", "batch", "none"]
GRID_SIDE = 4  # side of the grid of features that the linear layer sees


class SmallCNN(Recorded, nn.Module):
    """Three 3x3 convolutions (strides 2, 2, 1), features averaged to a 4x4 grid, one linear layer.

    It uses strides and plain average pooling because their backward passes are deterministic on
    every device. It uses a grid instead of one mean over all positions because averaged clients
    learn far slower with the latter.

    Args:
        num_classes: number of logits.
        norm: after each convolution: group (no statistics to average over clients), batch or none.
        width: channels of the first convolution; the others have 2 and 4 times as many.
        example_shape: shape of one image, whose first number is its channels; the data give it.
            None: 3 channels.

    Raises:
        InputError: the width is no positive multiple of 4.
    """

    def __init__(
        self,
        num_classes: int,
        norm: Norm = "group",
        width: int = 16,
        example_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        if width < 4 or width % 4:
            raise InputError(
                f"width={width}", "a positive multiple of 4, the number of groups", "write e.g. 16"
            )
        layers: list[nn.Module] = []
        channels = example_shape[0] if example_shape else 3
        for factor, stride in ((1, 2), (2, 2), (4, 1)):
            layers.append(
                nn.Conv2d(
                    channels, factor * width, 3, stride=stride, padding=1, bias=norm == "none"
                )
            )
            channels = factor * width
            if norm != "none":
                layers.append(
                    nn.GroupNorm(4, channels) if norm == "group" else nn.BatchNorm2d(channels)
                )
            layers.append(nn.ReLU())
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels * GRID_SIDE**2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[B, channels, H, W]`` of 16x16 pixels or more to logits ``[B, C]``."""
        maps = self.features(images)
        height, width = maps.shape[-2:]
        stride = (height // GRID_SIDE, width // GRID_SIDE)
        # this kernel makes the grid exactly 4x4 for every image size
        kernel = (height - (GRID_SIDE - 1) * stride[0], width - (GRID_SIDE - 1) * stride[1])
        return self.classifier(gradient_channels_last(avg_pool2d(maps, kernel, stride)).flatten(1))
