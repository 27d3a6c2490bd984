"""Nodes whose disks are full, damaged or old."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch
import yaml
from test_deploy import (
    ALL,
    Drop,
    InProcess,
    command_line,
    deployed,
    metadata_of,
    nodes_in,
    simulated,
    weights,
)

from fl_lightning.deploy.node import states
from fl_lightning.deploy.node.cleaning import clean
from fl_lightning.deploy.node.states import StateFolder
from fl_lightning.deploy.protocol.gate import config_for_nodes
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.errors import InputError, LostStateError
from fl_lightning.support import disk

KD = [*ALL, "--trainer.max_local_steps=2"]
RUN = "ab" * 16


def ledger(cli) -> list[list[str]]:
    lines = (cli.trainer.run_dir / "ledger.csv").read_text().splitlines()
    return [line.split(",")[:2] for line in lines if "dropped" in line]


@pytest.mark.slow
@pytest.mark.essential
def test_a_full_disk_costs_a_client_its_round(tmp_path, monkeypatch, caplog):
    """In round 2 one state is not written; the client goes on from the one before, as in a
    simulation that drops it in this round."""
    before = disk.replace

    def replace(path: Path, data: bytes) -> None:
        if path.parent.name == "client_000001" and path.name == "after_000002.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        before(path, data)

    monkeypatch.setattr(states.disk, "replace", replace)
    cli = deployed("fedkd", tmp_path, InProcess(nodes_in(tmp_path)), *KD)
    assert ledger(cli) == [["2", "1"]]
    line = "node n1: client 1: what client 1 keeps after round 2; the node's disk does not take it (No space left"
    assert any(each.startswith(line) for each in caplog.messages)
    assert weights(cli) == simulated("fedkd", tmp_path, *KD, drop=Drop(2, (1,)))


def test_a_full_disk_does_not_end_a_node(tmp_path, monkeypatch):
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    (node,) = nodes_in(tmp_path, 1).values()
    config = config_for_nodes(
        yaml.safe_load(command_line("fedavg", tmp_path, *ALL[:5]).config_text)
    )
    check = Message(
        {"kind": "check"}, (yaml.safe_dump(config, sort_keys=False).encode(),)
    ).to_bytes()
    with monkeypatch.context() as broken:
        broken.setattr(disk, "replace", full)
        answer = Message.from_bytes(node.answer(check))
        assert (
            answer.header["reason"]
            == "the node's disk: No space left on device; the node's log says more"
        )
        with pytest.raises(InputError, match="the node's disk does not take it"):
            StateFolder(tmp_path).save(RUN, 1, 1, {"w": torch.ones(2)}, started_from=0)
    assert Message.from_bytes(node.answer(check)).kind == "checked"


class Damages(InProcess):
    """The state of client 1 is cut off before round 2."""

    def __init__(self, folder: Path) -> None:
        super().__init__(nodes_in(folder))
        self.folder = folder

    def exchange(self, messages, timeout):
        header = Message.from_bytes(next(iter(messages.values()))).header
        if (header["kind"], header.get("round")) == ("train", 2):
            (path,) = self.folder.glob("node1/states/*/client_000001/after_000001.safetensors")
            path.write_bytes(path.read_bytes()[:100])
        yield from super().exchange(messages, timeout)


@pytest.mark.slow
@pytest.mark.essential
def test_a_damaged_state_costs_its_client_and_is_named(tmp_path, caplog):
    cli = deployed("fedkd", tmp_path, Damages(tmp_path), *KD)
    assert ledger(cli) == [["2", "1"], ["3", "1"]]
    assert (
        "node n1: client 1: after_000001.safetensors; the file is damaged or cannot be read"
        in caplog.text
    )
    assert "what clients 1 kept is not on their nodes any more" in caplog.text
    run = metadata_of(cli)["deployment"]["run"]
    path = tmp_path / "node1" / "states" / run / "client_000001" / "after_000001.safetensors"
    assert f"{path}, what client 1 kept" in caplog.text  # in the log of the node
    assert path.stat().st_size == 100  # nobody has touched it


@pytest.mark.parametrize("data", ["", "5" * 64])
def test_a_state_that_cannot_be_read_is_named(data, tmp_path):
    kept = StateFolder(tmp_path)
    kept.data = data
    kept.save(RUN, 3, 1, {"w": torch.ones(20)}, started_from=0)
    path = tmp_path / RUN / "client_000003" / "after_000001.safetensors"
    whole = path.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(len(whole))]
    for damaged in (b"", whole[:5], whole[:-4], b"\xff" * len(whole), *flipped):
        path.write_bytes(damaged)
        with pytest.raises(
            LostStateError, match=r"after_000001.safetensors, what client 3 kept.*put it back"
        ):
            kept.load(RUN, 3, 1)
    path.write_bytes(whole)
    assert kept.load(RUN, 3, 1)["w"].sum() == 20


def test_a_server_that_goes_back_before_a_damaged_state_has_it_written_anew(tmp_path):
    kept = StateFolder(tmp_path)
    for round, before in ((1, 0), (2, 1)):
        kept.save(RUN, 3, round, {"w": torch.full((2,), float(round))}, started_from=before)
    (tmp_path / RUN / "client_000003" / "after_000002.safetensors").write_bytes(b"")
    with pytest.raises(LostStateError):
        kept.load(RUN, 3, 2)
    assert kept.load(RUN, 3, 1)["w"].sum() == 2
    kept.save(RUN, 3, 2, {"w": torch.full((2,), 5.0)}, started_from=1)
    assert kept.load(RUN, 3, 2)["w"].sum() == 10


def age(path: Path, days: float) -> None:
    for each in [*path.rglob("*"), path]:
        when = time.time() - days * 86400
        os.utime(each, (when, when), follow_symlinks=False)


def test_a_node_removes_what_it_has_not_used_for_long(tmp_path, caplog):
    """Links are neither followed nor removed, nor is anything of another name."""
    caplog.set_level("INFO")
    node, elsewhere = tmp_path / "node", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    old, new, linked = "0a" * 16, "0b" * 16, "0c" * 16
    for run, days in ((old, 100), (new, 40), ("mine", 100)):
        kept = node / "states" / run / "client_000001"
        kept.mkdir(parents=True)
        (kept / "after_000001.safetensors").touch()
        (kept / "link").symlink_to(elsewhere)
        age(node / "states" / run, days)
    (node / "states" / linked).symlink_to(elsewhere, target_is_directory=True)
    (node / "configs").mkdir()
    (node / "unmasked" / old).mkdir(parents=True)
    files = {
        f"{'1' * 64}.yaml": 100,
        f"{'1' * 64}.own.yaml": 100,
        f"{'2' * 64}.yaml": 41,
        "notes.yaml": 100,
    }
    for name, days in files.items():
        (node / "configs" / name).touch()
        age(node / "configs" / name, days)
    age(elsewhere, 100)
    age(node / "states" / linked, 100)
    assert clean(node, 0) == []
    assert clean(node, 61) == []  # 100 days ago, and 60 before the last use
    removed = clean(node, 30)
    assert {path.name for path in removed} == {old, f"{'1' * 64}.yaml", f"{'1' * 64}.own.yaml"}
    (line,) = caplog.messages
    assert (
        "removed the states of 1 runs and 2 configurations that were not used for 30 days" in line
    )
    assert {path.name for path in (node / "states").iterdir()} == {new, linked, "mine"}
    assert {path.name for path in (node / "configs").iterdir()} == {
        f"{'2' * 64}.yaml",
        "notes.yaml",
    }
    assert (elsewhere / "file").exists()
    assert (node / "unmasked" / old).exists()
    assert clean(node, 30) == []
    assert clean(tmp_path / "nowhere", 30) == []


def test_one_new_file_keeps_a_run(tmp_path):
    for run in ("0a" * 16, "0b" * 16):
        folder = tmp_path / "states" / run / "client_000001"
        folder.mkdir(parents=True)
        (folder / "x").touch()
    age(tmp_path / "states", 100)
    (tmp_path / "states" / ("0a" * 16) / "client_000001" / "x").touch()
    assert [path.name for path in clean(tmp_path, 30)] == ["0b" * 16]


def test_a_link_in_the_place_of_all_states_is_left_alone(tmp_path):
    run = tmp_path / "other" / "states" / ("0a" * 16)
    run.mkdir(parents=True)
    age(run, 100)
    (tmp_path / "node" / "configs").mkdir(parents=True)
    (tmp_path / "node" / "configs" / f"{'1' * 64}.yaml").touch()
    (tmp_path / "node" / "states").symlink_to(tmp_path / "other" / "states")
    assert clean(tmp_path / "node", 30) == []
    assert run.exists()


def test_a_run_whose_states_are_read_is_not_old(tmp_path):
    kept = StateFolder(tmp_path / "states")
    other = "cd" * 16
    for run in (RUN, other):
        kept.save(run, 3, 1, {"w": torch.ones(2)}, started_from=0)
        age(tmp_path / "states" / run, 100)
    kept.load(RUN, 3, 1)
    assert [path.name for path in clean(tmp_path, 30)] == [other]


def test_a_configuration_that_is_used_is_not_old(tmp_path):
    (node,) = nodes_in(tmp_path, 1).values()
    digest = "3" * 64
    path = node._config(digest)
    path.parent.mkdir(parents=True)
    path.touch()
    age(path, 100)
    with pytest.raises(InputError, match="has not checked it"):
        node._prepared(digest)
    assert time.time() - path.stat().st_mtime < 86400
