"""Lightning's CSVLogger and TensorBoardLogger in MLflow's place, from the command line, and when a
run is continued."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from refusals import refused
from test_redaction import TINY
from toy import Points, on_points, trainer_in

from fl_lightning.__main__ import main
from fl_lightning.methods import FedAvg

FIT = [
    "fit",
    "--config",
    "tiny.yaml",
    "--trainer.run_name",
    "r",
    "--trainer.experiment",
    "e",
    "--trainer.allow_changed",
    "true",
]
# it is written anew, wholly
pytestmark = pytest.mark.filterwarnings(
    "ignore:Experiment logs directory .* exists and is not empty"
)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)


def own_rounds() -> list[dict[str, str]]:
    with open("runs/e/r/metrics.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("version", ["0", "null"], ids=["the same folder", "a new folder"])
@pytest.mark.parametrize("kind", ["CSVLogger", "lightning.fabric.loggers.CSVLogger"])
def test_csv_has_every_round_once(kind: str, version: str) -> None:
    root = "root_dir" if "fabric" in kind else "save_dir"
    logger = [
        f"--trainer.logger={kind}",
        f"--trainer.logger.{root}=logs",
        f"--trainer.logger.version={version}",
    ]
    assert main([*FIT, *logger, "--trainer.max_rounds", "3"]) == 0
    assert main([*FIT, *logger, "--trainer.max_rounds", "5", "--ckpt_path", "last"]) == 0
    files = sorted(Path("logs").rglob("metrics.csv"))
    assert len(files) == (1 if version == "0" else 2)
    with files[-1].open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    own = own_rounds()
    assert (
        [row["step"] for row in rows] == [row["round"] for row in own] == ["1", "2", "3", "4", "5"]
    )
    for name in own[0].keys() - {"round"}:
        assert [row[name] for row in rows] == [row[name] for row in own], name


def test_tensorboard_shows_every_round_once() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = [
        "--trainer.logger=TensorBoardLogger",
        "--trainer.logger.save_dir=logs",
        "--trainer.logger.version=0",
    ]
    assert main([*FIT, *logger, "--trainer.max_rounds", "3"]) == 0
    assert main([*FIT, *logger, "--trainer.max_rounds", "5", "--ckpt_path", "last"]) == 0
    shown = EventAccumulator("logs/lightning_logs/version_0").Reload()
    for name in own_rounds()[0].keys() - {"round"}:
        expected = [
            (int(row["round"]), pytest.approx(float(row[name]), rel=1e-6))
            for row in own_rounds()
            if row[name]
        ]
        assert [(point.step, point.value) for point in shown.Scalars(name)] == expected, name
    assert [point.step for point in shown.Scalars("final/accuracy")] == [5]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is not None, reason="TensorBoard is there"
)
def test_without_tensorboard_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([*FIT, "--trainer.logger", "TensorBoardLogger", "--trainer.logger.save_dir", "logs"])
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert "tensorboard" in line
    assert sorted(path.name for path in Path().iterdir()) == ["tiny.yaml"]


def test_a_logger_has_one_run_in_a_record() -> None:
    """A second fit of MLflow's has a run of its own; that of a CSVLogger would be rows of the first
    run, and is refused before it has a directory. The run of before may go on."""
    logger = MLFlowLogger(tracking_uri="sqlite:///own.db")
    trainer = trainer_in("runs", max_rounds=1, logger=logger)
    for seed in (0, 1):
        trainer.fit(on_points(FedAvg()), Points(), seed=seed)
        (found,) = logger.experiment.search_runs([logger.experiment_id], "", max_results=1)
        assert found.data.tags["run_dir"] == str(trainer.run_dir)
        assert found.data.params["seed_everything"] == str(seed)
    assert len(logger.experiment.search_runs([logger.experiment_id])) == 2
    logger = CSVLogger("logs")
    trainer = trainer_in("csv", max_rounds=1, logger=logger)
    trainer.fit(on_points(FedAvg()), Points())
    with refused("logger=CSVLogger", "a logger and a trainer for each run"):
        trainer_in("csv", max_rounds=1, logger=[logger]).fit(on_points(FedAvg()), Points(), seed=1)
    assert len([*Path("csv/fl_lightning").iterdir()]) == 1
    longer = trainer_in("csv", max_rounds=2, logger=logger, allow_changed=True)
    longer.fit(on_points(FedAvg()), Points(), ckpt_path=str(trainer.run_dir))
    with open("logs/lightning_logs/version_0/metrics.csv") as file:
        assert [row["step"] for row in csv.DictReader(file) if row["train/loss"]] == ["1", "2"]
