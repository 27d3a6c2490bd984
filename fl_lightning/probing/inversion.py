"""Images from the updates that clients send: Geiping et al., "Inverting Gradients", NeurIPS 2020.

The attacker knows the network, its weights and the labels, and looks for images whose gradient has
the direction of the update:

    argmin_x  1 - cos(grad_w L(x, y), -u) + a TV(x),      x in [0, 1]

by Adam on the sign of the gradient. Of a sum over K clients it looks for K images at once. An
update of one step on one image is the easiest to invert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.data import ImageData
from fl_lightning.tasks import Task

STEPS, LR, DECAY = 400, 0.1, 0.1
DECAY_AT = (3 / 8, 5 / 8, 7 / 8)
TOTAL_VARIATION = 0.01
"""a: how much smooth images are preferred."""


@dataclass(frozen=True)
class Attacker:
    """One who sees updates and knows everything else but the images.

    Args:
        network: the clients' network, in the mode in which they train.
        weights: tensors that the clients started from, by name.
        task: whose loss they minimise.
        images: how pixels in [0, 1] become inputs, and their shape.
    """

    network: nn.Module
    weights: Mapping[str, Tensor]
    task: Task
    images: ImageData

    def reconstruct(
        self, update: Mapping[str, Tensor], labels: Tensor, start: Tensor, steps: int = STEPS
    ) -> Tensor:
        """Return the pixels whose gradient is closest in direction to an update, ``[K, 3, side,
        side]``.

        Args:
            update: what a sum over K clients moved, by the names of parameters.
            labels: int64 ``[K]``.
            start: pixels to begin with, in the shape of the result.
            steps: of Adam.
        """
        seen = torch.cat([-tensor.reshape(-1) for tensor in update.values()])
        seen = seen / seen.norm().clamp_min(1e-30)
        pixels = start.clone().requires_grad_(True)
        optimizer = torch.optim.Adam([pixels], lr=LR)
        milestones = [int(steps * share) for share in DECAY_AT]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, DECAY)
        for _ in range(steps):
            gradient = self.gradient(pixels, labels, list(update))
            distance = 1 - gradient @ seen / gradient.norm().clamp_min(1e-30)
            loss = distance + TOTAL_VARIATION * total_variation(pixels)
            pixels.grad = torch.autograd.grad(loss, pixels)[0].sign()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                pixels.clamp_(0, 1)
        return pixels.detach()

    def gradient(self, pixels: Tensor, labels: Tensor, names: Sequence[str]) -> Tensor:
        """Return the gradient of the loss by the named parameters as one vector, which can be
        differentiated by the pixels."""
        weights = {
            name: tensor.detach().requires_grad_(name in names)
            for name, tensor in self.weights.items()
        }
        with torch.enable_grad():
            outputs = functional_call(self.network, weights, (self.images.normalise(pixels),))
            found = torch.autograd.grad(
                self.task.loss(outputs, labels),
                [weights[name] for name in names],
                create_graph=True,
            )
        return torch.cat([tensor.reshape(-1) for tensor in found])


def total_variation(pixels: Tensor) -> Tensor:
    """Return the mean difference of neighbouring pixels, of rows plus of columns."""
    return pixels.diff(dim=-1).abs().mean() + pixels.diff(dim=-2).abs().mean()


def psnr(found: Tensor, images: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of the best of several reconstructions of each
    image.

    Args:
        found: pixels in [0, 1], ``[J, ...]``.
        images: ``[K, ...]``.

    Returns:
        ``[K]``.
    """
    error = torch.cdist(images.flatten(1), found.flatten(1)).square() / images[0].numel()
    return -10 * error.min(dim=1).values.clamp_min(1e-12).log10()


def recognised(found: Tensor, images: Tensor, others: Tensor) -> float:
    """Return the share of images that are nearer to some reconstruction than all other images are.

    Args:
        found: pixels in [0, 1], ``[J, ...]``.
        images: ``[K, ...]``, those that were looked for.
        others: ``[N, ...]``, none of ``images``.
    """
    nearest = torch.cdist(found.flatten(1), torch.cat([images, others]).flatten(1)).argmin(dim=1)
    return len(set(nearest.tolist()) & set(range(len(images)))) / len(images)
