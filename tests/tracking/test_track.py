"""``track`` brings any run into any store: once, wholly, and with the times that it had."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from test_tracking import Ending

from fl_lightning.__main__ import main
from fl_lightning.conformance.toy import Points, on_points, run
from fl_lightning.methods import FedAvg
from fl_lightning.run import track as track_module
from fl_lightning.run.directory import RunDirectory
from fl_lightning.run.metadata import milliseconds, round_times
from fl_lightning.tracking import loggers as tracking
from fl_lightning.tracking import mlflow_store
from fl_lightning.tracking.mlflow_store import Round, with_ordered_times

pytestmark = [pytest.mark.slow, pytest.mark.essential]

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", *mlflow_store.ENVIRONMENT):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    shutil.copy(database, tmp_path / "mlflow.db")
    yield
    mlflow.set_tracking_uri(None)


def fit(folder: Path, **settings: Any) -> Path:
    trainer = run(
        on_points(FedAvg()),
        Points(),
        folder,
        **{"max_rounds": 5, "logger": False, "tags": {"team": "red"}, **settings},
    )
    (trainer.run_dir / "config.yaml").write_text("model: {alpha: 0.5}\nseed_everything: 0\n")
    (trainer.run_dir / "figures" / "one.png").write_bytes(b"a figure")
    return trainer.run_dir


def stored(folder: Path, run_id: str, database: str = "mlflow.db") -> dict[str, Any]:
    """All that a store says of a run."""
    client = mlflow.MlflowClient(f"sqlite:///{folder}/{database}")
    found = client.get_run(run_id)
    files = [
        item.path
        for place in (None, "figures")
        for item in client.list_artifacts(run_id, place)
        if not item.is_dir
    ]
    return {
        "params": found.data.params,
        "tags": found.data.tags,
        "metrics": {
            name: sorted((m.step, m.value) for m in client.get_metric_history(run_id, name))
            for name in found.data.metrics
        },
        "times": sorted(
            (m.step, m.timestamp) for m in client.get_metric_history(run_id, "comm/total_bytes")
        ),
        "files": {
            name: Path(client.download_artifacts(run_id, name)).read_bytes() for name in files
        },
        "status": found.info.status,
        "start": found.info.start_time,
        "end": found.info.end_time,
    }


def everything(folder: Path) -> tuple[list[str], dict[Path, tuple[int, bytes]]]:
    """The whole store and all files: what was written once more would show."""
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        rows = list(database.iterdump())
    files = {
        p: (p.stat().st_mtime_ns, p.read_bytes())
        for part in ("mlartifacts", "e")
        for p in folder.glob(f"{part}/**/*")
        if p.is_file()
    }
    return rows, files


def metadata_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "metadata.json").read_text())


def rows_of(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def check_metrics(found: dict[str, Any], run_dir: Path) -> None:
    rows = rows_of(run_dir)
    for name in rows[0].keys() - {"round"}:
        assert found["metrics"][name] == [
            (int(row["round"]), float(row[name])) for row in rows if row[name]
        ], name


def test_a_run_that_was_never_tracked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are written as MLflow takes them."""
    run_dir = fit(tmp_path, experiment="e", tags={"team": "red", "lr(max)//": "0.1"})
    tested = {"probe/clean": 0.5, "kind/copy (bank)/accuracy": 0.25, "kind/(?)/accuracy": 0.75}
    (run_dir / "test.json").write_text(
        json.dumps({"round": 5, "metrics": tested, "timings": {"probe/ms": 2.0}})
    )
    assert main(["track", str(run_dir.relative_to(tmp_path))]) == 0
    assert "5 of 5 rounds were missing" in capsys.readouterr().out
    metadata = metadata_of(run_dir)
    found = stored(tmp_path, metadata["tracking_run_id"])
    check_metrics(found, run_dir)
    assert {
        name: steps for name, steps in found["metrics"].items() if name.startswith("final/")
    } == {name: [(5, value)] for name, value in metadata.items() if name.startswith("final/")}
    assert found["metrics"]["probe/clean"] == [(5, 0.5)]
    assert found["metrics"]["kind/copy bank/accuracy"] == [(5, 0.25)]
    assert found["metrics"]["kind/accuracy"] == [(5, 0.75)]
    assert found["params"] == {"model.alpha": "0.5", "seed_everything": "0"}
    assert (
        found["tags"].items()
        >= {"team": "red", "lrmax": "0.1", "method": "FedAvg", "run_dir": str(run_dir)}.items()
    )
    assert {*found["files"]} == {
        *(
            "config.yaml",
            "metadata.json",
            "metrics.csv",
            "ledger.csv",
            "partition.json",
            "test.json",
            "figures/one.png",
        )
    }
    assert found["files"]["metadata.json"] == (run_dir / "metadata.json").read_bytes()
    assert (found["status"], found["start"], found["end"]) == (
        "FINISHED", milliseconds(metadata["started"]), milliseconds(metadata["finished"]),
    )  # fmt: skip
    times = [time for _, time in found["times"]]
    assert times == sorted(times)
    assert found["start"] <= times[0]
    assert times[-1] <= found["end"] + 1

    before = everything(tmp_path)
    assert main(["track", str(run_dir)]) == 0
    assert "0 of 5 rounds were missing" in capsys.readouterr().out
    assert everything(tmp_path) == before


