"""Adversarial examples within ``eps`` of every pixel (L-infinity), in pixel space [0, 1].

    FGSM   clip(x + eps * sign(grad_x L(x, y)))
           Goodfellow et al., ICLR 2015
    PGD    x_{i+1} = clip(x_i + step * sign(grad_x L(x_i, y))), random start
           Madry et al., ICLR 2018

L is the cross-entropy; clip keeps x within eps of the original and within [0, 1]. The attacks are
pure functions of a network that maps pixels to logits. ``B`` batch, ``C`` classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Forward = Callable[[Tensor], Tensor]
EPS = 2 / 255  # largest change of a pixel in [0, 1]
STEPS = 10  # steps of PGD


def fgsm(forward: Forward, pixels: Tensor, target: Tensor, eps: float = EPS) -> Tensor:
    """Return the pixels after one step along the sign of the gradient.

    Args:
        forward: pixels ``[B, ...]`` to logits ``[B, C]``.
        pixels: in [0, 1], or beyond it where the run's own images are noisy.
        target: int64 ``[B]``.
        eps: largest change of a pixel.
    """
    _, gradient = _loss_and_gradient(forward, pixels, target)
    return _kept_in_range(pixels + eps * gradient.sign(), pixels)


def pgd(
    forward: Forward,
    pixels: Tensor,
    target: Tensor,
    start: Tensor,
    eps: float = EPS,
    steps: int = STEPS,
    share: float = 0.25,
) -> Tensor:
    """Return the pixels with the highest loss among all PGD steps and FGSM.

    The result is therefore never weaker than FGSM.

    Args:
        forward: pixels ``[B, ...]`` to logits ``[B, C]``.
        pixels: in [0, 1], or beyond it where the run's own images are noisy.
        target: int64 ``[B]``.
        start: starting point relative to eps, uniform in [-1, 1], in the shape of ``pixels``.
        eps: largest change of a pixel.
        steps: number of steps.
        share: length of a step relative to eps; 10 steps of 0.25 cover 2.5 eps, as in Madry et al.
    """
    best = fgsm(forward, pixels, target, eps)
    highest, _ = _loss_and_gradient(forward, best, target)
    x = _kept_in_range(pixels + eps * start, pixels)
    for step in range(steps + 1):
        loss, gradient = _loss_and_gradient(forward, x, target)
        higher = (loss > highest).view(-1, *[1] * (x.ndim - 1))
        best, highest = torch.where(higher, x, best), torch.maximum(loss, highest)
        if step < steps:
            x = (x + share * eps * gradient.sign()).clamp(pixels - eps, pixels + eps)
            x = _kept_in_range(x, pixels)
    return best


def _kept_in_range(changed: Tensor, pixels: Tensor) -> Tensor:
    """Return changed pixels in [0, 1]; one that was beyond it moves no further out, and is not
    brought back by more than its change."""
    return changed.clamp(pixels.clamp(max=0), pixels.clamp(min=1))


def _loss_and_gradient(forward: Forward, pixels: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each example ``[B]`` and its gradient with respect to the pixels, but for
    a power of two of each example.

    The gradient is that of the sum of the losses, so it does not depend on other examples of the
    batch. With these powers, that of an example which is answered with confidence does not
    underflow in a network that computes in float16; in float32 they change no sign.
    """
    x = pixels.detach().requires_grad_(True)
    with torch.enable_grad():
        logits = forward(x)
        loss = F.cross_entropy(logits, target, reduction="none")
        (slope,) = torch.autograd.grad(loss.sum(), logits)
        largest = slope.abs().amax(tuple(range(1, slope.ndim)), keepdim=True)
        power = (torch.frexp(largest).mantissa / largest).nan_to_num(1.0, posinf=2.0**126)
        (gradient,) = torch.autograd.grad(logits, x, power * slope)
    return loss.detach(), gradient
