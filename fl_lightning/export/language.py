"""Language models as the folders that peft and transformers load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.config.packaged import model_folder
from fl_lightning.energy.switched import SwitchedLinear
from fl_lightning.export.loader import LOADER, source
from fl_lightning.export.trained_model import TrainedModel
from fl_lightning.models.adapters import adapter_layers, merged_lora, plain_weights
from fl_lightning.models.language import Llama
from fl_lightning.models.language.experts import ExpertLoRA
from fl_lightning.models.language.hf import NF4, TransformersLM, to_transformers, without_bars

BASE = "base"
"""Folder of the base model, of which an export of ``llama_tiny`` has the weights."""


def forms(network: nn.Module) -> list[Any]:
    """Return the formats of a language model that a network can be written in, the one to prefer
    first."""
    if any(isinstance(module, (ExpertLoRA, SwitchedLinear)) for module in network.modules()):
        return []  # layers with several adapters, or with options for each token, are not theirs
    if isinstance(network, (Llama, TransformersLM)) and _took_of_named_base(network):
        return ["transformers"]
    if isinstance(network, TransformersLM) and hasattr(network.model, "peft_config"):
        return ["peft", "transformers"]
    if isinstance(network, (Llama, TransformersLM)):
        return ["peft", "transformers"] if adapter_layers(network) else ["transformers"]
    return []


def _took_of_named_base(network: Llama | TransformersLM) -> bool:
    """Return whether adapters took a part of a base that is named, which peft would load whole."""
    if isinstance(network, Llama):
        return bool(network.source) and not all(
            layer.removable for layer in adapter_layers(network).values()
        )
    configs = getattr(network.model, "peft_config", {}).values()
    return any(getattr(config, "init_lora_weights", None) == "pissa" for config in configs)


@without_bars()
@torch.no_grad()
def write_peft(trained: TrainedModel, folder: Path) -> str:
    """Write adapters as a folder that peft loads, and return what is needed to do so.

    Adapters of our own kinds become LoRA, whose product is what they add. The base of
    ``llama_tiny`` goes along, into the folder ``base``, and so does one that the run has changed;
    that of ``hf:NAME`` and of ``LlamaPretrained`` is named.
    """
    network: Any = trained.network
    adapted = _adapted(network)
    name = network.source if isinstance(network, Llama) else network.name
    gguf = getattr(network, "gguf_file", None)
    with_base = not name or trained.base_moved
    if with_base:
        base, where = f'Path(__file__).with_name("{BASE}")', BASE
        with adapted.disable_adapter():
            deepcopy(adapted).unload().save_pretrained(folder / BASE)
    else:
        found = Path(model_folder(name))
        where = str(found.absolute()) if found.is_dir() else model_folder(name)
        base = repr(where)
    adapted.peft_config["default"].base_model_name_or_path = where
    # peft would ask the hub whether the embedding is the base's; adapters leave it as it is
    adapted.save_pretrained(folder, save_embedding_layers=False)
    _save_tokenizer(trained, folder)
    dtype = next(weight.dtype for weight in network.parameters() if weight.is_floating_point())
    dtype = getattr(network, "read_as", dtype)
    in_4bit = getattr(network, "in_4bit", False)
    settings = ", ".join(f"{name}={value!r}" for name, value in NF4.items())
    given = ", quantization_config=in_4bit" * in_4bit
    given += "" if gguf is None or with_base else f", gguf_file={gguf!r}"
    lines = [
        "from pathlib import Path",
        "",
        "import torch",
        "from peft import PeftModel",
        f"from transformers import AutoModelForCausalLM{', BitsAndBytesConfig' * in_4bit}",
        "",
        *[f"in_4bit = BitsAndBytesConfig(load_in_4bit=True, {settings})"] * in_4bit,
        f"base = AutoModelForCausalLM.from_pretrained({base}, dtype={dtype}{given})",
        "network = PeftModel.from_pretrained(base, Path(__file__).parent).eval()",
    ]
    (folder / LOADER).write_text(source(lines, "Load the adapters on their base by peft."))
    needed = f"transformers{', bitsandbytes' * in_4bit} and peft"
    return needed + ("" if with_base else f", and the base {name}{' in 4 bits' * in_4bit}")


@without_bars()
@torch.no_grad()
def write_transformers(trained: TrainedModel, folder: Path) -> str:
    """Write a whole model, adapters merged into its weights, as ``from_pretrained`` loads it;
    return what is needed to do so."""
    network: Any = trained.network
    if isinstance(network, Llama):
        model = to_transformers(network)
    elif hasattr(network.model, "peft_config"):
        model = _merged(network)
    else:
        model = _plain(network, merge=True)
    model.save_pretrained(folder)
    _save_tokenizer(trained, folder)
    lines = [
        "from pathlib import Path",
        "",
        "import torch",
        "from transformers import AutoModelForCausalLM",
        "",
        "network = AutoModelForCausalLM.from_pretrained(",
        f"    Path(__file__).parent, dtype={model.dtype}",
        ").eval()",
    ]
    (folder / LOADER).write_text(source(lines, "Load the exported model by transformers."))
    return "transformers"


def _merged(network: TransformersLM) -> Any:
    """Return the model of transformers with peft's adapters added to its weights; of a base of 4
    bits to the whole weights that these stand for, since a sum in 4 bits rounds off most of what
    adapters add."""
    model = deepcopy(network.model)
    _untie(model.get_base_model())
    if not network.in_4bit:
        return model.merge_and_unload()
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    config, adapters = model.peft_config["default"], get_peft_model_state_dict(model)
    whole = get_peft_model(model.unload().dequantize(), config)
    set_peft_model_state_dict(whole, adapters)
    merged = whole.merge_and_unload()
    with torch.device("meta"):
        own = dict(type(merged)(merged.config).named_modules())
    # bitsandbytes has made linear layers of GPT-2's Conv1D
    for name, layer in merged.named_modules():
        if isinstance(layer, nn.Linear) and type(own[name]).__name__ == "Conv1D":
            layer.weight = nn.Parameter(layer.weight.t().contiguous(), requires_grad=False)
    return merged


def _untie(base: Any) -> None:
    """Give embedding and head of a model of transformers weights of their own, where they share
    one and a layer of them has an adapter, whose product is not for the other."""
    layers = [base.get_input_embeddings(), base.get_output_embeddings()]
    inner, head = (getattr(layer, "base_layer", layer) for layer in layers)
    if inner.weight is getattr(head, "weight", None) and [inner, head] != layers:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        base.config.tie_word_embeddings = False


def _adapted(network: Any) -> Any:
    """Return peft's model of a network with adapters, ours as LoRA."""
    if isinstance(network, Llama):
        factors = _low_rank(network, network.rows_in_transformers)
        return _as_peft(to_transformers(network, merge=False), factors)
    if hasattr(network.model, "peft_config"):
        return network.model
    return _as_peft(
        _plain(network, merge=False), _low_rank(network.base, lambda layer, rows: {layer: rows})
    )