def test_a_run_that_was_tracked_gets_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = tracking.log_rounds

    def until_two(logger: Any, rounds: Any, known: Any) -> None:
        if any(round.step > 2 for round in rounds):
            raise OSError("the disk is gone")
        original(logger, rounds, known)

    with monkeypatch.context() as patch:
        patch.setattr(tracking, "log_rounds", until_two)
        patch.setattr(tracking, "MAX_ROUNDS_PER_WRITE", 1)
        run_dir = fit(tmp_path, experiment="e", logger=True)
    metadata = metadata_of(run_dir)
    assert [*metadata["untracked_rounds"].values()] == [3]
    before = stored(tmp_path, metadata["tracking_run_id"])
    assert len(before["times"]) == 2
    assert before["status"] == "RUNNING"
    written = (run_dir / "metadata.json").stat().st_mtime_ns
    assert main(["track", str(run_dir)]) == 0
    assert "3 of 5 rounds were missing" in capsys.readouterr().out
    found = stored(tmp_path, metadata["tracking_run_id"])
    check_metrics(found, run_dir)
    assert found["times"][:2] == before["times"]
    assert [time for _, time in found["times"]] == sorted(time for _, time in found["times"])
    assert found["status"] == "FINISHED"
    assert found["end"] == milliseconds(metadata["finished"])
    assert "untracked_rounds" not in metadata_of(run_dir)
    assert (run_dir / "metadata.json").stat().st_mtime_ns == written, "--ckpt_path last goes by it"
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert len(client.search_runs([client.get_experiment_by_name("e").experiment_id])) == 1
    before = everything(tmp_path)
    assert main(["track", str(run_dir)]) == 0
    assert everything(tmp_path) == before


