"""Networks by name, class path or callable; their weights are drawn, except for those of language
models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from torch import nn

from fl_lightning.config.constraints import Constraint
from fl_lightning.config.import_gate import check_import
from fl_lightning.config.packaged import HF_PREFIX
from fl_lightning.errors import InputError, as_bad_input, require
from fl_lightning.models.channels_last import lay_out
from fl_lightning.models.checks import check_maker, check_outputs, error_text, name_of
from fl_lightning.models.first_inputs import FirstInputs
from fl_lightning.models.freshness import of_its_own
from fl_lightning.models.language import LlamaPretrained, LlamaTiny, LlamaTinyDeep
from fl_lightning.models.measured import MeasuredNetwork
from fl_lightning.models.mlp import MLP
from fl_lightning.models.published_cnns import FedAvgCNN, NIIDBenchCNN
from fl_lightning.models.recipe import Recipe, innermost, made_by, recipe_of
from fl_lightning.models.residual_mlp import ResidualMLP
from fl_lightning.models.resnet import ResNet20
from fl_lightning.models.small_cnn import SmallCNN
from fl_lightning.tasks import Classification, Task

_IMAGE_NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "small_cnn": SmallCNN,
    "resnet20": ResNet20,
    "residual_mlp": ResidualMLP,
    "niid_bench_cnn": NIIDBenchCNN,
    "fedavg_cnn": FedAvgCNN,
}
_FROM_16_PIXELS = ("small_cnn", "niid_bench_cnn", "fedavg_cnn")
_OWN_NETWORKS: dict[str, Callable[..., nn.Module]] = {**_IMAGE_NETWORKS, "mlp": MLP}
NetworkName = Literal[
    "small_cnn",
    "resnet20",
    "mobilenetv2",
    "vit_small",
    "residual_mlp",
    "mlp",
    "niid_bench_cnn",
    "fedavg_cnn",
    "llama_tiny",
    "llama_tiny_deep",
]
LANGUAGE_NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "llama_tiny": LlamaTiny,
    "llama_tiny_deep": LlamaTinyDeep,
}
NETWORKS = tuple(name for name in get_args(NetworkName) if name not in LANGUAGE_NETWORKS)
KNOWN_NETWORK = Constraint(
    f"one of {', '.join([*NETWORKS, *LANGUAGE_NETWORKS])}, a timm name, hf:NAME or a class path",
    f"write one of them, such as {NETWORKS[0]}",
    names_from="fl_lightning.models:network_names",
    near=True,
    at_once=False,
    given="network={value}",
)
"""What a name of a network may be; a class path, such as ``torchvision.models.resnet18``, is no
name."""
_TIMM_NAMES = {"mobilenetv2": "mobilenetv2_100", "vit_small": "vit_small_patch16_224"}


def build_network(
    network: str | Callable[[int], nn.Module],
    num_classes: int,
    example_shape: tuple[int, ...],
    *,
    logits: bool = True,
    task: Task | None = None,
    inputs: Any = None,
    channels_last: bool = True,
) -> nn.Module:
    """Return a network with new weights from torch's current generator.

    Args:
        network: one of ``NETWORKS`` or ``LANGUAGE_NETWORKS``, any other timm name,
            ``hf:NAME_OR_FOLDER`` (see :mod:`fl_lightning.models.language.hf`; of labelled text
            :mod:`fl_lightning.models.language.hf_classifier`), a class path
            (``torchvision.models.resnet18``), or a callable that takes the number of classes, as
            ``num_classes`` or as its first argument, and, if it has a parameter of that name,
            ``example_shape``.
        num_classes: number of outputs; of a language model, number of tokens.
        example_shape: shape of an example of the data module, ``(C, H, W)`` for images, ``(T,)``
            for tokens.
        logits: whether the outputs must be those of the task; if not, ``[B, any]``.
        task: what outputs it needs; default: classification, ``[B, num_classes]``.
        inputs: of two examples, what the network is tried out with; default: zeros of
            ``example_shape``.
        channels_last: whether a convolutional network is channels last, see :func:`lay_out`.

    Raises:
        InputError: there is no network of that name, ``network`` does not return a network, or its
            outputs for two examples are not those of the task. An error of the network's own code
            is the cause of this error.
        ValueError: the network refuses its own settings.
    """
    if not example_shape or min(example_shape) < 1:
        raise InputError(
            f"example_shape={example_shape}",
            "an example has one dimension or more, none of them empty",
            "correct the data",
        )
    is_language = task is not None and task.of_tokens
    is_text = isinstance(inputs, dict) and "input_ids" in inputs
    if (is_language or is_text) and network in NETWORKS:
        instead = "llama_tiny, hf:NAME_OR_FOLDER" if is_language else "hf:NAME_OR_FOLDER"
        counted = "tokens" if is_language else "classes"
        raise InputError(
            f"network={network!r} where the task is {type(task).__name__}",
            "it does not read tokens",
            f"write --model.network {instead} or my_package.MyNetwork, which takes the number of {counted}",
        )
    if network in _IMAGE_NETWORKS and len(example_shape) != 3:
        raise _not_images(f"network={network!r}", example_shape)
    classifies_text = is_text and not is_language
    made = _make(network, num_classes, example_shape, classifies_text)
    if torch.get_default_device().type == "meta":
        made = made.to("meta")  # one that was copied has values
    if inputs is None:
        inputs = torch.zeros(2, *example_shape)
    check_outputs(
        made, f"network={name_of(network)}", num_classes, inputs, logits, task or Classification()
    )
    return lay_out(made) if channels_last else made


def _not_images(network: str, example_shape: tuple[int, ...]) -> InputError:
    shape = ", ".join(map(str, example_shape))
    return InputError(
        f"{network} on examples of shape [{shape}]",
        "it needs images [C, H, W]",
        f"write --model.network mlp, or my_package.MyNetwork, a class that takes the number of classes and "
        f"maps [B, {shape}] to logits",
    )


def _make(
    network: str | Callable[[int], nn.Module],
    num_classes: int,
    example_shape: tuple[int, ...],
    classifies_text: bool,
) -> nn.Module:
    if isinstance(network, nn.Module):
        is_module = isinstance(network, LightningModule)
        raise InputError(
            f"network={type(network).__name__}(...)",
            "it is already built, but clients need new weights",
            "write module= in place of network=" if is_module else "write its class",
        )
    if not isinstance(network, str):
        return _call_maker(network, network, num_classes, example_shape)
    if network in _FROM_16_PIXELS and min(example_shape[1:]) < 16:
        raise InputError(
            f"network={network!r} on {example_shape[1]}x{example_shape[2]} images",
            "it needs 16x16",
            "write resnet20",
        )
    if network in _OWN_NETWORKS:
        return _call_maker(_OWN_NETWORKS[network], network, num_classes, example_shape)
    if network in LANGUAGE_NETWORKS:
        return made_by(LANGUAGE_NETWORKS[network], num_classes)
    if network.startswith(HF_PREFIX) and classifies_text:
        from fl_lightning.models.language.hf_classifier import TransformersClassifier

        return made_by(TransformersClassifier, num_classes, network.removeprefix(HF_PREFIX))
    if network.startswith(HF_PREFIX):
        # imports transformers where it is there
        from fl_lightning.models.language.hf import TransformersLM

        return made_by(TransformersLM, num_classes, network.removeprefix(HF_PREFIX))
    import timm  # slow to import, and not needed for the project's own networks

    if timm.is_model(_TIMM_NAMES.get(network, network)):
        if len(example_shape) != 3:
            raise _not_images(f"network={network!r}", example_shape)
        return _from_timm(network, num_classes, example_shape)
    if "." not in network:
        replace(KNOWN_NETWORK, names=network_names()).check(network)
    return _call_maker(_import(network), network, num_classes, example_shape)


def network_names() -> tuple[str, ...]:
    """Return every name that a network can be given by."""
    import timm

    # list_models leaves out former names, which are still right
    of_timm = filter(timm.is_model, dir(timm.models))
    return *NETWORKS, *LANGUAGE_NETWORKS, *of_timm


def _call_maker(
    make: Callable[..., Any], given: object, num_classes: int, example_shape: tuple[int, ...]
) -> nn.Module:
    """Call ``make`` with the number of classes and return its network.

    The number is passed as keyword ``num_classes`` where possible, because the first argument of
    torchvision's functions is ``weights``. A maker with a parameter ``example_shape`` gets that
    too.
    """
    check_maker(make, given)
    maker = innermost(make)
    if isinstance(maker, type) and issubclass(maker, LightningModule):
        require(
            maker.training_step is LightningModule.training_step,
            f"network={name_of(given)}",
            "it is a LightningModule, and its training_step would not be called",
            f"write --model.module {name_of(given)}, or module={maker.__name__}(...) in Python",
        )
    parameters = _parameters(make).values()
    named = any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)
    shape = {"example_shape": example_shape} if "example_shape" in _parameters(maker) else {}
    arguments, by_name = ([], {"num_classes": num_classes}) if named else ([num_classes], {})
    call = partial(made_by, make, *arguments, **by_name, **shape)
    try:
        made = call() if make in _OWN_NETWORKS.values() else of_its_own(call, given)
    except InputError:
        raise
    except ValueError:  # the network refuses its own settings
        raise
    except Exception as error:
        raise InputError(
            f"network={name_of(given)}: it raised {error_text(error)}",
            f"it is called with the number of classes, {num_classes}, and returns a torch.nn.Module",
            "correct it, or write small_cnn",
        ) from error
    if not isinstance(made, nn.Module):
        raise InputError(
            f"network={name_of(given)}",
            f"made a {type(made).__name__}",
            "write something that returns a torch.nn.Module",
        )
    return made


def _parameters(make: Callable[..., Any]) -> Mapping[str, Parameter]:
    """Return the parameters of a function; none where it does not tell them."""
    try:
        return signature(make).parameters
    except (TypeError, ValueError):
        return {}


def _import(path: str) -> Callable[..., Any]:
    check_import(path)
    module, _, name = path.rpartition(".")
    errors = (ImportError, AttributeError, ValueError)
    instead = "write e.g. torchvision.models.resnet18"
    with as_bad_input(f"network={path!r}", "a class path must be importable", instead, *errors):
        return getattr(import_module(module), name)


def _from_timm(network: str, num_classes: int, example_shape: tuple[int, ...]) -> nn.Module:
    import timm

    name, side = _TIMM_NAMES.get(network, network), example_shape[-1]
    options: dict[str, Any] = {
        "pretrained": False,
        "num_classes": num_classes,
        "in_chans": example_shape[0],
    }
    if network == "vit_small":  # 16x16 patches would leave 4 tokens of a 32x32 image
        options["patch_size"] = 4 if side < 96 else 16
        if side % options["patch_size"]:
            raise InputError(
                f"network={network!r} on {side}x{side} images",
                f"the side is a multiple of {options['patch_size']}",
                "crop to one",
            )
    config = timm.get_pretrained_cfg(name)
    if config is not None and config.fixed_input_size:
        try:
            return made_by(timm.create_model, name, img_size=example_shape[-2:], **options)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
    return made_by(timm.create_model, name, **options)
