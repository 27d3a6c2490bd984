"""Killed at any instant and continued, a run ends as if nothing had happened."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from outcomes import differences, outcome
from places import ROOT, SUPPORT


class Server:
    """See ``kill_server.py``."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", (
                f"import sys; sys.path[:0] = [{str(SUPPORT)!r}, {str(ROOT)!r}]; import kill_server "
                "as k; k.serve()"
            )],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline() == "ready\n"

    def run(self, folder: Path, **request) -> tuple[int, float]:
        folder.mkdir(exist_ok=True)
        self.process.stdin.write(json.dumps({"folder": str(folder), **request}) + "\n")
        self.process.stdin.flush()
        code, seconds = json.loads(self.process.stdout.readline())
        return code, seconds

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def reference(server, tmp_path_factory) -> tuple[dict, float]:
    """The run that was never killed, and its seconds."""
    folder = tmp_path_factory.mktemp("reference") / "a"
    code, seconds = server.run(folder)
    assert code == 0, (folder / "log.txt").read_text()
    return outcome(folder), seconds


@pytest.fixture(scope="module")
def store(server, tmp_path_factory) -> tuple[Path, dict, float]:
    """A folder with an MLflow database, made once since that takes seconds; the outcome of a run
    that was never killed."""
    folder = tmp_path_factory.mktemp("mlflow") / "a"
    assert (
        server.run(folder, mlflow=True, settings={"max_rounds": 1, "experiment": "other"})[0] == 0
    )
    assert (folder / "mlflow.db").exists(), (folder / "log.txt").read_text()
    template = folder.with_name("template")
    template.mkdir()
    shutil.copy(folder / "mlflow.db", template)
    whole = folder.with_name("whole")
    shutil.copytree(template, whole)
    code, seconds = server.run(whole, mlflow=True)
    assert code == 0
    return template, outcome(whole), seconds


def kill_and_continue(
    server, folder: Path, wanted: dict, seconds: float, random: random.Random, *, mlflow: bool
) -> list[str]:
    """Up to three kills at random instants, then to the end."""
    for _ in range(random.choice((1, 1, 2, 3))):
        server.run(folder, after=random.uniform(0, seconds), mlflow=mlflow)
    code, _ = server.run(folder, mlflow=mlflow)
    return (
        differences(outcome(folder), wanted)
        if code == 0
        else [f"exit {code}: {(folder / 'log.txt').read_text()}"]
    )


@pytest.mark.slow
@pytest.mark.essential
def test_killed_at_random_instants(server, reference, tmp_path):
    wanted, seconds = reference
    random_ = random.Random(1)
    # about 20 kills, with 10 before a touch of the file system and those with a store 30
    for trial in range(12):
        assert (
            kill_and_continue(server, tmp_path / str(trial), wanted, seconds, random_, mlflow=False)
            == []
        )


@pytest.mark.slow
@pytest.mark.essential
def test_peers_killed_at_random_instants(server, tmp_path):
    """The models of all peers, and the weights that they push, are in the checkpoint."""
    code, seconds = server.run(tmp_path / "whole", peers=True)
    assert code == 0, (tmp_path / "whole" / "log.txt").read_text()
    wanted = outcome(tmp_path / "whole")
    assert {row["consensus/least_mass"] for row in wanted["metrics"]} != {"1.0"}
    for trial, share in enumerate((0.5, 0.75)):
        folder = tmp_path / str(trial)
        server.run(folder, after=share * seconds, peers=True)
        code, _ = server.run(folder, peers=True)
        assert code == 0, (folder / "log.txt").read_text()
        assert differences(outcome(folder), wanted) == []


@pytest.mark.slow
@pytest.mark.essential
def test_killed_at_a_random_instant_the_store_has_every_step_once(server, store, tmp_path):
    template, wanted, seconds = store
    shutil.copytree(template, tmp_path / "a")
    assert (
        kill_and_continue(server, tmp_path / "a", wanted, seconds, random.Random(2), mlflow=True)
        == []
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_a_hundred_times(server, reference, store, tmp_path):
    random_, bad = random.Random(3), []
    for trial in range(100):
        mlflow = trial % 2 == 1
        if mlflow:
            shutil.copytree(store[0], tmp_path / str(trial))
        wanted, seconds = store[1:] if mlflow else reference
        bad += kill_and_continue(
            server, tmp_path / str(trial), wanted, seconds, random_, mlflow=mlflow
        )
        shutil.rmtree(tmp_path / str(trial))
    assert bad == []


def touches(server, folder: Path) -> int:
    """How often a run touches the file system."""
    assert server.run(folder, event=-1)[0] == 0
    return int((folder / "touches.txt").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "stride",
    [
        pytest.param(29, marks=pytest.mark.essential),
        pytest.param(1, marks=pytest.mark.timeout(3600)),
    ],
)
def test_killed_before_any_touch_of_the_file_system(stride, server, reference, tmp_path):
    bad = {}
    for event in range(1, touches(server, tmp_path / "count") + 1, stride):
        folder = tmp_path / str(event)
        assert server.run(folder, event=event)[0] == -signal.SIGKILL
        code, _ = server.run(folder)
        found = (
            differences(outcome(folder), reference[0])
            if code == 0
            else [(folder / "log.txt").read_text()]
        )
        bad |= {event: found} if found else {}
    assert bad == {}


@pytest.mark.slow
@pytest.mark.essential
def test_killed_with_uploads_on_their_way(server, tmp_path):
    """Versions that clients who come and go make: before every 31st touch of the file system."""
    settings = {"flights": True}
    assert server.run(tmp_path / "whole", event=-1, settings=settings)[0] == 0
    wanted, bad = outcome(tmp_path / "whole"), {}
    for event in range(1, int((tmp_path / "whole" / "touches.txt").read_text()) + 1, 31):
        folder = tmp_path / str(event)
        assert server.run(folder, event=event, settings=settings)[0] == -signal.SIGKILL
        code, _ = server.run(folder, settings=settings)
        found = (
            differences(outcome(folder), wanted)
            if code == 0
            else [(folder / "log.txt").read_text()]
        )
        bad |= {event: found} if found else {}
    assert bad == {}


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_keeps_the_last_round_and_says_how_to_continue(
    number, code, server, reference, tmp_path
):
    """Without a checkpoint on the way, and with more signals while the last one is written."""
    folder = tmp_path / "a"
    assert server.run(folder, interrupt=number, settings={"checkpoint_every": 0})[0] == code
    (run,) = (folder / "runs" / "fl_lightning").iterdir()
    assert json.loads((run / "metadata.json").read_text())["status"] == "interrupted"
    assert f"seed=3, ckpt_path='runs/fl_lightning/{run.name}')" in (folder / "log.txt").read_text()
    assert server.run(folder)[0] == 0
    assert differences(outcome(folder), reference[0]) == []
