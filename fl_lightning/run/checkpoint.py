"""Checkpoints: folders of safetensors and JSON with a manifest of hashes. No file in them can run
code.

A checkpoint is written to a hidden folder, synced and then renamed, so a folder with its final name
is complete. A folder whose files do not match its manifest is refused. Folders whose names begin
with a dot are being written or being removed, and are never read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fl_lightning.errors import ThreePartError
from fl_lightning.support import disk
from fl_lightning.support.tensor_bytes import separate

MANIFEST = "manifest.json"
Tensors = Mapping[str, Mapping[str, Tensor]]


class CheckpointError(ThreePartError, ValueError):
    """A folder that is not a checkpoint, or a damaged one.

    Args:
        given: the folder, and what is wrong with it.
        rule: what a checkpoint has to be; may be left out.
        instead: what to do; may be left out.
    """

    def __init__(self, given: str, rule: str = "", instead: str = "") -> None:
        super().__init__(given, rule, instead)


def save_checkpoint(folder: Path, tensors: Tensors, documents: Mapping[str, object]) -> None:
    """Write a checkpoint as a whole, or nothing at all.

    Args:
        folder: the folder to write; an earlier checkpoint there is replaced.
        tensors: each group of tensors becomes ``<name>.safetensors``.
        documents: each document becomes ``<name>.json``.

    Raises:
        OSError: the disk does not take it.
    """
    files = {
        f"{name}.safetensors": save_tensors(separate(group)) for name, group in tensors.items()
    }
    files |= {f"{name}.json": json.dumps(document).encode() for name, document in documents.items()}
    files[MANIFEST] = json.dumps(
        {name: sha256(data).hexdigest() for name, data in files.items()}, indent=1
    ).encode()
    aside = folder.with_name(f".{folder.name}.writing")
    disk.remove(aside)
    aside.mkdir()
    try:
        for name, data in files.items():
            disk.write_synced(aside / name, data)
        disk.sync_folder(aside)
        remove_checkpoint(folder)
        aside.rename(folder)
        disk.sync_folder(folder.parent)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def load_checkpoint(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return the tensors and the documents that :func:`save_checkpoint` wrote, each by name.

    Raises:
        CheckpointError: a file is missing, foreign, or does not match the manifest.
    """
    files = _intact_files(folder)
    try:
        tensors = {
            Path(n).stem: load_tensors(data)
            for n, data in files.items()
            if n.endswith(".safetensors")
        }
        return tensors, {
            Path(n).stem: json.loads(data) for n, data in files.items() if n.endswith(".json")
        }
    except (ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{folder} holds a file in another format ({error})",
            "a checkpoint holds safetensors and JSON",
            "use an earlier checkpoint",
        ) from None


def load_document(folder: Path, name: str) -> Any:
    """Return one of the documents of a checkpoint, whose other files are not read.

    Raises:
        CheckpointError: it is missing, foreign, or does not match the manifest.
    """
    files = _intact_files(folder, f"{name}.json")
    try:
        return json.loads(files[f"{name}.json"])
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder} has no document {name} ({error})") from None


def _intact_files(folder: Path, only: str = "") -> dict[str, bytes]:
    """Return the files of a checkpoint, or one of them, by name."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if not isinstance(manifest, dict) or any(Path(name).name != name for name in manifest):
            raise ValueError(f"{MANIFEST} is not a table of file names and hashes")
        files = {name: (folder / name).read_bytes() for name in manifest if only in ("", name)}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error})",
            f"a checkpoint is a folder with {MANIFEST}",
            "name another",
        ) from None
    for name, data in files.items():
        if sha256(data).hexdigest() != manifest[name]:
            raise CheckpointError(
                f"{folder / name} does not match its SHA-256 in {MANIFEST}",
                "it is damaged",
                "use an earlier checkpoint",
            )
    return files


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that half a checkpoint is never seen."""
    if folder.exists():
        aside = folder.with_name(f".{folder.name}.removing")
        disk.remove(aside)
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
