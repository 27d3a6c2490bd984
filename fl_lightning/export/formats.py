"""The formats of an export: what each takes, and what it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args
from warnings import catch_warnings, simplefilter

import torch
from safetensors.torch import save_file
from torch.utils._pytree import tree_map

from fl_lightning.errors import InputError, require
from fl_lightning.export import language
from fl_lightning.export.loader import LOADER, WEIGHTS, shares_of_seats, source, weights_loader
from fl_lightning.export.trained_model import TrainedModel
from fl_lightning.models.language.hf import layers_in_4bit

FormatName = Literal["auto", "safetensors", "peft", "transformers", "onnx"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
ONNX_FILE = "model.onnx"
MAX_ONNX_BYTES = 2**30
"""Most bytes of weights inside an ONNX file, which protobuf bounds at 2 GiB; more go into a file
beside."""


def choose(model: TrainedModel, format: FormatName) -> FormatName:
    """Return the format that ``auto`` means for this network: ``peft`` for the adapters of a
    language model, ``transformers`` for one without, else ``safetensors``.

    Raises:
        InputError: the network has no such form.
    """
    able = language.forms(model.network)
    if format == "auto":
        return next(iter(able), "safetensors")
    require(
        format in ("safetensors", "onnx", *able),
        f"--format {format} of a {type(model.network).__name__}",
        "peft takes low-rank adapters on weights that are as they were loaded, and transformers "
        "language models, of llama_tiny and hf:NAME",
        f"write --format {next(iter(able), 'safetensors')}",
    )
    return format


def write(model: TrainedModel, format: FormatName, folder: Path) -> str:
    """Write the network into a new folder, and return what its loader needs, in words.

    Raises:
        InputError: torch's exporter cannot make ONNX of the network.
    """
    writers: Mapping[str, Callable[[TrainedModel, Path], str]] = {
        "safetensors": _write_safetensors,
        "peft": language.write_peft,
        "transformers": language.write_transformers,
        "onnx": _write_onnx,
    }
    with catch_warnings():  # names of transformers that peft uses change with version 6
        simplefilter("ignore", FutureWarning)
        return writers[format](model, folder)


def check_extras(format: FormatName) -> None:
    """Refuse a format whose libraries are not installed."""
    packages, extra = {
        "onnx": (("onnx", "onnxscript"), "export"),
        "peft": (("transformers", "peft"), "language"),
        "transformers": (("transformers",), "language"),
    }.get(format, ((), ""))
    missing = [package for package in packages if find_spec(package) is None]
    require(
        not missing,
        f"--format {format} without {', '.join(missing)}",
        "it needs an optional extra",
        f"run pip install 'fl_lightning[{extra}]', or write --format safetensors",
    )


def _write_safetensors(model: TrainedModel, folder: Path) -> str:
    # tensors that share memory, as tied embeddings do, are written one by one
    weights = {
        name: tensor.contiguous().clone()
        for name, tensor in {**model.network.state_dict(), **shares_of_seats(model.network)}.items()
        if not name.startswith(layers_in_4bit(model.network))
    }
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    text, needs = weights_loader(model, folder)
    (folder / LOADER).write_text(text)
    return needs


def _write_onnx(model: TrainedModel, folder: Path) -> str:
    from torch.export import Dim  # slow to import, and needed here alone

    example = model.example
    total = sum(
        weight.numel() * weight.element_size() for weight in model.network.state_dict().values()
    )
    batch, length = Dim("batch"), Dim("length")
    along = [{0: batch, 1: length}, {0: batch}] if model.reads_tokens else [{0: batch}]
    problem: Exception | None = None
    for axes in along:  # a model with learned positions may have a length of its own
        try:
            with torch.no_grad(), catch_warnings():
                simplefilter("ignore")  # of the exporter about itself
                torch.onnx.export(
                    model.network,
                    (example,),
                    folder / ONNX_FILE,
                    dynamo=True,
                    dynamic_shapes=(tree_map(lambda _, axes=axes: axes, example),),
                    input_names=["inputs"] if isinstance(example, torch.Tensor) else None,
                    output_names=["outputs"],
                    external_data=total > MAX_ONNX_BYTES,
                    verbose=False,
                )
            break
        except Exception as error:
            # the exporter has many kinds, and some are of the network's own code
            problem = problem or error
    else:
        text = " ".join(str(problem).split())[:200]
        raise InputError(
            f"--format onnx of a {type(model.network).__name__}: {type(problem).__name__} ({text})",
            "torch's exporter traces the network, which must not branch on values",
            "write --format safetensors",
        ) from problem
    lines = [
        "from pathlib import Path",
        "",
        "import onnxruntime",
        "",
        f'network = onnxruntime.InferenceSession(Path(__file__).with_name("{ONNX_FILE}"))',
        "# (outputs,) = network.run(None, {network.get_inputs()[0].name: inputs})",
    ]
    (folder / LOADER).write_text(source(lines, "Load the exported network into ONNX Runtime."))
    return "onnxruntime, or any other program that reads ONNX"
