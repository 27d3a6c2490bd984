"""The runner of the public workloads: its flags, what it says of a contender that fails, and that
nothing is left running."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from places import BENCHMARKS


@pytest.fixture
def workloads(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("workloads")


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("processes")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["W5"], "workload 'W5'; one of W1, W2, W3, B1, B2, W4, L1"),
        (["W1", "--repeats", "0"], "--repeats 0 --rounds 0; at least 1 and 0"),
        (
            ["W1", "--peers", "fedlab=python"],
            "--peers fedlab=python; NAME=PYTHON with a name of flower,",
        ),
        (["W1", "--peers", "pfl"], "--peers pfl; NAME=PYTHON"),
        (["W1", "--peers", "pfl="], "--peers pfl=; NAME=PYTHON"),
    ],
)
def test_a_flag_that_means_nothing_is_refused(workloads, capsys, flags, said):
    with pytest.raises(SystemExit) as stopped:
        workloads.parse(flags)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_who_is_measured(workloads):
    options = workloads.parse(
        ["--engines", "auto", "batched", "--peers", "pfl2=/its/python", "--channels_last"]
    )
    assert options.workloads == ["W1", "W2", "W3", "B1", "B2", "W4", "L1"]
    who = workloads.contenders(options)
    assert list(who) == ["plain", "limit", "auto", "batched", "pfl2"]
    assert who["pfl2"][0] == "/its/python"
    assert who["batched"][-2:] == ("--engine", "batched")
    assert [label for label, command in who.items() if "--channels_last" in command] == [
        "plain",
        "pfl2",
    ]
    programs = [
        part
        for command in (*who.values(), *workloads.PEERS.values())
        for part in command
        if part.endswith(".py")
    ]
    assert all((BENCHMARKS / program).is_file() for program in programs)


@pytest.mark.slow
def test_a_peer_that_fails_has_a_row_that_says_so(workloads, monkeypatch, capsys, tmp_path):
    broken, lazy = tmp_path / "broken.py", tmp_path / "lazy.py"
    broken.write_text("import a_peer_that_is_not_installed")
    lazy.write_text(
        "import json; print(json.dumps({'seconds': 1e-9, 'first_round_ended': 0.0, 'steps_a_round': 1}))"
    )
    monkeypatch.setattr(
        workloads, "PEERS", {"absent": ("none.py",), "broken": (str(broken),), "lazy": (str(lazy),)}
    )
    peers = ["absent=/nowhere/python", f"broken={sys.executable}", f"lazy={sys.executable}"]
    out = tmp_path / "out.json"
    workloads.main(
        ["W4", "--rounds", "1", "--repeats", "2", "--engines", "--peers", *peers, "--out", str(out)]
    )
    said = capsys.readouterr().out.splitlines()
    assert [text.split()[1] for text in said[1:6]] == ["plain", "limit", "absent", "broken", "lazy"]
    assert said[3].endswith("failed: there is no interpreter at /nowhere/python")
    assert said[4].endswith(
        "failed: ModuleNotFoundError: No module named 'a_peer_that_is_not_installed'"
    )
    assert said[5].endswith("failed: 1 local steps a round instead of 200")
    assert said[6].startswith("| workload | plain, s | limit | absent | broken | lazy |")
    assert said[8].split(" | ")[3:6] == ["-", "-", "-"]
    rows = {row["who"]: row for row in json.loads(out.read_text())["rows"]}
    assert {who: len(row["runs"]) for who, row in rows.items()} == {
        "plain": 2,
        "limit": 2,
        "absent": 1,
        "broken": 1,
        "lazy": 1,
    }
    assert rows["plain"]["ratio"] == 1.0
    assert rows["limit"]["to_limit"] == 1.0
    for run in rows["plain"]["runs"] + rows["limit"]["runs"]:
        assert (run["rounds"], run["steps_a_round"]) == (1, 200)
        assert run["moved"] > 0
        assert set(run["versions"]) == {"torch", "numpy", "timm"}


@pytest.mark.parametrize("name", ["W4", "B1", "W2"])
def test_the_limit_trains_what_the_plain_loop_trains(workloads, monkeypatch, name):
    """Written-out gradients of a stack and weights that are views of one vector end where autograd
    and state dictionaries end, for orders that are the same."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the module sets it, and it is put back
    limit, plain, workload = map(import_module, ("workload_limit", "workload_plain", "workload"))
    work = replace(workload.WORKLOADS[name], clients=4, examples=20)
    model, (inputs, target) = work.build(channels_last=True), work.data()
    server = limit.flatten(model).clone()
    if name == "W4":
        share = limit.Stack(work, inputs, target)
    else:
        share = limit.InTurn(work, model, inputs, target)
    total, clients = torch.zeros_like(server), np.array([2, 0, 3])
    steps = share(clients, np.random.default_rng(5), server, total)
    rng, expected, counted = np.random.default_rng(5), torch.zeros_like(server), 0
    for client in clients:
        alone = work.build(channels_last=True)
        counted += plain.train(alone, work, inputs, target, int(client), rng)
        expected += limit.flatten(alone)
    assert steps == counted == 3 * work.epochs
    assert not torch.equal(total, 3 * server)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)


def test_what_is_said_of_the_choice(workloads):
    def rows(sequential: float, batched: float) -> list[dict[str, object]]:
        seconds = {"auto": 1.0, "sequential": sequential, "batched": batched}
        return [
            {"who": who, "seconds": time, "engine": "batched" if who == "auto" else who}
            for who, time in seconds.items()
        ]

    assert workloads.choice(rows(2.0, 1.0)).strip() == "auto chose batched, the faster engine"
    assert (
        workloads.choice(rows(1.0, 2.0)).strip()
        == "auto chose batched of sequential 1000.0 ms or batched 2000.0 ms"
    )
    assert workloads.choice(rows(1.0, 2.0)[:2]) == ""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_memory_is_that_of_the_whole_family_and_nobody_is_left(processes, tmp_path, monkeypatch):
    """The time is over as soon as both hold their memory, however long that takes."""
    ready = tmp_path / "ready"
    clock = SimpleNamespace(monotonic=lambda: math.inf if ready.exists() else time.monotonic())
    monkeypatch.setattr(processes, "time", clock)
    hold = "import subprocess, sys, time; held = b'x' * (64 << 20)"
    child = f"{hold}; open('ready', 'w').close(); time.sleep(600)"
    parent = f"{hold}; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True); time.sleep(600)"
    done = processes.run(
        [sys.executable, "-c", parent], folder=tmp_path, environment=dict(os.environ), timeout=600.0
    )
    assert done.code is None
    assert done.peak_mib > 128
    for _ in range(100):  # a process that is killed takes a moment to go
        if gone(int(done.stdout)):
            return
        time.sleep(0.05)
    pytest.fail("what it started still runs")


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
