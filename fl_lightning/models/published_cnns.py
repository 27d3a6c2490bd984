"""The convolutional networks of the field's benchmarks for images of 28x28 and 32x32 pixels.

Weights are drawn as torch draws them by default, as in the published code.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

KERNEL = 5  # side in pixels
DEFAULT_SHAPE = (3, 32, 32)


class PublishedCNN(nn.Module):
    """5x5 convolutions without padding, each with ReLU and 2x2 max pooling, then linear layers with
    ReLU.

    Args:
        num_classes: number of logits.
        widths: channels of each convolution.
        hidden: features of each linear layer but the last.
        example_shape: shape of one image ``(C, H, W)``, of 16x16 pixels or more with two
            convolutions.
    """

    def __init__(
        self,
        num_classes: int,
        widths: Sequence[int],
        hidden: Sequence[int],
        example_shape: tuple[int, ...],
    ) -> None:
        super().__init__()
        channels, *sides = example_shape
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((channels, *widths)):
            layers += [nn.Conv2d(inputs, outputs, KERNEL), nn.ReLU(), nn.MaxPool2d(2)]
            sides = [(side - KERNEL + 1) // 2 for side in sides]
        self.features = nn.Sequential(*layers, nn.Flatten())
        sizes = (widths[-1] * sides[0] * sides[1], *hidden)
        linear = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes)]
        self.hidden = nn.Sequential(*(layer for one in linear for layer in (one, nn.ReLU())))
        self.classifier = nn.Linear(sizes[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``[B, *example_shape]`` to logits ``[B, num_classes]``."""
        return self.classifier(self.hidden(self.features(images)))


class NIIDBenchCNN(PublishedCNN):
    """The LeNet-like ``simple-cnn`` of NIID-Bench (Li et al., ICDE 2022): 6 and 16 channels, 120
    and 84 features; 44 426 weights on grey 28x28 images of 10 classes, 62 006 on 32x32 colour
    images.

    Args:
        num_classes: number of logits.
        example_shape: shape of one image; the data give it. None: ``(3, 32, 32)``.
    """

    def __init__(self, num_classes: int, example_shape: tuple[int, ...] | None = None) -> None:
        super().__init__(num_classes, (6, 16), (120, 84), example_shape or DEFAULT_SHAPE)


class FedAvgCNN(PublishedCNN):
    """PFLlib's ``FedAvgCNN`` (Zhang et al., JMLR 2025): 32 and 64 channels, 512 features; 582 026
    weights on grey 28x28 images of 10 classes, 878 538 on 32x32 colour images.

    It is the CNN of McMahan et al. (AISTATS 2017) without its padding.

    Args:
        num_classes: number of logits.
        example_shape: shape of one image; the data give it. None: ``(3, 32, 32)``.
    """

    def __init__(self, num_classes: int, example_shape: tuple[int, ...] | None = None) -> None:
        super().__init__(num_classes, (32, 64), (512,), example_shape or DEFAULT_SHAPE)
