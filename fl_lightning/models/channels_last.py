"""Channels-last memory layout for convolutional networks, and for the gradients of their pooling
layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

POOLING_LAYERS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
"""Layers whose backward pass on a CPU is slow if input and gradient differ in layout."""


def lay_out(network: nn.Module) -> nn.Module:
    """Convert a convolutional network to channels last and return it; return others unchanged.

    Small networks with small batches train 5 to 12 % faster, deep networks up to twice as fast. The
    outputs of pooling layers, which are found by class, pass through
    :func:`gradient_channels_last`.
    """
    modules = list(network.modules())
    if not any(isinstance(module, nn.Conv2d) for module in modules):
        return network
    for module in modules:
        if (
            isinstance(module, POOLING_LAYERS)
            and _after_pooling not in module._forward_hooks.values()
        ):
            module.register_forward_hook(_after_pooling)
    return network._apply(_converted)


def gradient_channels_last(pooled: Tensor) -> Tensor:
    """Make the gradient of ``pooled`` channels last if ``pooled`` is, on a CPU; return ``pooled``.

    Gradients that come from ``flatten`` are contiguous. A pooling layer whose input and gradient
    differ in layout copies its input and its result, which takes longer than the rest of its
    backward pass. Converting the gradient, which is often a quarter as large, is cheaper. Under
    ``vmap`` tensors do not require gradients here, so the gradients of stacked clients keep the
    layout that torch gives them.

    Args:
        pooled: output of a pooling layer, ``[B, C, H, W]``.
    """
    if pooled.requires_grad and pooled.device.type == "cpu" and not pooled.is_contiguous():
        pooled.register_hook(_channels_last)
    return pooled


def _converted(tensor: Tensor) -> Tensor:
    # ``Module.to`` would convert tensors of five dimensions too, which have no such order
    return tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _after_pooling(module: nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor) and output.ndim == 4:
        gradient_channels_last(output)


def _channels_last(gradient: Tensor) -> Tensor:
    # ``contiguous(memory_format=...)`` has no batching rule for ``vmap``
    return gradient.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
