"""What every adapted layer is: a frozen linear layer, and something trained that is added to its
weights.

    h = W x + dW x,    W [out, in],  dW [out, in]

The names of the base's tensors are those of peft's files: ``base_layer.weight`` and
``base_layer.bias``. Nothing below the first adapter of a network needs a gradient, so torch keeps
none of its activations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fl_lightning.errors import InputError, require

ALL_LINEAR = "all-linear"
DEFAULT_RANK = 8
DEFAULT_ALPHA = 16.0


class AdaptedLinear(nn.Module, ABC):
    """A frozen linear layer with an adapter; a subclass says what is added.

    Args:
        base: the linear layer; this class freezes it.
    """

    removable = True
    """Declares that W without dW is a layer of its own. It is not where the adapter took a part of
    W."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.merged = False
        self._unmerged: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs ``[..., in]`` to outputs ``[..., out]``."""
        if self.merged:
            return self.base_layer(x)
        return self.base_layer(x) + self.added(x)

    @abstractmethod
    def added(self, x: Tensor) -> Tensor:
        """Return dW x, ``[..., out]``, of inputs ``[..., in]``."""

    @abstractmethod
    def product(self) -> Tensor:
        """Return what the adapter adds to W: dW, ``[out, in]``."""

    def low_rank(self) -> tuple[Tensor, Tensor, float]:
        """Return A ``[r, in]``, B ``[out, r]`` and c of LoRA's form of what the adapter adds, dW =
        c B A.

        Override where r is less than in.
        """
        product = self.product()
        return torch.eye(product.shape[1]).to(product), product, 1.0

    def full_weight(self) -> Tensor:
        """Return W + dW, ``[out, in]``."""
        return self.base_layer.weight if self.merged else self.base_layer.weight + self.product()

    def unmerged_weight(self) -> Tensor:
        """Return W, ``[out, in]``, also where the adapter is merged into the base."""
        return self.base_layer.weight if self._unmerged is None else self._unmerged


def adapter_layers(network: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the adapted layers of any kind by name, in the order of the network."""
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, AdaptedLinear)
    }


def adapt_linears(
    network: nn.Module,
    targets: str | Sequence[str],
    make: Callable[[str, nn.Linear], AdaptedLinear],
) -> nn.Module:
    """Freeze a network and put an adapted layer in the place of linear ones.

    Args:
        network: the network; it is changed in place.
        targets: ``all-linear``, or the last parts of the layers' names, as ``[qkv_proj, o_proj]``.
        make: returns the adapted layer of a layer's name and the linear layer.

    Returns:
        The network; if it is itself a linear layer, the adapted layer in place of it.

    Raises:
        InputError: the network has adapters, or no layer has one of these names.
    """
    require(
        not adapter_layers(network),
        f"{type(network).__name__} with adapters",
        "a network is adapted once",
        "give the network without them",
    )
    names = _targeted(network, targets)
    network.requires_grad_(False)
    for name in names:
        base = network.get_submodule(name)
        assert isinstance(base, nn.Linear)
        adapted = make(name, base)
        if not name:
            return adapted
        network.set_submodule(name, adapted)
    return network


def _targeted(network: nn.Module, targets: str | Sequence[str]) -> list[str]:
    """Return the names of the linear layers that ``targets`` means, in the order of the network."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if wanted == [ALL_LINEAR] and linear:
        return linear
    found = {
        target: [name for name in linear if f".{name}".endswith(f".{target}")]
        for target in wanted
        if target
    }
    missing = [target for target in wanted if not found.get(target)]
    if missing or not wanted:
        known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear)) or "none"
        raise InputError(
            f"targets={targets!r} for {type(network).__name__}",
            f"a target is {ALL_LINEAR} or the last part of a linear layer's name, here {known}",
            f"write {ALL_LINEAR}",
        )
    return [name for name in linear if any(name in names for names in found.values())]


@contextmanager
def merged_lora(network: nn.Module) -> Iterator[None]:
    """Replace W by W + dW within the block, where the adapters of any kind rest.

    Evaluation and generation take fewer products so. Afterwards W has the bits from before the
    block.

    Args:
        network: network with adapters; one without them is as it was.
    """
    layers = [layer for layer in adapter_layers(network).values() if not layer.merged]
    kept = [layer.base_layer.weight.detach().clone() for layer in layers]
    try:
        with torch.no_grad():
            for layer, weight in zip(layers, kept, strict=True):
                layer.base_layer.weight += layer.product()
                layer._unmerged = weight
                layer.merged = True
        yield
    finally:
        with torch.no_grad():
            for layer, weight in zip(layers, kept, strict=True):
                layer.base_layer.weight.copy_(weight)
                layer._unmerged = None
                layer.merged = False


def plain_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the ``state_dict()`` of a network as it is named without adapters: base layers have
    the names of the layers in whose place they are, and what the adapters train is left out."""
    layers = adapter_layers(network)
    found = {}
    for name, tensor in network.state_dict().items():
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if owner is None:
            found[name] = tensor
        elif name.startswith(f"{owner}.base_layer."):
            plain = owner.removesuffix(".adapted")  # as a switch of energy calls its layer
            found[name.replace(f"{owner}.base_layer.", f"{plain}.", 1)] = tensor
    return found
