"""Every round reaches the store once, with the time, the status and the files of its run."""

import json
import logging
import math
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.loggers import CSVLogger
from lightning.pytorch.loggers import MLFlowLogger
from outcomes import rows_of

from fl_lightning.conformance.toy import Points, on_points, run
from fl_lightning.hooks import Meter
from fl_lightning.methods import FedAvg
from fl_lightning.run.metadata import milliseconds
from fl_lightning.tracking import loggers as tracking
from fl_lightning.tracking import mlflow_store
from fl_lightning.tracking.loggers import Tracking, as_params
from fl_lightning.tracking.runs import _read_run, read_runs

mlflow = pytest.importorskip("mlflow")
# MLflow's mappers, SQLAlchemy 2.1
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


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
    return Tracking(
        **(
            {"logger": True, "experiment": "exp", "run_name": "run 1", "run_dir": Path("runs")}
            | changes
        )
    )


def steps(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(run_id, name)]


def test_commands_that_are_proposed_can_be_pasted(caplog: pytest.LogCaptureFixture) -> None:
    uri = "sqlite:///a b/mlflow.db"
    tracked = track(logger=MLFlowLogger(tracking_uri=uri))
    assert shlex.split(tracked.hint or "") == ["mlflow", "ui", "--backend-store-uri", uri]
    tracked._tell_missing(tracked._channels[0])
    command = caplog.messages[-1].partition("bring it in: ")[2]
    assert shlex.split(command)[3:] == ["track", "runs", "--uri", uri]


