"""What a private simulation that goes back to an earlier round must remember: its noise follows
from the seed, so that no round whose noise was drawn may be made again of other models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning.aggregation.private import SUMS_FILE, TAKEN_BACK_FILE
from fl_lightning.config.settings import changed_settings, config_of
from fl_lightning.privacy.begun import NoisySums
from fl_lightning.run.directory import read_json
from fl_lightning.support.user_code import changed_code


def was_private(run_dir: Path) -> bool:
    """Return whether the tables of a run have rounds with privacy."""
    path = run_dir / "metrics.csv"
    if not path.is_file():  # to be restored
        return False
    with path.open(errors="replace") as file:
        return "privacy/epsilon" in file.readline()


def note_drawn_noise(run_dir: Path, done: int, there: int) -> None:
    """Write down how far a private simulation had been, before its tables are taken back; whether
    it goes on with privacy or without.

    Args:
        run_dir: the run, which this process has locked.
        done: the last round that stays.
        there: rounds that its tables have.

    Raises:
        OSError: it cannot be written.
    """
    if there <= done or not was_private(run_dir) or (run_dir / SUMS_FILE).exists():
        return
    drawn = NoisySums(run_dir / TAKEN_BACK_FILE)
    if there > drawn.count:
        drawn.add(there, there)


def made_otherwise(run_dir: Path, done: int, settings: Mapping[str, Any]) -> bool:
    """Return whether rounds after ``done`` have been made with other settings, another engine or
    accelerator, or by other versions of a user's files, than they would be made now.

    Args:
        run_dir: the run.
        done: the last round that stays.
        settings: of this call, flat.

    Raises:
        InputError: its configuration cannot be read.
    """
    metadata = read_json(run_dir / "metadata.json")
    before, engine = config_of(run_dir), settings.get("trainer.engine", "auto")
    sessions = [one for one in metadata.get("resumed") or [] if one.get("after_round", 0) > done]
    return (
        bool(changed_settings(before, settings))
        or engine not in ("auto", metadata.get("engine"))
        or before.get("trainer.accelerator") != settings.get("trainer.accelerator")
        or bool(changed_code(metadata.get("code") or {}))
        or any("code_before" in one or one.get("changed") for one in sessions)
    )