@pytest.mark.quick("error1-failed-FAILED")
@pytest.mark.parametrize(("error", "noted", "status"), [
    (KeyboardInterrupt(), "interrupted", "KILLED"), (RuntimeError("bug"), "failed", "FAILED"), (None, "running", "KILLED"),
])  # fmt: skip
def test_runs_that_did_not_finish(
    error: BaseException | None, noted: str, status: str, tmp_path: Path
) -> None:
    """Two at once, one of them under a name with an apostrophe; a killed one says that it is
    running still."""
    with suppress(KeyboardInterrupt, RuntimeError):
        fit(
            tmp_path,
            experiment="e",
            run_name="it's",
            callbacks=[Ending(error or KeyboardInterrupt())],
            max_rounds=30,
        )
    run_dir = tmp_path / "e" / "it's"
    if error is None:
        killed = {key: value for key, value in metadata_of(run_dir).items() if key != "stopped"} | {
            "status": "running"
        }
        (run_dir / "metadata.json").write_text(json.dumps(killed))
    assert metadata_of(run_dir)["status"] == noted
    other = fit(tmp_path, experiment="e")
    (tmp_path / "second").mkdir()
    shutil.copy(tmp_path / "mlflow.db", tmp_path / "second" / "store.db")
    for uri in ([], ["--uri", "sqlite:///second/store.db"], ["--uri", "sqlite:///second/store.db"]):
        assert main(["track", str(run_dir), str(other), *uri]) == 0
    found = stored(tmp_path, metadata_of(run_dir)["tracking_run_id"])
    check_metrics(found, run_dir)
    assert len(found["times"]) == 6
    assert found["status"] == status
    metrics = run_dir / "metrics.csv"
    ended = (
        milliseconds(metadata_of(run_dir)["stopped"])
        if error
        else round(1000 * metrics.stat().st_mtime)
    )
    assert found["end"] == ended
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/second/store.db")
    runs = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert {each.info.run_name for each in runs} == {"it's", other.name}
    assert len(runs) == 2, "the store's own id is not noted, and it is found nevertheless"


def test_rounds_have_the_times_of_their_session() -> None:
    start = milliseconds("2026-01-01T00:00:00+00:00")
    metadata = {
        "started": "2026-01-01T00:00:00+00:00",
        "resumed": [
            {"after_round": 3, "at": "2026-01-01T01:00:00+00:00"},  # what it did was given up
            {"after_round": 2, "at": "2026-01-01T02:00:00+00:00"},
        ],
    }
    history = [{"round": r, "time/round": 10.0} for r in (1, 2, 3, 4)]
    assert [time - start for time in round_times(metadata, history)] == [
        10_000,
        20_000,
        7_210_000,
        7_220_000,
    ]
    known = {"a": {1: 500, 3: 700}, "final/a": {9: 0}}
    rounds = [Round(s, {}, 600) for s in (0, 2, 4)] + [Round(2, {}, 0)]
    assert [r.time for r in with_ordered_times(rounds, known)] == [500, 600, 700, 500]


