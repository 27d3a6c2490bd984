"""What is on disk stays whole: damage is found and named, a full disk loses nothing, nothing runs
code, nothing leaks."""

from __future__ import annotations

import errno
import json
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from places import ROOT

from fl_lightning.run.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from fl_lightning.run.directory import RunDirectory, is_plain_name
from fl_lightning.run.log import RunLog
from fl_lightning.run.paths import checkpoints_in
from fl_lightning.run.tables import CsvTable, numbers
from fl_lightning.support import disk
from fl_lightning.support.redaction import redact, redact_arguments, redact_settings

TENSORS = {
    "server": {
        "weights": torch.arange(6.0).reshape(2, 3),
        "bits": torch.tensor([1, 2], dtype=torch.int8),
    },
    "clients": {},
}
DOCUMENTS = {"progress": {"round": 3, "best": float("-inf")}}


@pytest.fixture
def saved(tmp_path) -> Path:
    folder = tmp_path / "round_000003"
    save_checkpoint(folder, TENSORS, DOCUMENTS)
    return folder


def test_round_trip(saved):
    tensors, documents = load_checkpoint(saved)
    assert documents == DOCUMENTS
    assert torch.equal(tensors["server"]["weights"], TENSORS["server"]["weights"])
    assert tensors["server"]["bits"].dtype == torch.int8
    assert sorted(path.suffix for path in saved.iterdir()) == [
        ".json",
        ".json",
        ".safetensors",
        ".safetensors",
    ]


def test_tensors_that_share_memory_and_views(tmp_path):
    whole = torch.arange(12.0)
    group = {"a": whole, "b": whole, "part": whole[2:5], "turned": whole.reshape(3, 4).T}
    save_checkpoint(tmp_path / "c", {"server": group}, {})
    found = load_checkpoint(tmp_path / "c")[0]["server"]
    assert all(torch.equal(found[name], tensor) for name, tensor in group.items())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["server.safetensors", "clients.safetensors", "progress.json", "manifest.json"]
)
@pytest.mark.parametrize(
    "damage", [truncate, flip, Path.unlink, lambda path: path.write_bytes(b"")]
)
def test_damage_is_refused_by_name(name, damage, saved):
    damage(saved / name)
    with pytest.raises(CheckpointError, match=re.escape(str(saved))):
        load_checkpoint(saved)


@pytest.mark.parametrize("manifest", [[], 3, {"../../secret": "0"}, {"/etc/hostname": "0"}])
def test_a_foreign_manifest_is_refused(manifest, saved):
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not a table of file names"):
        load_checkpoint(saved)


def test_a_full_disk_leaves_what_was_there(saved, monkeypatch):
    """At every write, half of it done."""
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    write = disk.write_synced
    for fails in range(len(before)):
        count = iter(range(100))

        def full(path, data, count=count, fails=fails):
            if next(count) == fails:
                path.write_bytes(data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, data)

        monkeypatch.setattr(disk, "write_synced", full)
        with pytest.raises(OSError, match="No space"):
            save_checkpoint(saved, TENSORS, {"progress": {"round": 4}})
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
        assert [path.name for path in saved.parent.iterdir()] == [saved.name]


