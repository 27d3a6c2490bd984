"""The two halves of a deployment, the command and the server's half: what becomes of the run and of
the job's folder when one of them ends, is interrupted or is killed. Without Flower."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deploy_transports import InProcess
from places import ROOT
from test_deploy import ALL, command_line, nodes_in, wait_until

from fl_lightning.deploy.flower import RefusalFilter, launch
from fl_lightning.deploy.server import halves, job
from fl_lightning.deploy.server.roster import RoundRules
from fl_lightning.errors import InputError, RunStopped

HOLDER = """
import sys, time
from pathlib import Path
from fl_lightning.deploy.server.halves import here
with here(Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    time.sleep(120)
"""
# without collections: Python drops what a signal's handler raises while it collects, and this would
# sleep on
COMMAND = """
import gc, time
from pathlib import Path
from fl_lightning.__main__ import program
from fl_lightning.deploy import command
from fl_lightning.deploy.flower import launch
def show(words, folder, home):
    gc.disable()
    Path("found").write_text(str(folder))
    Path("found").rename("folder")
    time.sleep(120)
command.launch.require_flower = lambda: None
launch._show = show
program()
"""


def python(code: str, *words: object, cwd: Path) -> subprocess.Popen:
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(cwd)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_half_is_gone_when_its_process_was_killed(tmp_path):
    assert not halves.is_gone(tmp_path, halves.SERVER)
    process = python(HOLDER, tmp_path, halves.SERVER, cwd=tmp_path)
    try:
        assert process.stdout.readline() == "held\n"
        assert not halves.is_gone(tmp_path, halves.SERVER)
    finally:
        process.kill()
        process.communicate()
    assert halves.is_gone(tmp_path, halves.SERVER)


@pytest.fixture
def written(tmp_path: Path, monkeypatch) -> Path:
    """The folder of a job, and the working directory as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "job"
    folder.mkdir()
    cli = command_line("fedavg", tmp_path, *ALL[:5])
    job.write_job(folder, cli.config_text, RoundRules(wait_seconds=1), None, ["x"], nodes=tmp_path)
    return folder


def test_the_servers_half_removes_the_folder_when_the_command_is_gone(written, monkeypatch):
    monkeypatch.setattr(job, "_fit", lambda *arguments: Path("run"))
    with halves.here(written, halves.COMMAND):
        job.run_job(written, InProcess({}))
        assert job.outcome_of(written) == {"code": 0, "run_dir": "run"}
    job.run_job(written, InProcess({}))
    assert not written.exists()


@pytest.mark.parametrize(
    ("error", "code"), [(InputError("a", "b", "c"), 2), (RunStopped("a", "b", "c"), 1)]
)
def test_a_refusal_is_one_line_of_flowers_log(error, code, written, monkeypatch, caplog):
    def refuse(*arguments: object) -> Path:
        raise error

    monkeypatch.setattr(job, "_fit", refuse)
    flower = logging.getLogger(f"test.flwr{code}")
    flower.addFilter(RefusalFilter())
    for raised in (ValueError("a bug"), None):
        try:
            if raised:
                raise raised
            job.run_job(written, InProcess({}))
        except Exception as ended:  # as Flower does it
            flower.error("%s raised an exception", "ServerApp", exc_info=ended)
            flower.error("Exit Code: 201\nsomething unhandled")
    assert caplog.messages == [
        "ServerApp raised an exception",
        "Exit Code: 201\nsomething unhandled",
        "the run ended: a; b; c",
    ]
    assert caplog.text.count("Traceback") == 1  # of the bug
    assert job.outcome_of(written) == {"code": code, "error": ["a", "b", "c"]}


def test_who_is_killed_in_mid_run_leaves_the_run_directory_to_continue(written):
    """It is known from the first round on."""

    class Killed(InProcess):
        def exchange(self, messages, timeout):
            if (written / "begun").read_text():
                raise KeyboardInterrupt
            yield from super().exchange(messages, timeout)

    with halves.here(written, halves.COMMAND), pytest.raises(KeyboardInterrupt):
        job.run_job(written, Killed(nodes_in(written.parent)))
    (written / "outcome.json").unlink()  # as if it had been killed with no time to write it
    (run,) = written.parent.glob("fedavg/*/config.yaml")
    given, _, instead = job.outcome_of(written)["error"]
    assert "ended without a word" in given
    assert instead == f"continue with --ckpt_path {run.parent}"


@pytest.mark.timeout(120)  # the command whose log is shown sleeps for longer
def test_a_killed_half_is_noticed_although_its_log_goes_on(tmp_path, monkeypatch):
    (tmp_path / "begun").touch()
    monkeypatch.setattr(launch, "LAST_LOG_SECONDS", 0.2)
    monkeypatch.setattr(launch, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(launch, "environment", lambda home: dict(os.environ))
    holder = python(HOLDER, tmp_path, halves.SERVER, cwd=tmp_path)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.communicate()
    launch._show([sys.executable, "-c", "import time; time.sleep(300)"], tmp_path, tmp_path)


def test_a_log_that_breaks_off_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "END_SECONDS", 0.1)
    assert not launch.goes_on(tmp_path)  # it has not begun
    (tmp_path / "begun").touch()
    with halves.here(tmp_path, halves.SERVER):
        assert launch.goes_on(tmp_path)
    assert not launch.goes_on(tmp_path)
    with halves.here(tmp_path, halves.SERVER):
        (tmp_path / "outcome.json").touch()
        assert not launch.goes_on(tmp_path)


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_run_to_itself(number, code, tmp_path):
    """A second one, while it ends, changes nothing."""
    words = command_line("fedavg", tmp_path, *ALL[:5]).typed
    process = python(COMMAND, "deploy", *words, cwd=tmp_path)
    try:
        wait_until((tmp_path / "folder").exists)
        folder = Path((tmp_path / "folder").read_text())
        assert not halves.is_gone(folder, halves.COMMAND)
        process.send_signal(number)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert (
        "the run goes on at 127.0.0.1:8000 if it was taken already; flwr list names it, flwr stop ends it"
        in said
    )
    assert "Traceback" not in said
    assert json.loads((folder / "job.json").read_text())
    assert halves.is_gone(folder, halves.COMMAND)
