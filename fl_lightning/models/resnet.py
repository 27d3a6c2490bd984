"""ResNet-20 as He et al. (CVPR 2016, section 4.2) describe it for CIFAR."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from fl_lightning.config.recorded import Recorded

Shortcut = Literal["projection", "A"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut.

    Where the shape changes, shortcut ``A`` subsamples the input and pads the channels with zeros.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.extra = stride, outputs - inputs
        self.shortcut: nn.Sequential | None = None
        if self.extra and shortcut == "projection":
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.shortcut is not None:
            skip = self.shortcut(x)
        elif self.extra:
            half = self.extra // 2
            skip = pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.extra - half)
            )
        else:
            skip = x
        return relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))) + skip)


class ResNet20(Recorded, nn.Module):
    """Three stages of three blocks with 16, 32 and 64 channels.

    Args:
        num_classes: number of logits.
        shortcut: projection (1x1 convolution and BatchNorm; 272 474 weights with 10 classes) or A
            (no weights; 269 722).
        example_shape: shape of one image, whose first number is its channels; the data give it.
            None: 3 channels.
    """

    def __init__(
        self,
        num_classes: int,
        shortcut: Shortcut = "projection",
        example_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        inputs = example_shape[0] if example_shape else 3
        self.stem = nn.Sequential(
            nn.Conv2d(inputs, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        blocks, channels = [], 16
        for outputs in (16, 32, 64):
            for position in range(3):
                stride = 2 if position == 0 and outputs > 16 else 1
                blocks.append(BasicBlock(channels, outputs, stride=stride, shortcut=shortcut))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[B, channels, H, W]`` to logits ``[B, C]``."""
        return self.classifier(self.blocks(self.stem(images)).mean(dim=(2, 3)))
