"""The text of ``load.py``, a few lines that load an exported model without this package where they
can."""

from __future__ import annotations

import os
from ast import literal_eval
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from fl_lightning.config.recorded import import_path
from fl_lightning.export.trained_model import TrainedModel
from fl_lightning.models import Recipe, recipe_of
from fl_lightning.models.language.experts import ExpertLoRA, Seats, TokenGate
from fl_lightning.models.language.hf import layers_in_4bit

LOADER = "load.py"
WEIGHTS = "model.safetensors"
MAX_DIFFERENCE = 1e-4
"""Between outputs of the network and of what the loader makes, as a share of the largest output:
the order in which a sum is rounded may differ."""


def source(lines: list[str], about: str) -> str:
    """Return the text of a module that defines ``network``.

    Args:
        lines: its statements.
        about: what the module does, a sentence.
    """
    return "\n".join([f'"""{about}"""', "", *lines, ""])


def weights_loader(model: TrainedModel, folder: Path) -> tuple[str, str]:
    """Return a loader of ``model.safetensors`` in ``folder``, and what it needs beside torch and
    safetensors.

    It has been run: the network that it makes has the outputs of the one that is exported. Where
    none can be written, the loader is a function that takes a network, and what it needs is a
    sentence.
    """
    network = model.network
    seats, strict = seats_of(network), ", strict=False" * bool(layers_in_4bit(network))
    read, shares = f'load_file(Path(__file__).with_name("{WEIGHTS}"))', shares_of_seats(network)
    given = [f"network.load_state_dict({'weights' if shares else read}{strict})"]
    if shares:
        own = [f'network.{name} = weights.pop("{name}")' for name in shares]
        given = [f"weights = {read}", *own, *given]
    recipe = _of_module(network) or recipe_of(network)
    calls = [] if recipe is None else [_call(recipe, in_full) for in_full in (True, False)]
    for name, arguments in dict.fromkeys(filter(None, calls)):
        lines = [
            "from pathlib import Path",
            "",
            f"import {name.rpartition('.')[0]}",
            "from safetensors.torch import load_file",
            *([f"from {Seats.__module__} import Seats"] if seats else []),
            "",
            f"network = {name}({arguments}).eval()",
            *([seats] if seats else []),
            *given,
        ]
        text = source(lines, "Load the exported network; ``network`` maps inputs to outputs.")
        if _loads(text, model, folder / LOADER):
            return text, name
    kind = import_path(type(network)) + f" with fl_lightning's {seats}" * bool(seats)
    lines = [
        "from pathlib import Path",
        "",
        "from safetensors.torch import load_file",
        "",
        "",
        "def load(network):",
        f'    """Give weights to a network made as the run made it, a {kind}, and return it."""',
        *(f"    {line}" for line in given),
        "    return network.eval()",
    ]
    text = source(lines, f"Give the exported weights to a {kind}.")
    return text, f"a network {kind}, made as the run made it"


def shares_of_seats(network: nn.Module) -> dict[str, torch.Tensor]:
    """Return the shares of a client's experts, which no state dict has, by name."""
    return {
        f"{name}.log_shares": module.log_shares
        for name, module in network.named_modules()
        if isinstance(module, TokenGate) and len(module.router) > 1
    }


def seats_of(network: nn.Module) -> str:
    """Return how a network without experts gets the seats of this one, as Python; empty where it
    has none."""
    gates = [module for module in network.modules() if isinstance(module, TokenGate)]
    layers = [module for module in network.modules() if isinstance(module, ExpertLoRA)]
    if not gates:
        return ""
    gamma = f'float("{gates[0].gamma}")'
    return f"Seats(network, {len(gates[0].router)}, {gamma}, {layers[0].shared})"


def _of_module(network: nn.Module) -> Recipe | None:
    """Return how a LightningModule is made that has noted its arguments with
    ``save_hyperparameters``."""
    if isinstance(network, LightningModule):
        return Recipe(type(network), (), dict(network.hparams))
    return None


def _call(recipe: Recipe, in_full: bool) -> tuple[str, str] | None:
    """Return the path of a recipe's function and its arguments as Python; None where a new process
    could not import the function, or an argument is no plain value.

    Args:
        recipe: the call that made the network.
        in_full: whether texts that are names of files here are written as absolute paths, for
            processes elsewhere.
    """
    path = import_path(recipe.function)
    if "<" in path or path.startswith("__main__."):
        return None
    if path.startswith("timm.") and path.endswith(".create_model"):
        path = "timm.create_model"  # where it is documented
    parts = [
        *(repr(_plain(value, in_full)) for value in recipe.arguments),
        *(f"{name}={_plain(value, in_full)!r}" for name, value in recipe.named.items()),
    ]
    try:
        for part in parts:
            literal_eval(part.partition("=")[2] if part.partition("=")[0].isidentifier() else part)
    except (ValueError, SyntaxError):
        return None
    return path, ", ".join(parts)


def _plain(value: Any, in_full: bool) -> Any:
    if in_full and isinstance(value, str) and os.path.exists(value):
        return os.path.abspath(value)
    return tuple(value) if isinstance(value, torch.Size) else value


def _loads(text: str, model: TrainedModel, path: Path) -> bool:
    """Return whether the loader, as a file of this path, makes a network with the outputs of the
    model."""
    names: dict[str, Any] = {"__file__": str(path), "__name__": "load"}
    example = model.example
    expected = model.outputs(example)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            exec(text, names)
            found = names["network"](example)
    except Exception:  # whatever the code of a network raises, it cannot be made again like this
        return False
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    largest = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 1.0
    return torch.allclose(found, expected, rtol=0, atol=MAX_DIFFERENCE * largest, equal_nan=True)
