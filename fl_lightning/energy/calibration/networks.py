"""Networks to calibrate by name, and the command that calibrates the network of a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fl_lightning.config.near_names import require_choice
from fl_lightning.config.packaged import HF_PREFIX
from fl_lightning.energy.switched import SwitchedLinear, merge_adapters
from fl_lightning.energy.switched.kinds import MERGED, kind_and_rank
from fl_lightning.models import LANGUAGE_NETWORKS, LlamaTiny, build_network
from fl_lightning.models.adapters import ADAPTERS, ALL_LINEAR, DEFAULT_RANK
from fl_lightning.models.language.hf import TransformersLM
from fl_lightning.models.language.llama_pretrained import LlamaPretrained
from fl_lightning.models.language.tiny import BYTE_VOCABULARY
from fl_lightning.tasks import LanguageModelling

KINDS = (*ADAPTERS, MERGED)
ALL_DIRECTIONS = 96
"""Default rank of adapters of ``llama_tiny`` that are of singular directions."""


def adapted_network(
    network: str,
    adapter: str | None = None,
    rank: int | None = None,
    targets: str = ALL_LINEAR,
    *,
    gguf_file: str | None = None,
    of_blocks: bool = False,
) -> nn.Module:
    """Return a network with adapters in evaluation mode, as
    :func:`fl_lightning.models.build_network` makes it for a run.

    Args:
        network: ``llama_tiny``, ``llama_tiny_deep``, or ``hf:NAME_OR_FOLDER``.
        adapter: kind of its adapters, or ``merged``: LoRA whose W + dW is one matrix. Default:
            ``spectral`` of ``llama_tiny``, ``lora`` of others.
        rank: their rank. Default: 96 for ``spectral`` and ``svft`` of ``llama_tiny``, else 8.
        targets: ``all-linear``, or names of layers with commas between them.
        gguf_file: the file of ``hf:NAME_OR_FOLDER`` that has the weights, where they are GGUF.
        of_blocks: whether ``hf:NAME_OR_FOLDER`` is made of the project's own blocks, whose branches
            are switched.

    Raises:
        InputError: there is no such network or kind, or the network refuses the adapters.
    """
    ours = not network.startswith(HF_PREFIX)
    if ours:
        require_choice(network, (*LANGUAGE_NETWORKS, f"{HF_PREFIX}NAME_OR_FOLDER"), "--network")
    adapter = adapter or ("spectral" if ours else "lora")
    require_choice(adapter, KINDS, "--adapter")
    if rank is None:
        rank = ALL_DIRECTIONS if ours and adapter in ("spectral", "svft") else DEFAULT_RANK
    kind: Any = "lora" if adapter == MERGED else adapter
    settings = {
        "rank": rank,
        "adapter": kind,
        "targets": targets if targets == ALL_LINEAR else targets.split(","),
    }
    maker: Any = LANGUAGE_NETWORKS.get(network)
    if not ours:
        theirs: Any = LlamaPretrained if of_blocks else TransformersLM
        maker = partial(theirs, name=network[len(HF_PREFIX) :], gguf_file=gguf_file)
    ids = torch.zeros(2, 2, dtype=torch.int64)
    vocabulary = BYTE_VOCABULARY if ours else 1  # that of a model of transformers may be larger
    made = build_network(
        partial(maker, **settings), vocabulary, (2,), task=LanguageModelling(), inputs=ids
    )
    return (merge_adapters(made) if adapter == MERGED else made).eval()


def calibration_advice(network: nn.Module, layers: Sequence[SwitchedLinear]) -> str:
    """Return what to do in order to have a table of costs of a switched network, for error
    messages.

    Args:
        network: the network.
        layers: its switched layers.
    """
    shipped = [name for name, made in LANGUAGE_NETWORKS.items() if made is type(network)]
    if isinstance(network, TransformersLM):
        name = f"{HF_PREFIX}{network.name}"
    elif shipped and isinstance(network, LlamaTiny) and len(network.layers) == network.depth:
        (name,) = shipped
    else:
        return (
            f"calibrate this {type(network).__name__} in Python by fl_lightning.energy.calibration, and "
            "write --model.costs costs.json"
        )
    kind, rank = kind_and_rank(layers[0].adapted)
    words = ["python", "-m", "fl_lightning", "energy", "--calibrate", "true", "--network", name]
    words += [
        "--adapter",
        kind,
        "--rank",
        str(rank),
        "--scope",
        layers[0].scope,
        "--high",
        layers[0].high,
    ]
    targets = _targets(network, layers)
    words += [] if targets == ALL_LINEAR else ["--targets", targets]
    return f"calibrate: {shlex.join([*words, '--out', 'costs.json'])}, and write --model.costs costs.json"


def _targets(network: Any, layers: Sequence[SwitchedLinear]) -> str:
    """Return which of a network's linear layers have adapters, as ``--targets`` takes it: the last
    parts of their names, where a layer other than the head has none."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    base = getattr(network, "base", network)
    inside.add(id(base.get_output_embeddings()) if hasattr(base, "get_output_embeddings") else 0)
    plain = [
        one for one in network.modules() if isinstance(one, nn.Linear) and id(one) not in inside
    ]
    if plain:
        return ",".join(dict.fromkeys(one.name.rpartition(".")[2] for one in layers))
    return ALL_LINEAR
