"""The features of a network: what enters its last linear layer, read while it computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fl_lightning.errors import require


def linear_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a network by name, in its order. One with an adapter is one
    layer, of which this is the base."""
    found: dict[str, nn.Linear] = {}
    adapted: tuple[str, ...] = ()
    for name, module in network.named_modules():
        base = getattr(module, "base_layer", module)
        if isinstance(base, nn.Linear) and not name.startswith(adapted):
            found[name] = base
            adapted += () if base is module else (f"{name}.",)
    return found


class FeatureTap:
    """Holds what entered the last linear layer of a network in its last pass, and in ``layer``
    which that is.

    A copy of the network has a tap of its own, which holds nothing.

    Raises:
        InputError: the network has no linear layer.
    """

    def __init__(self, network: nn.Module) -> None:
        linear = linear_layers(network)
        require(
            bool(linear),
            f"a term of the features of {type(network).__name__}, which has no linear layer",
            "features are what enters the last one",
            "take a network that ends with one, such as small_cnn",
        )
        self._held: Tensor | None = None
        self.layer = [*linear.values()][-1]
        # which is called last, the order in which they are registered does not say; and an adapter
        # may compute its layer without calling the base
        for name in linear:
            network.get_submodule(name).register_forward_pre_hook(self)

    def __call__(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        self._held, self.layer = inputs[0], getattr(layer, "base_layer", layer)

    def take(self) -> Tensor:
        """Return the features ``[B, ..., d]`` of the last pass, and hold them no longer."""
        held, self._held = self._held, None
        assert held is not None, "a pass comes first"
        return held

    def __getstate__(self) -> dict[str, Any]:
        return {"_held": None, "layer": self.layer}
