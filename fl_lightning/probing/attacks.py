"""Adversarial examples within ``eps`` of every pixel (L-infinity), in pixel space [0, 1].

    FGSM   x + eps * sign(grad_x L(x, y))                                       Goodfellow et al., ICLR 2015
    PGD    x_{i+1} = clip(x_i + step * sign(grad_x L(x_i, y))), random start     Madry et al., ICLR 2018

L is the cross-entropy, clip keeps x within eps and within [0, 1]. Pure functions of a network as ``forward``:
pixels to logits. ``B`` batch, ``C`` classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Forward = Callable[[Tensor], Tensor]
EPS = 2 / 255
STEPS = 10


def fgsm(forward: Forward, pixels: Tensor, target: Tensor, eps: float = EPS) -> Tensor:
    """One step of the gradient's sign.

    Args:
        forward: pixels ``[B, ...]`` to logits ``[B, C]``.
        pixels: in [0, 1].
        target: int64 ``[B]``.
        eps: largest change of a pixel.
    """
    _, gradient = _loss_and_gradient(forward, pixels, target)
    return (pixels + eps * gradient.sign()).clamp(0, 1)


def pgd(
    forward: Forward,
    pixels: Tensor,
    target: Tensor,
    start: Tensor,
    eps: float = EPS,
    steps: int = STEPS,
    share: float = 0.25,
) -> Tensor:
    """The example of highest loss among the steps and FGSM's, so it is never the weaker attack.

    Args:
        forward, pixels, target, eps: as in :func:`fgsm`.
        start: uniform in [-1, 1], of the form of ``pixels``: where in the eps-ball it begins.
        steps: number of steps.
        share: of eps that one step goes; 0.25 over 10 steps is 2.5 times across, as Madry et al. have it.
    """
    best = fgsm(forward, pixels, target, eps)
    highest, _ = _loss_and_gradient(forward, best, target)
    x = (pixels + eps * start).clamp(0, 1)
    for step in range(steps + 1):
        loss, gradient = _loss_and_gradient(forward, x, target)
        higher = (loss > highest).view(-1, *[1] * (x.ndim - 1))
        best, highest = torch.where(higher, x, best), torch.maximum(loss, highest)
        if step < steps:
            x = (x + share * eps * gradient.sign()).clamp(pixels - eps, pixels + eps).clamp(0, 1)
    return best


def _loss_and_gradient(forward: Forward, pixels: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each example ``[B]``, and its gradient by the pixels; of a sum, so that examples do not depend
    on each other."""
    x = pixels.detach().requires_grad_(True)
    with torch.enable_grad():
        loss = F.cross_entropy(forward(x), target, reduction="none")
        (gradient,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach(), gradient
