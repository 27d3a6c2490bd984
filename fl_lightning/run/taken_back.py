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

BEFORE = {"code_before", "engine_before", "device_before"}
"""Entries of a session in ``metadata.json`` that name the code, engine or device of the rounds
before it, where the session had another one."""


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


def made_otherwise(run_dir: Path, done: int, settings: Mapping[str, Any], device: str) -> bool:
    """Return whether rounds after ``done`` have been made with other settings, by another engine or
    kind of device, or by other versions of a user's files, than they would be made now.

    Args:
        run_dir: the run.
        done: the last round that stays.
        settings: of this call, flat.
        device: of this call.

    Raises:
        InputError: its configuration cannot be read.
    """
    metadata = read_json(run_dir / "metadata.json")
    engine, there = settings.get("trainer.engine", "auto"), str(metadata.get("device", device))
    sessions = [one for one in metadata.get("resumed") or [] if one.get("after_round", 0) > done]
    return (
        bool(changed_settings(config_of(run_dir), settings))
        or engine not in ("auto", metadata.get("engine"))
        or there.partition(":")[0] != device.partition(":")[0]
        or bool(changed_code(metadata.get("code") or {}))
        or any(one.get("changed") or BEFORE & one.keys() for one in sessions)
    )
