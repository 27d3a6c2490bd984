"""Random damage to the files of a run: what is read is what was written, or it is refused by name,
never something else."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path

import pytest
import torch
from test_resume import fit

from fl_lightning.errors import InputError
from fl_lightning.run.resume import find_start
from fl_lightning.run.snapshot import Checkpoint

DAMAGES = 200


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of three rounds with three checkpoints, which is to be continued."""
    return fit(tmp_path_factory.mktemp("whole"), until=3, keep_checkpoints=3).run.path


def flip(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]


def zero_a_sector(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(0, len(data), 512)
    return data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]


HOW = {
    "flipped": flip,
    "flipped twice": lambda data, dice: flip(flip(data, dice), dice),
    "truncated": lambda data, dice: data[: dice.randrange(len(data))],
    "extended": lambda data, dice: data + dice.randbytes(dice.randrange(1, 99)),
    "zeroed": zero_a_sector,
}


def damage(run: Path, dice: random.Random) -> str:
    """Damage one file of the run, remove it, or put another one in its place; say what was done."""
    files = sorted(
        path
        for path in run.rglob("*")
        if path.is_file() and path.parent.name != "figures" and path.name != "run.log"
    )
    file, how = dice.choice(files), dice.choice([*HOW, "removed", "another"])
    if how == "removed":
        file.unlink()
    elif how == "another":
        shutil.copyfile(dice.choice([other for other in files if other != file]), file)
    else:
        file.write_bytes(HOW[how](file.read_bytes(), dice))
    return f"{file.relative_to(run)} {how}"


def contents(checkpoint: Checkpoint) -> tuple[dict, dict]:
    return checkpoint.tensors, checkpoint.progress


def test_damaged_files_are_never_taken_for_whole_ones(whole, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "fl_lightning")
    written = {
        path.name: contents(Checkpoint.read(path))
        for path in (whole / "checkpoints").glob("round_*")
    }
    dice, silent, newest, earlier, refused = random.Random(5), [], 0, 0, []
    for trial in range(DAMAGES):
        run = tmp_path / "run"
        shutil.copytree(whole, run)
        what = [damage(run, dice) for _ in range(dice.choice((1, 1, 2)))]
        try:
            found = find_start(str(run), run.parent).checkpoint
            tensors, progress = written[found.path.name]
            same = found.progress == progress and all(
                torch.equal(found.tensors[group][name], tensor)
                for group, all_of in tensors.items()
                for name, tensor in all_of.items()
            )
            silent += [] if same else [(trial, what)]
            newest, earlier = (
                newest + (found.path.name == "round_000003"),
                earlier + (found.path.name != "round_000003"),
            )
        except InputError:
            refused.append(what)
        shutil.rmtree(run)
    assert silent == []
    assert newest + earlier + len(refused) == DAMAGES
    # damage to an older checkpoint, or to one copy of a table, costs nothing
    assert newest > DAMAGES // 2
    assert earlier > DAMAGES // 10  # damage to the newest costs one round
    # only two damages that hit both copies of a table can cost a run with three checkpoints
    for what in refused:
        (first, _), (second, _) = (entry.split(" ", 1) for entry in what)
        assert {first, second} in (
            {f"{name}.csv", f"checkpoints/{name}.csv"} for name in ("metrics", "ledger")
        )
