"""A store that fails is named once and gets what it lacks as soon as it works; training goes on,
and no round is there twice."""

import csv
import json
import logging
import shutil
import socket
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.loggers import CSVLogger, Logger
from test_tracking import steps, track, workplace  # noqa: F401

from fl_lightning.conformance.toy import Points, on_points, run
from fl_lightning.methods import FedAvg
from fl_lightning.tracking import loggers as tracking
from fl_lightning.tracking import writer

pytestmark = [pytest.mark.slow, pytest.mark.essential]

mlflow = pytest.importorskip("mlflow")


def wait_until_written(tracked: Any) -> None:
    """Wait until each store has what it was given, however long this machine takes for it."""
    for channel in tracked._channels:
        ends = time.monotonic() + 120
        while channel.writer.waiting:
            assert time.monotonic() < ends, channel.writer.error
            time.sleep(0.01)


def unused_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.mark.timeout(120)  # mlflow by itself asks a closed port for several minutes
@pytest.mark.parametrize("store", ["closed port", "parent is a file", "damaged"])
def test_a_dead_store_warns_once_and_is_given_up(
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
    tracked = track()
    tracked.start({"a": 1}, {"b": 2})
    for r in (1, 2):
        tracked.log_metrics({"test/accuracy": 0.5}, step=r)
    tracked.log_artifact(tmp_path / "file")
    assert tracked.finish("FINISHED", {"final/accuracy": 0.5}) == {f"MLflow at {uri}": 2}
    failed, lacks = [
        record.getMessage() for record in caplog.records if record.name == "fl_lightning"
    ]
    assert uri in failed
    assert "runs/metrics.csv" in failed
    assert "lacks 2 rounds" in lacks
    assert "python -m fl_lightning track runs" in lacks
    assert tracked.run_id is None


def test_a_store_that_dies_in_mid_run(
    tmp_path: Path, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    tracked = track()
    tracked.start({}, {})
    tracked.log_metrics({"test/accuracy": 0.5}, step=1)
    tracked.flush()
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        store.execute("ALTER TABLE metrics RENAME TO elsewhere")
    for r in (2, 3):
        tracked.log_metrics({"test/accuracy": 0.5}, step=r)
    assert list(tracked.finish("FINISHED", {}).values()) == [2]
    assert len([record for record in caplog.records if record.name == "fl_lightning"]) == 2


def test_a_store_that_comes_back_gets_what_it_lacks(
    tmp_path: Path,
    database: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also when the call that failed had done its work, and its answer got lost on the way."""
    caplog.set_level(logging.INFO, "fl_lightning")
    shutil.copy(database, tmp_path / "mlflow.db")
    monkeypatch.setattr(tracking, "MIN_WRITE_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(writer, "FIRST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(writer, "MAX_RETRY_SECONDS", 0.05)
    tracked = track()
    tracked.start({}, {})
    # a double would have another time
    monkeypatch.setattr(tracking, "_now", iter(range(1, 1000)).__next__)
    tracked.log_metrics({"a": 1.0, "b": 1.0}, step=1)
    tracked.flush()
    client = tracked.loggers[0].experiment  # type: ignore[attr-defined]
    original, answers = client.log_batch, iter(["lost", "refused", "refused", "lost"])

    def log_batch(*args: Any, **kwargs: Any) -> None:
        answer = next(answers, None)
        if answer != "refused":
            original(*args, **kwargs)
        if answer:
            raise ConnectionError(answer)

    monkeypatch.setattr(client, "log_batch", log_batch)
    for r in range(2, 9):
        tracked.log_metrics({"a": float(r), "b": 1.0}, step=r)
        if r % 2:  # two rounds at a time wait for a store that fails
            wait_until_written(tracked)
    assert tracked.finish("FINISHED", {"final/a": 8.0}, 10**12) == {}
    run_id = tracked.run_id or ""
    assert steps(client, run_id, "a") == [(r, float(r)) for r in range(1, 9)]
    assert steps(client, run_id, "b") == [(r, 1.0) for r in range(1, 9)]
    assert steps(client, run_id, "final/a") == [(8, 8.0)]
    assert client.get_run(run_id).info.status == "FINISHED"
    messages = [record.getMessage() for record in caplog.records if record.name == "fl_lightning"]
    assert len(messages) % 2 == 0
    assert all("failed" in message for message in messages[::2])
    assert all("works again" in message for message in messages[1::2])


def test_a_run_whose_making_was_not_answered_is_made_once(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    monkeypatch.setattr(writer, "FIRST_RETRY_SECONDS", 0.05)
    original, answers = mlflow.MlflowClient.create_run, iter(["lost"])

    def create_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = original(self, *args, **kwargs)
        if next(answers, None):
            raise ConnectionError("lost")
        return run

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", create_run)
    tracked = track(since=time.time())
    tracked.start({"a": 1}, {})
    tracked.log_metrics({"a": 1.0}, 1)
    tracked.finish("FINISHED", {})
    client = tracked.loggers[0].experiment  # type: ignore[attr-defined]
    (run,) = client.search_runs([client.get_experiment_by_name("exp").experiment_id])
    assert run.data.params == {"a": "1"}
    assert run.data.metrics == {"a": 1.0}


class Unwilling(Logger):
    """Fails, or hangs, from round 2 on."""

    def __init__(self, hangs: bool = False) -> None:
        self.hangs, self.seen = hangs, []  # type: ignore[var-annotated]
        self.gate = threading.Event()

    name = version = "unwilling"  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append(step)
        if step == 2 and self.hangs:
            self.gate.wait(60)
        elif step == 2:
            raise OSError("disk quota exceeded\nand a long story")

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.params = params


@pytest.mark.parametrize("hangs", [False, True])
def test_one_failing_logger_leaves_the_others(
    hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if hangs:
        monkeypatch.setattr(tracking, "CALL_LIMIT", 2.0)
    unwilling, good = Unwilling(hangs), CSVLogger(tmp_path, name="csv", version=0)
    tracked = track(logger=[unwilling, good])
    tracked.start({"a": {"b": 1}}, {})
    for r in (1, 2, 3):
        tracked.log_metrics({"test/accuracy": r / 10}, step=r)
    tracked.log_artifact(tmp_path / "absent")  # nobody takes files here
    assert tracked.finish("FINISHED", {"final/accuracy": 0.3}) == {"Unwilling": 2}
    assert {*unwilling.seen} == {1, 2}
    assert unwilling.params == {"a.b": "1"}
    failed, lacks = [
        record.getMessage() for record in caplog.records if record.name == "fl_lightning"
    ]
    assert ("no answer" if hangs else "Unwilling failed (OSError: disk quota exceeded)") in failed
    assert "Unwilling lacks 2 rounds" in lacks
    rows = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 4
    assert tracked.run_id is None
    unwilling.gate.set()


def test_a_csv_file_whose_disk_was_full_has_every_round_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FIRST_RETRY_SECONDS", 0.05)
    logger = CSVLogger(tmp_path, name="csv", version=0, flush_logs_every_n_steps=1)
    original, answers = logger.experiment.save, iter(["", "full", "full"])

    def save() -> None:
        if next(answers, None):
            raise OSError("no space left on device")
        original()

    monkeypatch.setattr(logger.experiment, "save", save)
    tracked = track(logger=logger)
    tracked.start({}, {})
    for r in (1, 2, 3, 4):
        tracked.log_metrics({"a": r}, step=r)
        wait_until_written(tracked)
    assert tracked.finish("FINISHED", {}) == {}
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3", "4"]


def test_a_store_that_fails_later_keeps_what_it_has_and_the_training_goes_on(
    tmp_path: Path,
    database: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    monkeypatch.setattr(tracking, "MIN_WRITE_INTERVAL_SECONDS", 0.0)
    original = tracking.log_rounds

    def until_five(logger: Any, rounds: Any, known: Any) -> None:
        if any(round.step > 5 for round in rounds):
            raise OSError("the disk is gone")
        original(logger, rounds, known)

    monkeypatch.setattr(tracking, "log_rounds", until_five)
    monkeypatch.setattr(tracking, "MAX_ROUNDS_PER_WRITE", 1)
    trainer = run(on_points(FedAvg()), Points(), tmp_path, max_rounds=10, logger=True)
    assert len((trainer.run_dir / "metrics.csv").read_text().splitlines()) == 11
    failed, lacks = [
        r.getMessage()
        for r in caplog.records
        if r.levelname == "WARNING" and r.name == "fl_lightning"
    ]
    assert "the disk is gone" in failed
    assert f"fl_lightning track {trainer.run_dir}" in lacks
    (missing,) = json.loads((trainer.run_dir / "metadata.json").read_text())[
        "untracked_rounds"
    ].items()
    assert missing == (f"MLflow at sqlite:///{tmp_path}/mlflow.db", 5)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("fl_lightning").experiment_id])
    assert [step for step, _ in steps(client, found.info.run_id, "comm/total_bytes")] == [
        1,
        2,
        3,
        4,
        5,
    ]

    # continued when the store is well again, it is given what it lacks
    monkeypatch.setattr(tracking, "log_rounds", original)
    run(
        on_points(FedAvg()),
        Points(),
        tmp_path,
        max_rounds=12,
        logger=True,
        ckpt_path=str(trainer.run_dir),
        allow_changed=True,
    )
    assert [step for step, _ in steps(client, found.info.run_id, "comm/total_bytes")] == list(
        range(1, 13)
    )
    assert "untracked_rounds" not in json.loads((trainer.run_dir / "metadata.json").read_text())