def test_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow.db").unlink()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (run_dir := tmp_path / "e" / "r").mkdir(parents=True)
    (run_dir / "config.yaml").write_text("a: 1")
    (tmp_path / "file").write_text("")
    whole = fit(tmp_path / "w")
    for arguments, says in (
        ([], "write python -m fl_lightning track runs"),
        (["nowhere"], "not a run directory"),
        ([str(whole), "nowhere"], "not a run directory"),
        ([str(run_dir)], "metadata.json"),
        ([str(whole), "--uri", "http://u:hush@127.0.0.1:9"], "--uri http://***@127.0.0.1:9"),
        ([str(whole), "--uri", "sqlite:///file/x.db"], "make it reachable"),
        ([str(whole), "--uri", "nonsense://x"], "make it reachable"),
    ):
        assert main(["track", *arguments]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1, line
        assert says in line
        assert "hush" not in line
    held = RunDirectory(whole)
    held.lock()
    assert main(["track", str(whole)]) == 2
    assert "another process is writing" in capsys.readouterr().err
    held.unlock()
    (whole / "config.yaml").write_text("trainer: {max_rounds: 5}\n")
    table = (whole / "metrics.csv").read_bytes()
    for damaged, said in (
        (table[:-9], "metrics.csv is cut"),
        (table[: table.rindex(b"\n", 0, -1) + 1], "rounds of"),
        (None, "no metrics.csv"),
    ):  # what is left would be recorded as all of it
        (whole / "metrics.csv").unlink()
        if damaged is not None:
            (whole / "metrics.csv").write_bytes(damaged)
        assert main(["track", str(whole)]) == 2
        line = capsys.readouterr().err
        assert "the run is finished, but " in line
        assert said in line
        assert "checkpoints/ has a copy" in line
        (whole / "metrics.csv").write_bytes(table)
    (whole / "metrics.csv").write_bytes(b"round,a\n1\0,x\n")
    assert main(["track", str(whole)]) == 2
    assert not os.path.lexists(tmp_path / "mlflow.db")


def test_a_copy_of_a_run_gets_a_record_of_its_own(tmp_path: Path) -> None:
    """Whether it is tracked or continued; a run that was moved, or is named by a link, keeps its
    record."""
    original = fit(tmp_path / "e", logger=True, experiment="one")
    copy = original.with_name("copy")
    shutil.copytree(original, copy)
    assert main(["track", str(copy)]) == 0
    ids = [
        json.loads((path / "metadata.json").read_text())["tracking_run_id"]
        for path in (original, copy)
    ]
    assert ids[0] != ids[1]
    settings = {"logger": True, "experiment": "one", "max_rounds": 9, "checkpoint_every": 1}
    settings["allow_changed"] = True  # what ends it is not recorded
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "f", callbacks=[Ending(KeyboardInterrupt())], **settings)
    (begun,) = (tmp_path / "f").rglob("metadata.json")
    half = begun.parent.with_name("half")
    shutil.copytree(begun.parent, half)
    fit(tmp_path / "f", callbacks=[Ending(None)], ckpt_path=str(half), **settings)
    first, second = (
        json.loads((path / "metadata.json").read_text())["tracking_run_id"]
        for path in (begun.parent, half)
    )
    assert [len(stored(tmp_path, id)["times"]) for id in (first, second)] == [6, 9]
    link = tmp_path / "link"
    link.symlink_to(original.parent)
    assert main(["track", str(link / original.name)]) == 0
    assert metadata_of(original)["tracking_run_id"] == ids[0], "the same run by another path"
    moved = original.with_name("moved")
    original.rename(moved)
    assert main(["track", str(moved)]) == 0
    assert json.loads((moved / "metadata.json").read_text())["tracking_run_id"] == ids[0]


def test_the_record_of_a_run_that_lay_in_the_same_folder_is_left_alone(tmp_path: Path) -> None:
    """It is of another seed: a run that was moved away is put back at its place."""
    one = fit(tmp_path / "e")
    aside = one.with_name("aside")
    one.rename(aside)
    metadata = metadata_of(aside)
    shutil.copytree(aside, one)
    (one / "metadata.json").write_text(json.dumps({**metadata, "seed": 1}))
    assert main(["track", str(one)]) == 0
    later = metadata_of(one)["tracking_run_id"]
    shutil.rmtree(one)
    aside.rename(one)
    assert main(["track", str(one)]) == 0
    assert metadata_of(one)["tracking_run_id"] != later
    assert stored(tmp_path, later)["tags"]["seed"] == "1"


def test_a_configuration_that_is_a_bomb_is_refused_by_track(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = fit(tmp_path / "e")
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 10)]
    (run_dir / "config.yaml").write_text("l0: &l0 [x]\n" + "\n".join(levels))
    assert main(["track", str(run_dir)]) == 2
    assert "values, its aliases written out" in capsys.readouterr().err
    (run_dir / "config.yaml").write_text("[1, 2]")
    assert main(["track", str(run_dir)]) == 2
    assert "config.yaml holds no mapping" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", '{"round": null, "metrics": {}}'])
def test_a_damaged_test_leaves_the_run_to_be_tracked(content, tmp_path, caplog) -> None:
    run_dir = fit(tmp_path, experiment="e")
    (run_dir / "test.json").write_text(content)
    assert main(["track", str(run_dir)]) == 0
    assert "test.json cannot be read and is left out" in caplog.text


