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
from outcomes import differences, outcome, rows_of
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


def whole(server, folder: Path, **request) -> tuple[dict, float, int]:
    """The outcome of a run that is never killed, its seconds, and how often it touches the file
    system."""
    code, seconds = server.run(folder, event=-1, **request)
    assert code == 0, (folder / "log.txt").read_text()
    return outcome(folder), seconds, int((folder / "touches.txt").read_text())


@pytest.fixture(scope="module")
def reference(server, tmp_path_factory) -> tuple[dict, float, int]:
    return whole(server, tmp_path_factory.mktemp("reference") / "a")


@pytest.fixture(scope="module")
def store(server, tmp_path_factory) -> tuple[Path, tuple[dict, float, int]]:
    """A folder with an MLflow database, made once since that takes seconds, and the run of it that
    was never killed."""
    folder = tmp_path_factory.mktemp("mlflow") / "a"
    assert (
        server.run(folder, mlflow=True, settings={"max_rounds": 1, "experiment": "other"})[0] == 0
    )
    assert (folder / "mlflow.db").exists(), (folder / "log.txt").read_text()
    template, copy = folder.with_name("template"), folder.with_name("whole")
    template.mkdir()
    shutil.copy(folder / "mlflow.db", template)
    shutil.copytree(template, copy)
    return template, whole(server, copy, mlflow=True)


def kill_and_continue(
    server, folder: Path, known: tuple[dict, float, int], random: random.Random, *, mlflow: bool
) -> list[str]:
    """Kill it before a random touch of the file system, which is certain to hit, up to twice more
    at random instants, which may come after its end, and run it to the end."""
    wanted, seconds, touches = known
    killed, _ = server.run(folder, event=random.randint(1, touches), mlflow=mlflow)
    for _ in range(random.choice((0, 0, 1, 2))):
        server.run(folder, after=random.uniform(0, seconds), mlflow=mlflow)
    return [
        *([] if killed == -signal.SIGKILL else [f"exit {killed} before it was killed"]),
        *continued(server, folder, wanted, mlflow=mlflow),
    ]


def continued(server, folder: Path, wanted: dict, **request) -> list[str]:
    """Run it to the end; what is not as it was in the run that was never killed."""
    code, _ = server.run(folder, **request)
    if code:
        return [f"exit {code}: {(folder / 'log.txt').read_text()}"]
    return differences(outcome(folder), wanted)


@pytest.mark.slow
def test_killed_at_random_instants(server, reference, tmp_path):
    random_ = random.Random(1)
    for trial in range(12):
        folder = tmp_path / str(trial)
        assert kill_and_continue(server, folder, reference, random_, mlflow=False) == []


@pytest.mark.slow
@pytest.mark.essential
def test_killed_peers_go_on(server, tmp_path):
    """The models of all peers, and the weights that they push, are in the checkpoint."""
    wanted, _, touches = whole(server, tmp_path / "whole", peers=True)
    assert {row["consensus/least_mass"] for row in wanted["metrics"]} != {"1.0"}
    for trial, share in enumerate((0.5, 0.75)):
        folder = tmp_path / str(trial)
        code, _ = server.run(folder, event=int(share * touches), peers=True)
        assert code == -signal.SIGKILL
        (table,) = (folder / "runs").glob("*/*/metrics.csv")
        assert 1 <= len(rows_of(table)) < 6
        assert continued(server, folder, wanted, peers=True) == []


@pytest.mark.slow
@pytest.mark.essential
def test_killed_at_a_random_instant_the_store_has_every_step_once(server, store, tmp_path):
    template, known = store
    shutil.copytree(template, tmp_path / "a")
    assert kill_and_continue(server, tmp_path / "a", known, random.Random(2), mlflow=True) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_a_hundred_times(server, reference, store, tmp_path):
    random_, bad = random.Random(3), []
    template, with_store = store
    for trial in range(100):
        folder, mlflow = tmp_path / str(trial), trial % 2 == 1
        if mlflow:
            shutil.copytree(template, folder)
        known = with_store if mlflow else reference
        bad += kill_and_continue(server, folder, known, random_, mlflow=mlflow)
        shutil.rmtree(folder)
    assert bad == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "stride",
    [
        pytest.param(29, marks=pytest.mark.essential),
        pytest.param(1, marks=pytest.mark.timeout(3600)),
    ],
)
def test_killed_before_any_touch_of_the_file_system(stride, server, reference, tmp_path):
    (wanted, _, touches), bad = reference, {}
    for event in range(1, touches + 1, stride):
        folder = tmp_path / str(event)
        assert server.run(folder, event=event)[0] == -signal.SIGKILL
        found = continued(server, folder, wanted)
        bad |= {event: found} if found else {}
    assert bad == {}


@pytest.mark.slow
@pytest.mark.essential
def test_killed_with_uploads_on_their_way(server, tmp_path):
    """Versions that clients who come and go make: before every 31st touch of the file system."""
    settings = {"flights": True}
    (wanted, _, touches), bad = whole(server, tmp_path / "whole", settings=settings), {}
    for event in range(1, touches + 1, 31):
        folder = tmp_path / str(event)
        assert server.run(folder, event=event, settings=settings)[0] == -signal.SIGKILL
        found = continued(server, folder, wanted, settings=settings)
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
    assert continued(server, folder, reference[0]) == []
