"""Nodes that are late or have damaged data, through Flower on loopback with processes of their
own."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import pytest
import yaml
from clocked import Loses
from image_files import damaged, write
from outcomes import rows_of
from places import ROOT, SUPPORT
from test_deploy import ALL, COMMON, Drop, command_line, weights
from test_deploy import simulated as simulated_here
from test_deploy_flower import (
    SMALL,
    finish,
    metadata_in,
    node_words,
    ours,
    program,
    superlink,  # noqa: F401
    wait_for,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed"),
]


def start_nodes(address: str, folder: Path, programs: list, *second: object) -> None:
    programs.append(ours(*node_words(address, folder, 0, 2), cwd=folder, log="n0.log"))
    programs.append(program(sys.executable, *second, cwd=folder, log=folder / "n1.log"))
    for number in range(2):
        wait_for(folder / f"n{number}.log", "as SuperNode")


def deploy_words(address: str, *words: object) -> list[object]:
    words = (*words, "--trainer.default_root_dir=deployed", f"--deploy.superlink={address}")
    return ["deploy", *words, "--deploy.root_certificates=certs/ca.crt", "--deploy.min_nodes=2"]


def test_a_node_that_is_late_is_dropped_and_takes_part_in_the_next_round(superlink, tmp_path):  # noqa: F811
    """Its clients were trained in round 2 and wrote what they keep. The answer is sent when round 2
    is done, and in round 3 they start from round 1, as in a simulation that drops them in round
    2."""
    address, programs = superlink
    go = tmp_path / "go"
    words = [SUPPORT / "slow_node.py", address, "node1", 1, 2, "certs/ca.crt", "certs/node1", go]
    start_nodes(address, tmp_path, programs, *words)
    run = ["--config", ROOT / "configs" / "fedkd.yaml", *COMMON, *ALL, "--deploy.round_seconds=60"]
    process, log = (
        ours(*deploy_words(address, *run), cwd=tmp_path, log="deploy.log"),
        tmp_path / "deploy.log",
    )
    programs.append(process)
    wait_for(log, "no answer of node slow")
    go.touch()
    assert finish(process, log) == 0, log.read_text()[-5000:]
    found = metadata_in(tmp_path / "deployed")
    assert found["weights_sha256"] == simulated_here("fedkd", tmp_path, *ALL, drop=Drop(2, (1, 3)))
    (ledger,) = (tmp_path / "deployed").glob("*/*/ledger.csv")
    late = [
        row for row in csv.DictReader(ledger.read_text().splitlines()) if row["status"] == "dropped"
    ]
    assert [(row["round"], row["client"]) for row in late] == [("2", "1"), ("2", "3")]
    assert all(int(row["download"]) > 1000 and row["upload"] == "0" for row in late)
    assert sorted(found["deployment"]["nodes"].values()) == [[0, 2], [1, 3]]


def test_nobody_waits_for_a_node_when_enough_have_answered(superlink, tmp_path):  # noqa: F811
    """All four clients are asked where two are wanted. From round 2 on the second node says nothing
    at all, and a round may last ten minutes."""
    address, programs = superlink
    never = tmp_path / "never"
    words = [SUPPORT / "slow_node.py", address, "node1", 1, 2, "certs/ca.crt", "certs/node1", never]
    start_nodes(address, tmp_path, programs, *words)
    config = [
        "--config",
        ROOT / "configs" / "fedavg.yaml",
        *COMMON,
        *ALL[:-1],
        "--trainer.participation=0.5",
    ]
    first = "--trainer.rounds={class_path: OverSelection, init_args: {factor: 2.0}}"
    process, log = (
        ours(*deploy_words(address, *config, first), cwd=tmp_path, log="deploy.log"),
        tmp_path / "deploy.log",
    )
    programs.append(process)
    assert finish(process, log) == 0, log.read_text()[-5000:]
    assert "no answer of node slow: its clients count as late" in log.read_text()
    (ledger,) = (tmp_path / "deployed").glob("*/*/ledger.csv")
    late: dict[int, set[int]] = {}
    for row in csv.DictReader(ledger.read_text().splitlines()):
        if row["status"] == "lost":
            late.setdefault(int(row["round"]), set()).add(int(row["client"]))
    assert late[2] == late[3] == {1, 3}
    assert len(late[1]) == 2
    (metrics,) = (tmp_path / "deployed").glob("*/*/metrics.csv")
    rows = rows_of(metrics)
    assert [float(row["clients/late"]) for row in rows] == [2.0] * 3
    assert all(0 < float(row["clock/round_seconds"]) < 300 for row in rows)
    cli = command_line("fedavg", tmp_path / "simulated", *ALL[:-1])
    cli.trainer.callbacks.append(Loses(late))
    cli.start()
    assert metadata_in(tmp_path / "deployed")["weights_sha256"] == weights(cli)


def test_a_node_with_damaged_data_is_refused_by_name(superlink, tmp_path):  # noqa: F811
    """Its folder has an image that is cut off. The others' run is not begun with wrong data, nor
    stopped in the middle; it is refused before anything is created."""
    address, programs = superlink
    write(tmp_path / "images")
    damaged(tmp_path / "own")
    overlay = tmp_path / "own.yaml"
    overlay.write_text(yaml.safe_dump({"data": {"init_args": {"train": str(tmp_path / "own")}}}))
    words = [
        "-m",
        "fl_lightning",
        *node_words(address, tmp_path, 1, 2),
        f'--overlays=["{overlay}"]',
    ]
    start_nodes(address, tmp_path, programs, *words)
    data = [
        "--data=ImageFolder",
        f"--data.train={tmp_path / 'images'}",
        "--data.size=20",
        "--data.partition=IID",
    ]
    deploy = deploy_words(address, "--config", ROOT / "configs" / "fedavg.yaml", *data, *SMALL)
    process, log = ours(*deploy, cwd=tmp_path, log="deploy.log"), tmp_path / "deploy.log"
    programs.append(process)
    assert finish(process, log) == 2, log.read_text()[-5000:]
    said = " ".join(log.read_text().split())
    assert "fl_lightning: error: node n1; " in said
    assert "003.png; it is no image or damaged" in said
    assert not (tmp_path / "deployed").exists()
