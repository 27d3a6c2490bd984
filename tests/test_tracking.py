"""Every round reaches the store once; a store that fails is named once, and training goes on."""

import logging
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.loggers import CSVLogger, Logger

from fl_lightning import mlflow_store, tracking
from fl_lightning.tracking import Tracking, as_params

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy:DeprecationWarning"
)  # MLflow's mappers, SQLAlchemy 2.1


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder without a configured store; settings made on the way are taken back."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", *mlflow_store.ENVIRONMENT):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    yield
    mlflow.set_tracking_uri(None)


def track(**changes: Any) -> Tracking:
    return Tracking(**({"logger": True, "experiment": "exp", "run_name": "run 1", "run_dir": Path("runs")} | changes))


def steps(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(run_id, name)]


def test_a_run_and_its_continuation(tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    first = track()
    long = "x" * 7000
    first.start(
        {"model": {"alpha": 0.5, "levels": [2, 4]}, "long": long, **{f"p{i}": i for i in range(120)}}, {"method": "FedAvg"}
    )
    for r in (1, 2, 3):
        first.log_metrics({"test/accuracy": r / 10, "comm/total_bytes": 10**10}, step=r)
    (tmp_path / "config.yaml").write_text("seed: 1")
    first.log_artifact(tmp_path / "config.yaml", "run")
    first.finish("KILLED", {"final/accuracy": 0.3})
    assert first.run_id
    assert first.hint == "mlflow ui --backend-store-uri sqlite:///mlflow.db"

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run(first.run_id)
    assert (run.info.status, run.info.run_name) == ("KILLED", "run 1")
    assert run.data.params["model.alpha"] == "0.5"
    assert run.data.params["model.levels"] == "[2, 4]"
    assert run.data.params["p119"] == "119"
    assert run.data.params["long"].endswith("(7000 characters)")
    assert len(run.data.params["long"]) == 6000
    assert run.data.tags["method"] == "FedAvg"
    assert steps(client, first.run_id, "test/accuracy") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert steps(client, first.run_id, "final/accuracy") == [(3, 0.3)]
    assert [item.path for item in client.list_artifacts(first.run_id, "run")] == ["run/config.yaml"]
    assert (tmp_path / "mlartifacts").is_dir()

    # Killed after round 3 was logged and before its checkpoint: round 3 comes again.
    second = track(run_id=first.run_id)
    second.start({"model": {"alpha": 0.7}, "max_rounds": 5}, {"resumed": True})
    assert client.get_run(first.run_id).info.status == "RUNNING"
    for r in (3, 4, 5):
        second.log_metrics({"test/accuracy": r / 10}, step=r)
    second.finish("FINISHED", {"final/accuracy": 0.5})
    run = client.get_run(first.run_id)
    assert second.run_id == first.run_id
    assert run.info.status == "FINISHED"
    assert steps(client, first.run_id, "test/accuracy") == [(r, r / 10) for r in (1, 2, 3, 4, 5)]
    assert run.data.params["model.alpha"] == "0.5"
    assert run.data.params["max_rounds"] == "5"
    assert run.data.tags["changed.model.alpha"] == "0.7"
    assert len(client.search_runs([run.info.experiment_id])) == 1
    assert caplog.messages == []
    assert capfd.readouterr() == ("", ""), "MLflow's announcements of migrations and new experiments"


def test_a_round_is_one_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = track()
    tracked.start({}, {})
    calls: list[int] = []
    client = tracked.loggers[0].experiment  # type: ignore[attr-defined]
    original = client.log_batch
    monkeypatch.setattr(client, "log_batch", lambda *a, **k: (calls.append(len(k["metrics"])), original(*a, **k)))
    tracked.log_metrics({f"m{i}": float(i) for i in range(25)}, step=1)
    assert calls == [25]


def test_a_run_that_the_store_forgot_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    tracked = track(run_id="0" * 32)
    tracked.start({"a": 1}, {})
    tracked.log_metrics({"test/accuracy": 0.5}, step=7)
    assert "has no run 000" in caplog.text
    assert tracked.run_id not in (None, "0" * 32)
    assert steps(tracked.loggers[0].experiment, tracked.run_id or "", "test/accuracy") == [(7, 0.5)]  # type: ignore[attr-defined]


def unused_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.mark.parametrize("store", ["closed port", "parent is a file", "damaged"])
def test_a_dead_store_warns_once_and_costs_seconds(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "damaged.db").write_bytes(b"not a database" * 100)
    uri = {
        "closed port": f"http://127.0.0.1:{unused_port()}",
        "parent is a file": f"sqlite:///{tmp_path}/file/mlflow.db",
        "damaged": f"sqlite:///{tmp_path}/damaged.db",
    }[store]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    started = time.monotonic()
    tracked = track()
    tracked.start({"a": 1}, {"b": 2})
    for r in (1, 2):
        tracked.log_metrics({"test/accuracy": 0.5}, step=r)
    tracked.log_artifact(tmp_path / "file")
    tracked.finish("FINISHED", {"final/accuracy": 0.5})
    assert time.monotonic() - started < 15
    (message,) = [record.getMessage() for record in caplog.records if record.name == "fl_lightning"]
    assert uri in message
    assert "runs/metrics.csv" in message
    assert tracked.run_id is None


def test_a_store_that_dies_in_mid_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracked = track()
    tracked.start({}, {})
    tracked.log_metrics({"test/accuracy": 0.5}, step=1)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("DROP TABLE metrics")
    for r in (2, 3):
        tracked.log_metrics({"test/accuracy": 0.5}, step=r)
    tracked.finish("FINISHED", {})
    assert len([record for record in caplog.records if record.name == "fl_lightning"]) == 1


class Unwilling(Logger):
    """Fails, or hangs, from round 2 on."""

    def __init__(self, hangs: bool = False) -> None:
        self.hangs, self.seen = hangs, []  # type: ignore[var-annotated]

    name = version = "unwilling"  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append(step)
        if step == 2 and self.hangs:
            threading.Event().wait(60)
        if step == 2:
            raise OSError("disk quota exceeded\nand a long story")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.params = params


@pytest.mark.parametrize("hangs", [False, True])
def test_one_failing_logger_leaves_the_others(
    hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "CALL_LIMIT", 0.3)
    unwilling, good = Unwilling(hangs), CSVLogger(tmp_path, name="csv", version=0)
    tracked = track(logger=[unwilling, good])
    tracked.start({"a": {"b": 1}}, {})
    for r in (1, 2, 3):
        tracked.log_metrics({"test/accuracy": r / 10}, step=r)
    tracked.log_artifact(tmp_path / "absent")  # nobody takes files here
    tracked.finish("FINISHED", {"final/accuracy": 0.3})
    assert unwilling.seen == [1, 2]
    assert unwilling.params == {"a.b": "1"}
    (message,) = [record.getMessage() for record in caplog.records if record.name == "fl_lightning"]
    assert ("no answer" if hangs else "Unwilling failed (OSError: disk quota exceeded)") in message
    rows = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 4
    assert tracked.run_id is None


def test_no_logger_and_other_ranks_track_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.rank_zero_only, "rank", 1, raising=False)
    for tracked in (track(), track(logger=False), track(logger=CSVLogger(tmp_path))):
        tracked.start({"a": 1}, {})
        tracked.log_metrics({"test/accuracy": 0.5}, step=1)
        tracked.finish("FINISHED", {})
        assert tracked.loggers == []
    assert list(tmp_path.iterdir()) == []


