"""Checkpoints: a folder of safetensors and JSON with a manifest of hashes. Nothing in it can run code.

A checkpoint is written aside, synced and renamed, so a folder with its final name is complete; a folder whose files do not match its
manifest is refused by name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import safetensors
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

MANIFEST = "manifest.json"
Tensors = Mapping[str, Mapping[str, Tensor]]


class CheckpointError(ValueError):
    """The folder is not a checkpoint, or it is damaged."""


def save_checkpoint(folder: Path, tensors: Tensors, documents: Mapping[str, object]) -> None:
    """Write ``<name>.safetensors`` for each group of tensors and ``<name>.json`` for each document, or nothing at all."""
    files = {f"{name}.safetensors": save_tensors({k: v.contiguous() for k, v in group.items()}) for name, group in tensors.items()}
    files |= {f"{name}.json": json.dumps(document).encode() for name, document in documents.items()}
    files[MANIFEST] = json.dumps({name: sha256(data).hexdigest() for name, data in files.items()}, indent=1).encode()
    aside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        for name, data in files.items():
            write_synced(aside / name, data)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        _sync(folder.parent)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def load_checkpoint(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, object]]:
    """Read back what :func:`save_checkpoint` wrote: tensors and documents, by name.

    Raises:
        CheckpointError: a file is missing, foreign, or does not match the manifest.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        files = {name: (folder / name).read_bytes() for name in manifest if Path(name).name == name}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read ({error}); a checkpoint is a folder with {MANIFEST}; name another") from None
    for name, data in files.items():
        if sha256(data).hexdigest() != manifest[name]:
            raise CheckpointError(f"{folder / name} does not match its SHA-256 in {MANIFEST}; it is damaged; use an earlier checkpoint")
    try:
        tensors = {Path(n).stem: load_tensors(data) for n, data in files.items() if n.endswith(".safetensors")}
        return tensors, {Path(n).stem: json.loads(data) for n, data in files.items() if n.endswith(".json")}
    except (ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder} holds a file in another format ({error}); use an earlier checkpoint") from None


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints ``round_*`` of a run, newest first."""
    return sorted((path for path in folder.glob("round_*") if path.is_dir()), reverse=True)


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of a file, at once or not at all."""
    aside = path.with_name(f".{path.name}.writing")
    write_synced(aside, data)
    aside.replace(path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
