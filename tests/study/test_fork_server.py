"""Jobs of a pool that are forked by a server give what processes of their own give, and end with
it."""

from __future__ import annotations

import json
import os
import signal
import sys
from time import sleep

import pytest

from fl_lightning.__main__ import main
from fl_lightning.study.execute import fork_server, jobs
from fl_lightning.study.execute.jobs import Job, Pool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.essential,
    pytest.mark.skipif(sys.platform != "linux", reason="jobs are forked on Linux alone"),
]


def fit(folder, name, rounds=2):
    limits = {"max_rounds": rounds, "participation": 0.1, "callbacks": "[]", "logger": "false"}
    flags = {**limits, "default_root_dir": folder, "experiment": "one", "run_name": name}
    return [
        "fit",
        "--config",
        "plain",
        *[f"--trainer.{key}={value}" for key, value in flags.items()],
    ]


def metadata(folder, name):
    return json.loads((folder / "one" / name / "metadata.json").read_text())


def last_status(folder, name):
    for _ in range(600):
        if metadata(folder, name)["status"] != "running":
            break
        sleep(0.1)
    return metadata(folder, name)["status"]


def test_forked_jobs_train_as_processes_of_their_own_do(tmp_path):
    asked = {
        "fine": (fit(tmp_path, "forked"), 0),
        "refused": ([*fit(tmp_path, "refused"), "--trainer.local_epochs=0"], 2),
        "again": (fit(tmp_path, "again"), 0),
    }
    codes = {}
    pool = Pool([{"OMP_NUM_THREADS": "1"}])
    try:
        pool.run(
            [Job(name, args, tmp_path / f"{name}.log") for name, (args, _) in asked.items()],
            lambda running, code: codes.update({running.job.name: code}),
        )
    finally:
        pool.stop()
    assert codes == {name: code for name, (_, code) in asked.items()}
    assert "--trainer.local_epochs 0" in (tmp_path / "refused.log").read_text()
    assert main(fit(tmp_path, "alone")) == 0
    weights = {metadata(tmp_path, name)["weights_sha256"] for name in ("forked", "again", "alone")}
    assert len(weights) == 1
    words = metadata(tmp_path, "again")["command_line"]
    assert words[3] == "fit"
    assert metadata(tmp_path, "forked")["command_line"] == [
        word.replace("again", "forked") for word in words
    ]


def test_jobs_of_a_server_that_is_killed_end_with_their_checkpoints(tmp_path):
    """And the next one has a server of its own."""
    codes, killed = {}, []

    def look(running):
        metrics = tmp_path / "one" / "long" / "metrics.csv"
        if not killed and metrics.exists() and len(metrics.read_text().splitlines()) > 2:
            killed.append(running[0].process.server.process.pid)
            os.kill(killed[0], signal.SIGKILL)

    pool = Pool([{"OMP_NUM_THREADS": "1"}])
    try:
        pool.run(
            [
                Job("long", fit(tmp_path, "long", 100_000), tmp_path / "long.log"),
                Job("next", fit(tmp_path, "next"), tmp_path / "next.log"),
            ],
            lambda running, code: codes.update({running.job.name: code}),
            look,
        )
    finally:
        pool.stop()
    assert codes == {"long": -signal.SIGKILL, "next": 0}
    assert last_status(tmp_path, "long") == "interrupted"


def test_a_server_that_does_not_answer_is_ended_with_the_pool(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "STOP_SECONDS", 0.5)
    monkeypatch.setattr(fork_server, "ANSWER_SECONDS", 0.5)
    servers = []

    def look(running):
        metrics = tmp_path / "one" / "long" / "metrics.csv"
        if metrics.exists() and len(metrics.read_text().splitlines()) > 2:
            servers.append(running[0].process.server.process)
            servers[0].send_signal(signal.SIGSTOP)
            raise KeyboardInterrupt

    job = Job("long", fit(tmp_path, "long", 100_000), tmp_path / "long.log")
    try:
        with pytest.raises(KeyboardInterrupt):
            Pool([{"OMP_NUM_THREADS": "1"}]).run([job], lambda running, code: None, look)
        assert servers[0].returncode == -signal.SIGKILL
        assert last_status(tmp_path, "long") == "interrupted"
    finally:
        for server in servers:
            server.kill()
