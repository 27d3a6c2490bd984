"""The run directory that ``--ckpt_path`` names; it can be looked for without importing torch."""

from __future__ import annotations

import os
from pathlib import Path

from fl_lightning.errors import InputError


def run_and_checkpoints(ckpt_path: str) -> tuple[Path, list[Path]]:
    """Return a run directory, and its checkpoints from which it can be continued, newest first.

    Args:
        ckpt_path: a run directory, or a checkpoint in one: later ones do not count then.

    Raises:
        InputError: there is no such run or checkpoint.
    """
    path = Path(os.path.expanduser(ckpt_path)).absolute()
    if path.name.startswith("round_") and path.parent.name == "checkpoints":
        run = path.parent.parent
        candidates = [c for c in checkpoints_in(path.parent) if round_of(c) <= round_of(path)]
        if not path.exists() or round_of(path) < 0:
            raise InputError(
                f"--ckpt_path {ckpt_path}",
                "there is no such checkpoint",
                "name the run directory, or last",
            )
    else:
        run, candidates = path, checkpoints_in(path / "checkpoints")
    if not (run / "config.yaml").exists() and not candidates:
        raise InputError(
            f"--ckpt_path {ckpt_path}",
            "it is neither a run directory nor a checkpoint in one",
            "name one, or last",
        )
    return run, candidates


def short_path(path: Path) -> Path:
    """Return a path as one that is relative to the folder one is in, where it lies below that."""
    try:
        here = Path.cwd()
    except OSError:  # it has been removed
        return path
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path


def require_run(path: str) -> Path:
    """Return a run directory as an absolute path.

    Raises:
        InputError: it is none.
    """
    run = Path(os.path.abspath(path))
    if not (run / "config.yaml").is_file():
        raise InputError(
            path, "it is not a run directory, which holds config.yaml", "write runs/EXPERIMENT/NAME"
        )
    return run


def rounds_kept(run: Path) -> list[int]:
    """Return the rounds of the complete checkpoints of a run directory, newest first."""
    return [*map(round_of, checkpoints_in(run / "checkpoints"))]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, ``round_`` and a number, newest first."""
    found = (path for path in folder.glob("round_*") if path.is_dir() and round_of(path) >= 0)
    return sorted(found, key=round_of, reverse=True)


def round_of(checkpoint: Path) -> int:
    """Return the round of a checkpoint; -1: the folder is none."""
    number = checkpoint.name.removeprefix("round_")
    return int(number) if number.isdecimal() else -1