def test_several_first_writers(tmp_path: Path) -> None:
    """The schema migration of a fresh database does not survive company; the lock keeps it alone."""
    script = (
        "from pathlib import Path; from fl_lightning.tracking import Tracking\n"
        "t = Tracking(True, experiment='e', run_name='r', run_dir=Path('runs'))\n"
        "t.start({}, {}); t.log_metrics({'a': 1.0}, 1); t.finish('FINISHED', {}); print(t.run_id)"
    )
    root = str(Path(tracking.__file__).parents[1])
    command = [sys.executable, "-c", script]
    writers = [
        subprocess.Popen(
            command, cwd=tmp_path, env={"PYTHONPATH": root, "PATH": ""}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [writer.communicate(timeout=200) for writer in writers]
    assert len({out.strip() for out, _ in outputs} - {"None", ""}) == 2, outputs


def test_params_keep_what_it_cannot_nest() -> None:
    assert as_params({"a": {}, "b": [], "c": [{"d": 1}, 2], "e": ({"f": None},)}) == {
        "a": "{}", "b": "[]", "c.0.d": "1", "c.1": "2", "e.0.f": "null",
    }  # fmt: skip


def test_noise_is_turned_down() -> None:
    track_ = track()
    track_.start({}, {})
    assert not logging.getLogger("mlflow.store.db.utils").isEnabledFor(logging.INFO)
    assert not logging.getLogger("alembic.runtime.migration").isEnabledFor(logging.INFO)
