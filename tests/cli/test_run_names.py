"""The default name of a run says what its flags change in the configuration files, and finds older
runs."""

from __future__ import annotations

import json
import shlex
import shutil
import sqlite3
from pathlib import Path

import pytest

from fl_lightning.__main__ import main
from fl_lightning.cli.run_names import overrides

NAMES = {
    "--config kd_default": "",
    "--config kd_default --model.alpha 1.0": "alpha1",
    "--config kd_default --model.alpha 1.0 --model.alpha 0.5": "",  # the file's value
    # in the name anyway
    "--config kd_default --model FedAvg --data.dataset synthetic --seed_everything 3": "",
    # they change no result
    "--config kd_default --trainer.workers 3 --trainer.logger false --data.root x": "",
    "--config=kd_default --model.optimizer=AdamW --model.optimizer.init_args.lr=1e-3": "optimizer_AdamW lr0.001",
    "--config kd_default --model.optimizer torch.optim.SGD": "",
    "--trainer.precision bf16-mixed --data.partition IID": "partition_IID precision_bf16-mixed",
    "--trainer.callbacks+=callbacks.ByzantineClients --trainer.callbacks.clients 0.1": "ByzantineClients clients0.1",
    "--trainer.callbacks []": "callbacks_none",
    "--config plain --data TableData --data.train a/b.csv --data.target kind --data.partition Natural --data.num_clients 0":
        "num_clients0 partition_Natural target_kind",
    "--model.a 1 --model.b 2 --model.c 3 --model.d 4 --model.e 5 --model.f 6": "a1 b2 c3 d4 and2more",
    f"--model.a {'x' * 50} --model.b {'y' * 50} --model.c {'z' * 50}": f"a_{'x' * 20} b_{'y' * 20} and1more",
    "--model.api_key hunter2hunter2 --model.path ../../etc": "api_key_none path_etc",
}  # fmt: skip


@pytest.mark.parametrize("line", NAMES)
def test_what_flags_change_is_shortened(line):
    assert overrides(shlex.split(line)) == NAMES[line].split()
    assert len("-".join(overrides(shlex.split(line)))) <= 70


def fit(*flags: str) -> list[str]:
    """Run one round of eight clients; the names of all runs that there are."""
    Path("small.yaml").write_text(
        "base: plain\ntrainer: {max_rounds: 2, local_epochs: 1, logger: false, callbacks: []}\ndata: {init_args: {num_clients: 8}}\n"
    )
    assert main(["fit", "--config", "small.yaml", *flags]) == 0
    return sorted(path.name for path in Path("runs/plain").iterdir())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.essential
def test_folders_and_mlflow_have_the_name(tmp_path, monkeypatch):
    """And MLflow's page shows method and seed in a column that it shows unasked, and first the
    primary metric and the loss; also of a run that ``track`` brings in."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert fit() == ["FedAvg-digits-seed0"]
    names = fit("--model.optimizer.lr", "0.1", "--trainer.logger", "true")
    assert names == ["FedAvg-digits-lr0.1-seed0", "FedAvg-digits-seed0"]
    assert "mine" in fit("--model.optimizer.lr", "0.1", "--trainer.run_name", "mine")
    with sqlite3.connect("mlflow.db") as store:
        assert store.execute("select name from runs").fetchall() == [("FedAvg-digits-lr0.1-seed0",)]
        source = "select value from tags where key = 'mlflow.source.name'"
        assert store.execute(source).fetchall() == [("FedAvg, seed 0",)]
        metrics = store.execute("select key, step, value from metrics").fetchall()
    sections = sorted({name.partition("/")[0] for name, _, _ in metrics if "/" in name})
    assert sections[0] == "Main"
    found = {(name, step): value for name, step, value in metrics}
    main_charts = {name: value for name, value in found.items() if name[0].startswith("Main/")}
    assert main_charts == {
        (f"Main/{name}", step): found[f"test/{name}", step]
        for name in ("accuracy", "loss")
        for step in (1, 2)
    }
    assert (
        main(["track", "runs/plain/FedAvg-digits-lr0.1-seed0", "--uri", "sqlite:///other.db"]) == 0
    )
    with sqlite3.connect("other.db") as store:
        assert sorted(store.execute("select key, step, value from metrics")) == sorted(metrics)


@pytest.mark.quick("FedAvg-digits-lr0.1-seed0")
@pytest.mark.parametrize("before", ["FedAvg-digits-seed0", "FedAvg-digits-lr0.1-seed0"])
def test_a_run_that_was_begun_under_another_name_is_continued(before):
    """With the flags of a run that the version before named, and of one whose settings stood in a
    file."""
    flags = ["--model.optimizer.lr", "0.1", "--data.batch_size", "16"]
    (name,) = fit(*flags)
    assert name == "FedAvg-digits-batch_size16-lr0.1-seed0"
    run = Path("runs/plain", name)
    whole = json.loads((run / "metadata.json").read_text())
    (run / "metadata.json").write_text(
        json.dumps(whole | {"status": "interrupted", "weights_sha256": None})
    )
    shutil.rmtree(run / "checkpoints" / "round_000002")
    run = run.rename(run.with_name(before))
    assert fit(*flags, "--trainer.auto_resume", "true") == [before]
    ended = json.loads((run / "metadata.json").read_text())
    assert ended["resumed"]
    assert (ended["status"], ended["weights_sha256"]) == ("finished", whole["weights_sha256"])
    other = [*flags, "--model.optimizer.momentum", "0.0", "--trainer.auto_resume", "true"]
    assert fit(*other) == sorted([before, "FedAvg-digits-batch_size16-lr0.1-momentum0-seed0"])