@pytest.fixture
def small_disk(tmp_path):
    """512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_is_really_full(small_disk):
    (small_disk / "checkpoints").mkdir()
    run = RunDirectory(small_disk)
    run.tables["ledger"].append([{"round": 1}])
    number = 0
    with pytest.raises(OSError, match="No space"):  # noqa: PT012
        while number := number + 1:
            save_checkpoint(
                run.checkpoints / f"round_{number:06d}",
                {"server": {"w": torch.zeros(25_000)}},
                DOCUMENTS,
            )
    assert number > 2
    found = checkpoints_in(run.checkpoints)
    assert [path.name for path in found] == [f"round_{n:06d}" for n in range(number - 1, 0, -1)]
    assert all(load_checkpoint(path) for path in found)
    mark = run.tables["ledger"].mark
    with pytest.raises(OSError, match="No space"):
        run.tables["ledger"].append([{"round": n} for n in range(200_000)])
    assert run.tables["ledger"].mark == mark
    assert (
        run.tables["ledger"].until(mark) == run.tables["ledger"].path.read_bytes() == b"round\n1\n"
    )


def test_a_table_grows_and_goes_back(tmp_path):
    table = CsvTable(tmp_path / "metrics.csv", tmp_path / "copy.csv")
    table.append([{"round": 1, "a": 0.1}])
    first = table.mark
    table.append([{"round": 2, "a": float("nan")}])
    second, text = table.mark, table.path.read_text()
    table.append([{"round": 3, "b": 7}])
    assert table.path.read_text() == "round,a,b\n1,0.1,\n2,nan,\n3,,7\n"
    assert numbers(table.path.read_bytes())[2] == {"round": 3, "b": 7}
    again = CsvTable(*table.paths)
    again.rewind(second)
    assert table.path.read_text() == text == "round,a\n1,0.1\n2,nan\n"
    table.path.write_text(text + "3,half a li")
    again = CsvTable(*table.paths)
    again.rewind(first)
    again.append([{"round": 2, "a": float("nan")}])
    assert (again.mark, table.path.read_text()) == (second, text)
    table.path.write_text(text.replace("0.1", "0.2"))
    assert again.until(second).decode() == text  # of the copy
    again.rewind(second)
    assert [path.read_text() for path in table.paths] == [text, text]
    for path in table.paths:
        path.write_text(text.replace("0.1", "0.2"))
    with pytest.raises(CheckpointError, match="both have been changed"):
        again.until(first)
    again.rewind(None)
    assert not any(path.exists() for path in table.paths)


@pytest.mark.parametrize("what", ["flipped", "shortened", "removed", "header only"])
@pytest.mark.parametrize("which", [0, 1])
def test_one_damaged_copy_of_a_table_is_restored_from_the_other(what, which, tmp_path):
    table = CsvTable(tmp_path / "metrics.csv", tmp_path / "copy.csv")
    table.append([{"round": n, "a": n / 7} for n in range(50)])
    mark, data = table.mark, table.path.read_bytes()
    damaged = {
        "flipped": data[:99] + bytes([data[99] ^ 1]) + data[100:],
        "shortened": data[:-30],
        "header only": b"round,a\n",
    }
    if what == "removed":
        table.paths[which].unlink()
    else:
        table.paths[which].write_bytes(damaged[what])
    again = CsvTable(*table.paths)
    again.rewind(mark)
    assert [path.read_bytes() for path in table.paths] == [data, data]


def test_a_table_that_somebody_shortens_gets_no_hole(tmp_path):
    table = CsvTable(tmp_path / "metrics.csv", tmp_path / "copy.csv")
    table.append([{"round": n} for n in range(50)])
    table.path.write_text("round\n0\n")
    with pytest.raises(OSError, match=r"metrics.csv is shorter than what was written to it"):
        table.append([{"round": 50}])
    assert b"\0" not in table.path.read_bytes().rstrip(b"\0")


LINKS = [
    "metrics.csv",
    ".metadata.json.writing",
    "run.log",
    "figures/a.png",
    "checkpoints/.round_000001.writing",
]


@pytest.mark.parametrize("link", LINKS)
def test_nothing_is_written_through_a_symbolic_link(link, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "figures").mkdir()
    run, target = RunDirectory(tmp_path / "run"), tmp_path / "target"
    run.tables["metrics"].append([{"round": 1}])
    run.write("metadata.json", "{}")
    (run.path / link).unlink(missing_ok=True)
    target.write_text("precious")
    (run.path / link).symlink_to(target)
    write = {
        "metrics.csv": lambda: run.tables["metrics"].append([{"round": 2}]),
        ".metadata.json.writing": lambda: run.write("metadata.json", "{}"),
        "run.log": lambda: RunLog().write_to(run.path),
        "figures/a.png": lambda: run.save_figure("a", Figure()),
        "checkpoints/.round_000001.writing": lambda: run.save_checkpoint(1, {"server": {}}, {}),
    }[link]
    with suppress(OSError):
        write()
    assert target.read_text() == "precious"


def test_two_that_want_one_name_get_two(tmp_path):
    runs = [RunDirectory.create(tmp_path, "e", "run", {"config.yaml": str(n)}) for n in range(3)]
    assert [run.path.name for run in runs] == ["run", "run-2", "run-3"]
    assert [(run.path / "config.yaml").read_text() for run in runs] == ["0", "1", "2"]
    (tmp_path / "e" / "run-4").write_text("a file")
    assert RunDirectory.create(tmp_path, "e", "run", {}).path.name == "run-5"
    assert not list((tmp_path / "e").glob(".*"))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "a\\b", "a\0b", "a\nb"]
)
def test_names_cannot_leave_the_run_directory(name, tmp_path):
    assert not is_plain_name(name)
    with pytest.raises(ValueError, match="one file inside figures"):
        RunDirectory(tmp_path).figure(name)


def test_secrets_do_not_reach_the_records():
    assert (
        redact("sqlite:///mlflow.db http://me:pw@host/x") == "sqlite:///mlflow.db http://***@host/x"
    )
    for secret in (
        "postgresql://u:p/w@h", "http://u:p@ss@h", "Authorization: Bearer hush", "pwd=hush", "https://h/x?sig=hush",
        "--x.token='hush hush'",
    ):  # fmt: skip
        assert not any(part in redact(secret) for part in ("hush", "p/w", "p@ss", "ss@")), redact(
            secret
        )
    assert (
        redact("http://127.0.0.1:5000 design: a@b author=me")
        == "http://127.0.0.1:5000 design: a@b author=me"
    )
    words = [
        "fit",
        "--trainer.logger.tracking_uri=https://u:p@h",
        "--x.api_key",
        "abc",
        "--model.tokens",
        "512",
        "--y.password=z",
    ]
    assert redact_arguments(words) == [
        *(
            "fit",
            "--trainer.logger.tracking_uri=https://***@h",
            "--x.api_key",
            "***",
            "--model.tokens",
            "512",
            "--y.password=***",
        )
    ]
    settings = {
        "logger": [{"tracking_uri": "https://u:p@h", "token": "abc", "token_file": None}],
        "max_tokens": 5,
    }
    assert redact_settings(settings) == {
        "logger": [{"tracking_uri": "https://***@h", "token": "***", "token_file": None}],
        "max_tokens": 5,
    }


def test_nothing_of_ours_unpickles():
    """CIFAR's published pickles are the exception, read by ``data/cifar.py`` as it says there."""
    loads = re.compile(
        r"\b(?:import|from) (?:c?pickle|dill|joblib|shelve)\b|torch\.(?:load|save)\(|allow_pickle=True|np\.load\((?!.*allow_pickle=False)"
    )
    sources = [
        path for folder in ("fl_lightning", "callbacks") for path in (ROOT / folder).rglob("*.py")
    ]
    found = {path.name for path in sources if loads.search(path.read_text())}
    assert found <= {"cifar.py", "convert_traces.py"}
