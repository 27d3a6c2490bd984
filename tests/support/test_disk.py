"""What is written survives a loss of power: the order in which the disk is waited for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from toy import Points, on_points, run

from fl_lightning.methods import FedAvg
from fl_lightning.support import disk

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="descriptors are named in /proc"
)


@pytest.fixture
def steps(monkeypatch) -> list[tuple[str, Path]]:
    """What is waited for and what is renamed, in order; of a rename the name that it gives."""
    seen: list[tuple[str, Path]] = []

    def synced(descriptor: int) -> None:
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def recorded(rename):
        def move(path: Path, target: Path) -> Path:
            seen.append(("rename", Path(target)))
            return rename(path, target)

        return move

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, recorded(getattr(Path, name)))
    return seen


def test_a_replaced_file_is_on_the_disk_before_its_name_and_its_name_before_it_counts(
    steps, tmp_path
):
    path, aside = tmp_path / "a", tmp_path / ".a.writing"
    disk.replace(path, b"data")
    assert steps == [("sync", aside), ("rename", path), ("sync", tmp_path)]


def test_a_line_is_on_the_disk_and_so_is_the_name_of_a_new_file(steps, tmp_path):
    path = tmp_path / "lines"
    disk.append_line(path, "one")
    assert steps == [("sync", path), ("sync", tmp_path)]
    disk.append_line(path, "two")
    assert steps[2:] == [("sync", path)]


def test_rows_and_files_of_a_checkpoint_are_on_the_disk_before_its_name(steps, tmp_path):
    folder = run(on_points(FedAvg()), Points((3, 1)), tmp_path, max_rounds=1).run_dir
    checkpoint = folder / "checkpoints" / "round_000001"
    aside = checkpoint.with_name(f".{checkpoint.name}.writing")
    renamed = steps.index(("rename", checkpoint))
    before = {path for kind, path in steps[:renamed] if kind == "sync"}
    assert before >= {aside, *(aside / path.name for path in checkpoint.iterdir())}
    for table in ("metrics", "ledger"):
        copies = [path for path in folder.rglob(f"*{table}*.csv") if path.is_file()]
        assert len(copies) == 2
        assert before >= set(copies)
    assert ("sync", checkpoint.parent) in steps[renamed:]
