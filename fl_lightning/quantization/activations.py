"""Fake quantisation of the inputs of layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn


def fake_quantize(x: Tensor, bits: int) -> Tensor:
    """Round ``x`` to a symmetric grid of ``bits`` magnitude bits up to its largest magnitude.

    The backward pass is the identity (straight-through gradient).
    """
    kind = torch.finfo(x.dtype)
    least = max(1e-12, kind.tiny * kind.eps)  # in float16, 1e-12 is 0
    step = (x.detach().abs().amax() / (2**bits - 1)).clamp_min(least)
    return x + ((x / step).round() * step - x).detach()


@dataclass(frozen=True)
class QuantizedInput:
    """A hook before a layer that quantises its first input, given by position or by name; numbers
    that are whole, such as ids, stay.

    Args:
        bits: magnitude bits.
    """

    bits: int

    def __call__(self, module: nn.Module, args: Any, named: dict[str, Any]) -> Any:
        if args:
            return (self._quantized(args[0]), *args[1:]), named
        first = next((name for name in signature(module.forward).parameters if name in named), None)
        if first is None:
            return args, named
        return args, {**named, first: self._quantized(named[first])}

    def _quantized(self, x: Any) -> Any:
        is_values = isinstance(x, Tensor) and x.is_floating_point()
        return fake_quantize(x, self.bits) if is_values else x


def quantize_activations(network: nn.Module, weights: Iterable[str], bits: int) -> None:
    """Quantise the inputs of the layers that have these named weights, shared ones too, in every
    later forward pass; the inputs of an embedding are ids and stay."""
    quantized = {id(network.get_parameter(name)) for name in weights}
    for layer in network.modules():
        if id(layer._parameters.get("weight")) in quantized:
            layer.register_forward_pre_hook(QuantizedInput(bits), with_kwargs=True)


def keep_activations(network: nn.Module) -> None:
    """Undo :func:`quantize_activations`; other hooks stay."""
    for layer in network.modules():
        for key, hook in list(layer._forward_pre_hooks.items()):
            if isinstance(hook, QuantizedInput):
                del layer._forward_pre_hooks[key], layer._forward_pre_hooks_with_kwargs[key]
