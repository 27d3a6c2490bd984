"""Several processes give what one gives, bit for bit, and end together."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ranks_program
import torch
from ranked import result, started
from ranks_program import MANY, fit
from refusals import refused

from fl_lightning.client import Client
from fl_lightning.conformance.toy import Points, on_points
from fl_lightning.distributed import launch
from fl_lightning.engines import ClientTask, Engine
from fl_lightning.engines.base import ClientResult
from fl_lightning.engines.ranks import RankedEngine, _pack, _unpack, deal, work
from fl_lightning.methods import FedAvg
from fl_lightning.metrics import Mean
from fl_lightning.trainer import FederatedTrainer


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.essential
def test_two_processes_are_one(tmp_path, monkeypatch, caplog):
    """Each of the ten methods, kept client state included, clipped steps at a falling lr,
    optimisers of the server, stacks of clients, and topologies of which some take part; only rank 0
    leaves anything."""
    monkeypatch.setattr("fl_lightning.engines.stacked.batched.MAX_STACK", 2)
    program = started(tmp_path / "two", "all")
    for name in MANY:
        fit(name, tmp_path / "one")
    _, errors = program.communicate(timeout=240)
    assert program.returncode == 0, errors
    assert "one by one" not in caplog.text
    for name in MANY:
        assert [run.name for run in (tmp_path / "two" / name).iterdir()] == ["run"]
        two, one = tmp_path / "two" / name / "run", tmp_path / "one" / name / "run"
        assert result(two) == result(one), name
        assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
        assert json.loads((two / "metadata.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_uploads_on_their_way_go_on_with_two_processes(tmp_path):
    """Both take them from the checkpoint of a run that one process began."""
    fit("buffered", tmp_path / "whole")
    half = fit("buffered", tmp_path / "half", max_rounds=2)
    assert half.parts.timing.in_flight
    program = started(tmp_path / "half", "resumed", half.run_dir)
    _, errors = program.communicate(timeout=240)
    assert program.returncode == 0, errors
    both = [result(tmp_path / folder / "buffered" / "run") for folder in ("whole", "half")]
    assert both[0] == both[1]


@pytest.mark.slow
def test_robust_averages_of_two_processes_are_those_of_one(tmp_path):
    """Every process is sent all uploads, also those of a mean that attackers look at."""
    program = started(tmp_path / "two", "robust")
    ranks_program.fit_robust(tmp_path / "one")
    _, errors = program.communicate(timeout=240)
    assert program.returncode == 0, errors
    for name in ("v", "root", "bulyan", "mean"):
        two, one = (result(tmp_path / folder / name / "run") for folder in ("two", "one"))
        assert two == one, name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.essential), 4])
def test_masked_sums_of_processes_are_those_of_one(tmp_path, ranks):
    """Drop-outs at every phase and a damaged message included: weights, metrics and the ledger's
    bytes."""
    pytest.importorskip("Crypto")
    program = started(tmp_path / "many", f"secure{ranks}")
    fit("FedMPQ", tmp_path / "one", **ranks_program.SECURE)
    _, errors = program.communicate(timeout=240)
    assert program.returncode == 0, errors
    many, one = (result(tmp_path / folder / "FedMPQ" / "run") for folder in ("many", "one"))
    assert many == one
    assert {"trained", "rejected"} < {line.split(",")[2] for line in one[2].splitlines()}


@pytest.mark.slow
@pytest.mark.essential
def test_a_rank_that_dies_is_named_and_the_run_can_go_on(tmp_path):
    program = started(tmp_path, "1")
    _, errors = program.communicate(timeout=120)
    run = tmp_path / "FedAvg" / "run"
    pid = (run / "rank1.pid").read_text()
    assert program.returncode == 1
    assert f"rank 1 (process {pid}) was killed by SIGKILL" in errors
    metadata = json.loads((run / "metadata.json").read_text())
    assert metadata["status"] == "failed"
    fit(
        "FedAvg",
        tmp_path,
        ckpt_path=str(run),
        callbacks=[ranks_program.Dies(rank=-1, round=0)],
        allow_changed=True,
    )  # its classes were those of __main__
    fit("FedAvg", tmp_path / "whole")
    assert result(run) == result(tmp_path / "whole" / "FedAvg" / "run")


@pytest.mark.slow
@pytest.mark.essential
def test_ranks_leave_when_rank_zero_dies(tmp_path):
    program = started(tmp_path, "0")
    program.communicate(timeout=120)  # until rank 1 lets go of stderr
    assert program.returncode == -signal.SIGKILL
    pid, deadline = (
        int((tmp_path / "FedAvg" / "run" / "rank1.pid").read_text()),
        time.monotonic() + 120,
    )
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.essential
def test_torchrun(tmp_path):
    """Which says how many processes there are; nothing has to be set."""
    program = started(
        tmp_path / "two",
        "torchrun",
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    )
    _, errors = program.communicate(timeout=120)
    assert program.returncode == 0, errors
    fit("FedMPQKD", tmp_path / "one")
    assert result(tmp_path / "two" / "FedMPQKD" / "run") == result(
        tmp_path / "one" / "FedMPQKD" / "run"
    )


def test_longest_first():
    assert deal([1, 5, 2, 2, 4], 2) == [[1, 3], [0, 2, 4]]
    works = np.random.default_rng(0).integers(1, 100, 40).tolist()
    loads = [sum(works[index] for index in share) for share in deal(works, 4)]
    assert sum(loads) == sum(works)
    assert max(loads) - min(loads) <= min(works) + max(works) / 10
    assert deal([1.0], 3) == [[0], [], []]


def order(id: int = 3, steps: int = 2) -> ClientTask:
    return ClientTask(
        Client(id, np.arange(100), np.arange(0)),
        1,
        b"message",
        torch.zeros(100, dtype=torch.int64),
        2,
        steps,
    )


def test_work_is_what_is_trained_on():
    assert (
        work(order(steps=2), 10)
        < work(order(steps=5), 10)
        < work(order(steps=100), 10)
        == work(order(steps=1000), 10)
    )


def test_a_result_survives_the_way_between_processes():
    state = {"a": torch.randn(3, 2)}
    losses = {"loss": Mean(1 / 3, 7), "loss_kd": Mean(float("nan"), 7)}
    there = ClientResult(order().client, b"\x00upload\xff", state, losses, 2)
    assert _pack(there).keys() == {"upload", "report"}, "a state does not go to all ranks"
    back = _unpack(_pack(there), order(), state)
    assert (back.upload, back.steps, list(back.losses)) == (there.upload, 2, list(losses))
    assert back.losses["loss"] == Mean(1 / 3, 7)
    assert back.verified is None, "it has been on the way: its checksum is to be looked at"
    assert back.client.state is back.state is state


def test_one_process_is_the_engine_itself():
    class Echo(Engine):
        def train(self, orders, units=None):
            yield from orders

    orders = [order(1), order(2)]
    assert list(RankedEngine(Echo(), ranks_program.data_of("FedAvg")).train(orders)) == orders


@pytest.mark.parametrize(
    ("environment", "devices", "expected"),
    [
        ({}, 1, (1, 1)),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, 1, (2, 2)),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, 2, (2, 1)),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}, 1, (1, 1)),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}, 1, (4, 2)),
        ({"SLURM_NTASKS": "8"}, 1, (1, 1)),  # a batch script without srun is one process
    ],
)
def test_who_started_how_many(monkeypatch, environment, devices, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launch.processes(devices, 1) == expected


def test_silent_copies_are_refused(monkeypatch):
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError,
        match=r"--trainer.devices 2 where 4 .*; each is one device; write --trainer.devices 4",
    ):
        FederatedTrainer(devices=2)


@pytest.mark.parametrize("command", ["test", "export"])
def test_what_runs_in_one_process_is_refused_in_several(command, monkeypatch):
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    trainer = FederatedTrainer(accelerator="cpu", devices=4, logger=False)
    with refused(f"{command} in several processes", "without torchrun"):
        getattr(trainer, command)(on_points(FedAvg()), Points())


@pytest.mark.parametrize(
    "settings", [{"strategy": "fsdp"}, {"strategy": "dp"}, {"rank_timeout": 0}]
)
def test_bad_settings(settings):
    with pytest.raises(
        ValueError, match=r"--trainer\.\w+ .*;.*; write --trainer|--trainer\.\w+ .*; at least"
    ):
        FederatedTrainer(**settings)


def test_no_run_is_on_mps(monkeypatch):
    """It cannot add up losses in float64."""
    monkeypatch.setattr(launch.MPSAccelerator, "is_available", staticmethod(lambda: True))
    assert FederatedTrainer(accelerator="auto").fabric.device.type == "cpu"
    for name in ("mps", "gpu"):
        with refused(f"--trainer.accelerator {name}", "write --trainer.accelerator cpu"):
            FederatedTrainer(accelerator=name)


def test_the_parent_of_ranks_is_told_to_them_alone(monkeypatch):
    """A torchrun that the same process starts later has ranks of its own."""
    told = []

    class Launcher(launch.RankLauncher):
        def _call_children_scripts(self):
            told.append(os.environ[launch.PARENT_VARIABLE])

    monkeypatch.delenv(launch.PARENT_VARIABLE, raising=False)
    monkeypatch.setattr(launch.RankLauncher, "watch", None)
    monkeypatch.setattr(launch, "ProcessWatch", lambda *_: None)
    monkeypatch.setattr(launch, "_set_num_threads_if_needed", lambda **_: None)
    environment = SimpleNamespace(
        validate_settings=lambda **_: None, creates_processes_externally=False, node_rank=lambda: 0
    )
    assert Launcher(environment, 2, 1).launch(lambda: "ran") == "ran"
    assert told == [str(os.getpid())]
    assert launch.PARENT_VARIABLE not in os.environ
