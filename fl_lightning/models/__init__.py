"""Networks by name, by class path or by callable. Weights are always drawn, never fetched."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import nn

from fl_lightning.models.layout import lay_out
from fl_lightning.models.residual_mlp import ResidualMLP
from fl_lightning.models.resnet import ResNet20
from fl_lightning.models.small_cnn import SmallCNN

__all__ = ["NETWORKS", "ResNet20", "ResidualMLP", "SmallCNN", "build_network", "lay_out"]

NETWORKS = ("small_cnn", "resnet20", "mobilenetv2", "vit_small", "residual_mlp")
_OURS: dict[str, Callable[[int], nn.Module]] = {"small_cnn": SmallCNN, "resnet20": ResNet20, "residual_mlp": ResidualMLP}
_TIMM_NAMES = {"mobilenetv2": "mobilenetv2_100", "vit_small": "vit_small_patch16_224"}


def build_network(network: str | Callable[[int], nn.Module], num_classes: int, example_shape: tuple[int, ...]) -> nn.Module:
    """The network with new weights from torch's current generator. Convolutions have theirs channels last (:func:`lay_out`).

    Args:
        network: one of ``NETWORKS``, any other timm name, a class path (``torchvision.models.resnet18``), or a callable that
            takes the number of classes, as ``num_classes`` or as its first argument.
        num_classes: number of logits.
        example_shape: ``(3, H, W)``, what the data module yields.

    Raises:
        ValueError: no network of that name, or what was given does not make one.
    """
    return lay_out(_built(network, num_classes, example_shape))


def _built(network: str | Callable[[int], nn.Module], num_classes: int, example_shape: tuple[int, ...]) -> nn.Module:
    if isinstance(network, nn.Module):
        raise ValueError(f"network={type(network).__name__}(...): already built, clients need new weights; write its class")
    if not isinstance(network, str):
        return _checked(_called(network, num_classes), network, example_shape)
    if network == "small_cnn" and min(example_shape[1:]) < 16:
        raise ValueError(f"network='small_cnn' on {example_shape[1]}x{example_shape[2]} images: it needs 16x16; write resnet20")
    if network in _OURS:
        return _OURS[network](num_classes)
    import timm  # slow to import, and not needed for our own

    if timm.is_model(_TIMM_NAMES.get(network, network)):
        return _from_timm(network, num_classes, example_shape)
    if "." in network:
        return _checked(_called(_imported(network), num_classes), network, example_shape)
    known = [*NETWORKS, *timm.list_models()]
    near = (get_close_matches(network.lower(), known, n=1, cutoff=0.0) or [NETWORKS[0]])[0]
    raise ValueError(f"network={network!r}: one of {', '.join(NETWORKS)}, a timm name or a class path; did you mean {near}?")


def _called(make: Callable[..., Any], num_classes: int) -> Any:
    """By keyword where there is one: the first argument of torchvision's makers is ``weights``."""
    try:
        parameters = signature(make).parameters.values()
    except (TypeError, ValueError):
        return make(num_classes)
    named = any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)
    return make(num_classes=num_classes) if named else make(num_classes)


def _checked(made: Any, network: object, example_shape: tuple[int, ...]) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise ValueError(f"network={network!r}: made a {type(made).__name__}; write something that returns a torch.nn.Module")
    was_training = made.training
    with torch.no_grad():
        outputs = made.eval()(torch.zeros(1, *example_shape))
    made.train(was_training)
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2:
        shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise ValueError(f"network={network!r}: makes {shape} of one example; logits [1, C] are needed; mend its forward")
    return made


def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"network={path!r}: a class path must be importable ({error}); write e.g. torchvision.models.resnet18"
        ) from None


def _from_timm(network: str, num_classes: int, example_shape: tuple[int, ...]) -> nn.Module:
    import timm

    name, side = _TIMM_NAMES.get(network, network), example_shape[-1]
    options: dict[str, Any] = {"pretrained": False, "num_classes": num_classes, "in_chans": example_shape[0]}
    if network == "vit_small":  # 16x16 patches would leave 4 tokens of a 32x32 image
        options["patch_size"] = 4 if side < 96 else 16
        if side % options["patch_size"]:
            raise ValueError(
                f"network={network!r} on {side}x{side} images: the side is a multiple of {options['patch_size']}; crop to one"
            )
    config = timm.get_pretrained_cfg(name)
    if config is not None and config.fixed_input_size:
        try:
            return timm.create_model(name, img_size=example_shape[-2:], **options)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
    return timm.create_model(name, **options)