def test_a_run_and_its_continuation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    first = track()
    long = "x" * 7000
    first.start(
        {
            "model": {"alpha": 0.5, "levels": [2, 4]},
            "long": long,
            **{f"p{i}": i for i in range(120)},
        },
        {"method": "FedAvg"},
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
    second.flush()
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
    assert capfd.readouterr() == ("", ""), (
        "MLflow's announcements of migrations and new experiments"
    )


@pytest.mark.slow
@pytest.mark.essential
def test_a_run_that_is_taken_back_has_a_new_record(tmp_path: Path) -> None:
    first = track()
    first.start({"lr": 0.1}, {"partition_sha256": "p"})
    for r in (1, 2, 3):
        first.log_metrics({"test/accuracy": r / 10}, step=r)
    first.finish("FINISHED", {"final/accuracy": 0.3})
    second = track(former=[first.run_id, "an id that the store does not have"], resumes=True)
    second.start({"lr": 0.2}, {"partition_sha256": "p"})
    second.catch_up([{"round": 1, "test/accuracy": 0.1}], [0])
    second.log_metrics({"test/accuracy": 0.05}, step=2)
    second.finish("FINISHED", {"final/accuracy": 0.05})
    (run,) = read_runs(f"sqlite:///{tmp_path}/mlflow.db", "exp")
    assert run["id"] == second.run_id != first.run_id
    assert [row["test/accuracy"] for row in run["history"]] == [0.1, 0.05]
    assert run["metadata"]["final/accuracy"] == 0.05
    assert run["settings"] == {"lr": "0.2"}
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert "taken back" in client.get_run(first.run_id).info.run_name
    assert not [
        tag for tag in client.get_run(second.run_id).data.tags if tag.startswith("changed.")
    ]


@pytest.mark.slow
@pytest.mark.essential
def test_a_setting_that_is_as_it_was_has_no_tag_of_a_change(tmp_path: Path) -> None:
    first = track()
    first.start({"kept": 2}, {})
    first.finish("FINISHED", {})
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    for kept, tags in ((5, ["changed.kept"]), (2, [])):
        again = track(run_id=first.run_id)
        again.start({"kept": kept}, {})
        again.finish("FINISHED", {})
        assert [
            tag for tag in client.get_run(first.run_id).data.tags if tag.startswith("changed.")
        ] == tags


def test_a_round_is_one_transaction(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    tracked = track()
    tracked.start({}, {})
    tracked.flush()
    calls: list[int] = []
    client = tracked.loggers[0].experiment  # type: ignore[attr-defined]
    original = client.log_batch
    monkeypatch.setattr(
        client, "log_batch", lambda *a, **k: (calls.append(len(k["metrics"])), original(*a, **k))
    )
    tracked.log_metrics({f"m{i}": float(i) for i in range(25)}, step=1)
    tracked.flush()
    assert calls == [25]


def test_a_run_that_the_store_forgot_starts_anew(
    tmp_path: Path, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    tracked = track(run_id="0" * 32)
    tracked.start({"a": 1}, {})
    tracked.log_metrics({"test/accuracy": 0.5}, step=7)
    tracked.flush()
    assert "has no run 000" in caplog.text
    assert tracked.run_id not in (None, "0" * 32)
    assert steps(tracked.loggers[0].experiment, tracked.run_id or "", "test/accuracy") == [(7, 0.5)]  # type: ignore[attr-defined]


def test_a_store_is_where_the_run_is_whatever_the_folder_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Path
) -> None:
    """Also where its name has what is a sign of its own in an address; MLflow makes an empty folder
    of the address then."""
    assert mlflow_store.default_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    place = tmp_path / "ä b:c%2Fd?e"
    place.mkdir()
    monkeypatch.chdir(place)
    shutil.copy(database, place)
    made = run(on_points(FedAvg()), Points(), place, experiment="exp", max_rounds=2, logger=True)
    (record,) = read_runs("sqlite:///mlflow.db", "exp")
    metadata = json.loads((made.run_dir / "metadata.json").read_text())
    assert record["id"] == metadata["tracking_run_id"]
    assert [row["round"] for row in record["history"]] == [1, 2]
    assert [*tmp_path.rglob("*.db"), *tmp_path.rglob("mlartifacts")] == [
        place / "mlflow.db",
        place / "mlartifacts",
    ]
    assert mlflow_store.absolute_uri(mlflow_store.default_uri()) == mlflow_store.default_uri()


@pytest.mark.parametrize("change", ["deleted", "another store"])
def test_a_run_that_is_deleted_or_elsewhere_is_not_waited_for(
    change: str, tmp_path: Path, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The store then has a run of all rounds, which the next start finds and does not make again."""
    uris = [f"sqlite:///{tmp_path}/{name}.db" for name in ("mlflow", "other")]
    for uri in uris:
        shutil.copy(database, uri.removeprefix("sqlite:///"))
    first = track()
    first.start({}, {})
    first.finish("KILLED", {})
    if change == "deleted":
        mlflow.MlflowClient(uris[0]).delete_run(first.run_id)
    ids, uri = [], uris[change != "deleted"]
    for _ in range(2):
        logger = True if change == "deleted" else MLFlowLogger("exp", tracking_uri=uri)
        again = track(run_id=first.run_id, resumes=True, logger=logger)
        again.start({"a": 1}, {})
        again.catch_up([{"round": 1, "test/accuracy": 0.5}], [0])
        assert again.finish("FINISHED", {}) == {}
        ids.append(again.run_id)
    assert ids[0] == ids[1] != first.run_id
    assert steps(mlflow.MlflowClient(uri), ids[0], "test/accuracy") == [(1, 0.5)]
    assert [text.partition(" has no run")[2] for text in caplog.messages] == [
        f" {first.run_id} to continue; the run gets a new record there"
    ]


def test_no_logger_and_other_ranks_track_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking.rank_zero_only, "rank", 1, raising=False)
    for tracked in (track(), track(logger=False), track(logger=CSVLogger(tmp_path))):
        tracked.start({"a": 1}, {})
        tracked.log_metrics({"test/accuracy": 0.5}, step=1)
        tracked.finish("FINISHED", {})
        assert tracked.loggers == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.essential
def test_several_first_writers(tmp_path: Path) -> None:
    """The schema migration of a fresh database does not survive company; the lock keeps it
    alone."""
    script = (
        "from pathlib import Path; from fl_lightning.tracking.loggers import Tracking\n"
        "t = Tracking(True, experiment='e', run_name='r', run_dir=Path('runs'))\n"
        "t.start({}, {}); t.log_metrics({'a': 1.0}, 1); t.finish('FINISHED', {}); print(t.run_id)"
    )
    root = str(Path(tracking.__file__).parents[1])
    command = [sys.executable, "-c", script]
    writers = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={"PYTHONPATH": root, "PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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
    track_.flush()
    assert not logging.getLogger("mlflow.store.db.utils").isEnabledFor(logging.INFO)
    assert not logging.getLogger("alembic.runtime.migration").isEnabledFor(logging.INFO)


class Ending(Meter):
    """Ends the run when round 7 begins."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def on_round_start(self, round: int, context: Any) -> None:
        if round == 7 and self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "rounds", "status"),
    [
        (None, 30, "FINISHED"),
        (KeyboardInterrupt(), 6, "KILLED"),
        (SystemExit(143), 6, "KILLED"),
        (RuntimeError("bug"), 6, "FAILED"),
    ],
)
def test_however_a_run_ends_the_store_has_all_its_rounds(
    error: BaseException | None, rounds: int, status: str, tmp_path: Path, database: Path
) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    with pytest.raises(type(error)) if error else nullcontext():
        run(
            on_points(FedAvg()),
            Points(),
            tmp_path,
            callbacks=[Ending(error)],
            max_rounds=30,
            logger=True,
        )
    (folder,) = (tmp_path / "fl_lightning").glob("[!.]*")
    rows = rows_of(folder / "metrics.csv")
    assert len(rows) == rounds
    metadata = json.loads((folder / "metadata.json").read_text())
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    found = client.get_run(metadata["tracking_run_id"])
    assert found.info.status == status
    assert (
        metadata["status"]
        == {"FINISHED": "finished", "KILLED": "interrupted", "FAILED": "failed"}[status]
    )
    assert found.info.start_time == milliseconds(metadata["started"])
    assert found.info.end_time == milliseconds(metadata["finished" if error is None else "stopped"])
    for name in rows[0].keys() - {"round"}:
        assert steps(client, found.info.run_id, name) == [
            (int(row["round"]), float(row[name])) for row in rows if row[name]
        ], name
    times = [m.timestamp for m in client.get_metric_history(found.info.run_id, "time/round")]
    assert times == sorted(times)
    if error is None:
        kept = json.loads(
            Path(client.download_artifacts(found.info.run_id, "metadata.json")).read_text()
        )
        assert kept == metadata


def test_rounds_gather_in_few_transactions_as_lightning_would_log_them(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    rounds = [
        {f"a/m{i}": float(i * r) for i in range(50)} | {"odd (name)": 1.0, "inf": float("inf")}
        for r in range(1, 101)
    ]
    tracked = track(
        logger=MLFlowLogger("exp", "batched", f"sqlite:///{tmp_path}/mlflow.db", prefix="p")
    )
    tracked.start({}, {})
    tracked.flush()
    client, calls = tracked.loggers[0].experiment, []  # type: ignore[attr-defined]
    original = client.log_batch
    monkeypatch.setattr(
        client, "log_batch", lambda *a, **k: (calls.append(len(k["metrics"])), original(*a, **k))
    )
    for step, metrics in enumerate(rounds, 1):
        tracked.log_metrics(metrics, step)
    tracked.finish("FINISHED", {})
    assert sum(calls) == 100 * 52
    assert len(calls) <= 20
    assert all(count % 52 == 0 for count in calls), "a round is whole, or not there"
    reference = MLFlowLogger("exp", "one by one", f"sqlite:///{tmp_path}/mlflow.db", prefix="p")
    for step in (1, 100):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # odd names are mended, it says
            reference.log_metrics(rounds[step - 1], step)
    names = client.get_run(reference.run_id).data.metrics
    assert client.get_run(tracked.run_id).data.metrics == names
    for name in names:
        assert set(steps(client, reference.run_id, name)) <= set(
            steps(client, tracked.run_id or "", name)
        )  # type: ignore[arg-type]


class Prefixed(MLFlowLogger):
    """Somebody's own way to log a round is used, round by round."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics({f"mine/{key}": value for key, value in metrics.items()}, step)


def test_a_logger_with_a_mind_of_its_own(tmp_path: Path, database: Path) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    tracked = track(logger=Prefixed("exp", "run", f"sqlite:///{tmp_path}/mlflow.db"))
    tracked.start({}, {})
    for r in (1, 2, 3):
        tracked.log_metrics({"a": r}, r)
    tracked.finish("FINISHED", {})
    assert steps(tracked.loggers[0].experiment, tracked.run_id or "", "mine/a") == [
        (1, 1),
        (2, 2),
        (3, 3),
    ]  # type: ignore[attr-defined]


def test_an_infinite_metric_comes_back_as_one(tmp_path):
    """The epsilon of a run without noise; the store has the largest float in its place."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    id = client.create_run(client.create_experiment("study", str(tmp_path))).info.run_id
    client.log_metric(id, "privacy/epsilon", math.inf, step=1)
    (row,) = _read_run(client, client.get_run(id))["history"]
    assert row["privacy/epsilon"] == math.inf
