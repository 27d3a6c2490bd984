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
    path = Path(ckpt_path).absolute()
    if path.name.startswith("round_") and path.parent.name == "checkpoints":
        run, candidates = (
            path.parent.parent,
            [c for c in checkpoints_in(path.parent) if c.name <= path.name],
        )
        if not path.exists():
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
    rounds = [path.name.removeprefix("round_") for path in checkpoints_in(run / "checkpoints")]
    return [int(round) for round in rounds if round.isdecimal()]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints ``round_*`` in a folder, newest first."""
    return sorted((path for path in folder.glob("round_*") if path.is_dir()), reverse=True)