def _plain(network: TransformersLM, *, merge: bool) -> Any:
    """Return the model of transformers under adapters of ours, with what they add or without it."""
    base = deepcopy(network.base) if merge else network.base
    if merge:
        _untie(base)
    model = type(base)(base.config).to(base.dtype)
    with merged_lora(base) if merge else nullcontext():
        model.load_state_dict(plain_weights(base))
    return model


def _low_rank(
    network: nn.Module, names: Callable[[str, int], dict[str, int]]
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return A, B and c of what each adapter adds, by the layer's name in transformers.

    Args:
        network: network with adapters of ours.
        names: returns the names there of a layer of so many outputs, each with its number of
            outputs, from the first.
    """
    found = {}
    for layer, adapted in adapter_layers(network).items():
        a, b, scaling = adapted.low_rank()
        parts = names(layer, len(b))
        for part, rows in zip(parts, b.split([*parts.values()]), strict=True):
            found[part] = (a, rows, scaling)
    return found


def _as_peft(model: Any, factors: Mapping[str, tuple[Tensor, Tensor, float]]) -> Any:
    """Return peft's model with LoRA of these factors.

    Args:
        model: a model of transformers.
        factors: A ``[r, in]``, B ``[out, r]`` and c by the layer's name; r and c are one for all
            layers.
    """
    from peft import LoraConfig, get_peft_model

    a, _, scaling = next(iter(factors.values()))
    ends = {name.rpartition(".")[2] for name in factors}
    all_of_them = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    alpha: Any = scaling * len(a)  # peft's file has any number
    config = LoraConfig(
        r=len(a),
        lora_alpha=alpha,
        target_modules=sorted(ends if all_of_them == {*factors} else factors),
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    for name, (a, b, _) in factors.items():
        layer: Any = adapted.get_base_model().get_submodule(name)
        layer.lora_A["default"].weight.copy_(a)
        layer.lora_B["default"].weight.copy_(b)
    return adapted


def _save_tokenizer(trained: TrainedModel, folder: Path) -> None:
    if trained.tokenizer is not None:
        trained.tokenizer.save_pretrained(folder)