def test_a_test_of_weights_that_are_no_more_is_left_out(tmp_path, caplog) -> None:
    """By the hash of the last weights; of an earlier round by what training had measured there."""
    run_dir = fit(tmp_path, experiment="e")
    known, row = metadata_of(run_dir)["weights_sha256"], rows_of(run_dir)[2]
    measured = float(row["train/loss"])
    tests = {
        "test": (5, {"weights_sha256": known}),
        "test_round_000005": (5, {"weights_sha256": "0" * 64}),
        "test_round_000003": (
            3,
            {"weights_sha256": "0" * 64, "recorded": {"train/loss": measured, "none": math.nan}},
        ),
        "test_round_000002": (2, {"recorded": {"train/loss": -1.0}}),
    }
    for name, (round, about) in tests.items():
        test = {"round": round, "metrics": {f"{name}/accuracy": 0.5}, **about}
        (run_dir / f"{name}.json").write_text(json.dumps(test))
    rounds = track_module.StoredRun.read(str(run_dir)).rounds
    found = {name.partition("/")[0] for round in rounds for name in round.metrics}
    assert found & tests.keys() == {"test", "test_round_000003"}
    said = [text.split("/")[-1] for text in caplog.messages]
    rest = "is of other weights and is left out; test the run again"
    assert said == [f"test_round_00000{round}.json {rest}" for round in (2, 5)]


def test_what_another_process_wrote_in_the_meantime_stays(tmp_path, monkeypatch, capsys) -> None:
    """Between the first look at the run and the lock, and while the store is written to."""
    run_dir, lock = fit(tmp_path, experiment="e"), RunDirectory.lock
    whole = (run_dir / "metadata.json").read_bytes()
    (run_dir / "metadata.json").write_text(
        json.dumps({**json.loads(whole), "status": "interrupted", "finished": None})
    )

    def late(self: RunDirectory) -> None:
        (run_dir / "metadata.json").write_bytes(whole)
        lock(self)

    def noting(*given: Any) -> None:
        (run_dir / "metadata.json").write_text(json.dumps({**metadata_of(run_dir), "more": 1}))
        log_rounds(*given)

    log_rounds = track_module.log_rounds
    monkeypatch.setattr(RunDirectory, "lock", late)
    monkeypatch.setattr(track_module, "log_rounds", noting)
    assert main(["track", str(run_dir)]) == 0
    found = metadata_of(run_dir)
    run_id, _ = found.pop("tracking_run_id"), found.pop("tracking_run_dir")
    before = {**json.loads(whole), "more": 1}
    assert found == {name: one for name, one in before.items() if "tracking_run" not in name}
    assert stored(tmp_path, run_id)["status"] == "FINISHED"


def test_metrics_that_mlflow_shows_as_one_are_named_once(tmp_path, caplog, capsys) -> None:
    run_dir = fit(tmp_path, experiment="e")
    tested = {"kind/copy (bank)/accuracy": 0.25, "kind/copy bank/accuracy": 0.5, "kind/add": 1.0}
    (run_dir / "test.json").write_text(json.dumps({"round": 5, "metrics": tested}))
    for name in ("one", "two"):
        assert main(["track", str(run_dir), "--uri", f"sqlite:///{tmp_path}/{name}.db"]) == 0
    warned = [one.getMessage() for one in caplog.records if "as one" in one.getMessage()]
    assert warned == [
        "MLflow shows the metrics 'kind/copy (bank)/accuracy' and 'kind/copy bank/accuracy' "
        "as one, 'kind/copy bank/accuracy'; rename one"
    ]


def test_a_run_of_an_older_release_can_be_tracked(tmp_path: Path) -> None:
    run_dir = fit(tmp_path / "e")
    metadata = json.loads((run_dir / "metadata.json").read_text())
    del metadata["started"]
    (run_dir / "metadata.json").write_text(json.dumps(metadata))
    assert main(["track", str(run_dir)]) == 0
