"""Fake quantisation of the inputs of layers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def fake_quantize(x: Tensor, bits: int) -> Tensor:
    """Round ``x`` to a symmetric grid of ``bits`` magnitude bits up to its largest magnitude.

    The backward pass is the identity (straight-through gradient).
    """
    step = (x.detach().abs().amax() / (2**bits - 1)).clamp_min(1e-12)
    return x + ((x / step).round() * step - x).detach()


def quantize_activations(network: nn.Module, weights: Iterable[str], bits: int) -> None:
    """Quantise the inputs of the layers that own these named weights in every later forward pass;
    the inputs of an embedding are ids and stay."""
    for name in weights:
        layer = network.get_submodule(name.rpartition(".")[0])
        if not isinstance(layer, nn.Embedding):
            layer.register_forward_pre_hook(
                lambda module, args: (fake_quantize(args[0], bits), *args[1:])
            )
