"""``python -m fl_lightning test``: runs that have ended are loaded exactly, probed, and left as
they were."""

from __future__ import annotations

import csv
import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from outcomes import rows_of

from fl_lightning.__main__ import main
from fl_lightning.export.card import record_of
from fl_lightning.probing import Finding, select_probes
from fl_lightning.probing import command as probing
from fl_lightning.run.paths import checkpoints_in
from fl_lightning.run.snapshot import Checkpoint
from fl_lightning.study.results.run_records import read_directory
from fl_lightning.tracking import mlflow_store
from fl_lightning.tracking.runs import add_to_run

SMALL = [
    *("--data.dataset", "synthetic", "--data.num_clients", "6", "--data.synthetic_examples", "120"),
    *(
        "--data.synthetic_test_examples",
        "30",
        "--data.synthetic_size",
        "16",
        "--data.synthetic_classes",
        "4",
    ),
    *("--data.partition", "IID", "--data.val_fraction", "0.2", "--data.public_examples", "16"),
    *(
        "--trainer.participation",
        "0.5",
        "--trainer.local_epochs",
        "1",
        "--trainer.max_rounds",
        "3",
        "--trainer.keep_checkpoints",
        "3",
        "--trainer.checkpoint_every",
        "1",
    ),
]
TUNED = [
    "--model.finetune_steps",
    "8",
    "--trainer.callbacks",
    '[{"class_path": "callbacks.LabelNoise", "init_args": {"round": 1, "clients": 0.5, '
    '"labels": 1.0, "among": "cohort"}}]',
]
CHEAP = "clean,clients,calibration"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fit(model: str = "FedMPQKD", *more: str, logger: str = "false") -> Path:
    assert main(["fit", "--model", model, *SMALL, "--trainer.logger", logger, *more]) == 0
    return max(Path("runs").glob("*/*"), key=lambda run: run.stat().st_ctime_ns)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of FedMPQKD, to be copied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        return fit().absolute()


@pytest.fixture
def run(trained) -> Path:
    """A copy of that run in the working directory."""
    shutil.copytree(trained.parents[1], "runs")
    return Path("runs", *trained.parts[-2:])


def run_test(run: Path, *more: str) -> dict:
    assert main(["test", "--ckpt_path", str(run), *more]) == 0
    return json.loads(
        (run if run.parent.name != "checkpoints" else run.parent.parent)
        .joinpath("test.json")
        .read_text()
    )


def last_row(run: Path) -> dict[str, float]:
    return {name: float(value) for name, value in rows_of(run / "metrics.csv")[-1].items() if value}


def files(run: Path) -> dict[str, str]:
    return {
        str(p.relative_to(run)): sha256(p.read_bytes()).hexdigest()
        for p in run.rglob("*")
        if p.is_file()
    }


def test_results_that_cannot_be_kept_are_printed_all_the_same(run, capsys, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(probing.RunDirectory, "write_json", refuse)
    before = files(run)
    assert main(["test", "--ckpt_path", str(run), "--probes", "clean"]) == 1
    said = capsys.readouterr()
    assert "test/accuracy" in said.out
    assert "written to" not in said.out
    (line,) = (one for one in said.err.splitlines() if "error" in one)
    assert f"could not be kept in {run.absolute()}/test.json (Permission denied)" in line
    assert files(run) == before


def test_everything_about_a_run(run, capsys):
    before = files(run)
    found = run_test(run)
    assert {name: digest for name, digest in files(run).items() if name != "test.json"} == before
    metadata, row = json.loads((run / "metadata.json").read_text()), last_row(run)
    assert found["weights_sha256"] == metadata["weights_sha256"]
    assert found["partition_sha256"] == metadata["partition_sha256"]
    assert (found["checkpoint"], found["round"], found["chosen"]) == ("round_000003", 3, "last")
    shared = (
        "test/accuracy",
        "test/loss",
        "val/accuracy",
        "val/accuracy_std",
        "val/accuracy_worst_decile",
    )
    # bit for bit
    assert {name: found["metrics"][name] for name in shared} == {name: row[name] for name in shared}
    metrics = found["metrics"]
    assert {
        "fgsm/full_gradient_accuracy",
        "pgd/full_gradient_accuracy",
        "calibration/ece_scaled",
        "cost/flops",
    } <= {*metrics}
    assert len([name for name in metrics if name.startswith("corrupted/")]) == 2 + 19
    assert metrics["pgd/loss"] >= metrics["fgsm/loss"] >= metrics["test/loss"]
    assert not [name for name in metrics if name.startswith(("latency/", "memory/", "time/"))]
    assert (
        0
        < found["timings"]["latency/student_batch1_median"]
        <= found["timings"]["latency/student_batch1_p99"]
    )
    # 4 bits and a sign
    assert metrics["cost/model_bytes_sent"] < metrics["cost/model_bytes_fp32"] / 4
    assert list(found["probes"]) == select_probes(None)
    assert "published corruptions not used" in found["skipped"]["corruptions"][0]
    shown, said = capsys.readouterr()
    for text in (
        "pgd/full_gradient_accuracy",
        "generated",
        "published corruptions not used",
        "of this machine",
    ):
        assert text in shown
    left_out = "corruptions: published corruptions not used"  # said once, below the table
    assert [text.count(left_out) for text in (shown, said)] == [1, 0]
    assert run_test(run)["metrics"] == metrics  # a function of checkpoint and seed


@pytest.mark.parametrize(
    "model",
    ["FedAvg", "AQFL"]
    + [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.essential])
        for name in ("FedKD", "FedMosaic")
    ],
)
def test_every_kind_of_method(model):
    run = fit(model)
    found = run_test(run, "--probes", f"{CHEAP},fgsm,pgd,cost")
    row = last_row(run)
    assert found["metrics"]["test/accuracy"] == row["test/accuracy"]
    assert found["metrics"]["val/accuracy_worst_decile"] == row["val/accuracy_worst_decile"]
    assert (
        found["metrics"]["pgd/loss"]
        >= found["metrics"]["fgsm/loss"]
        >= found["metrics"]["test/loss"] - 1e-9
    )
    assert ("fgsm/full_gradient_accuracy" in found["metrics"]) == (model == "AQFL")
    assert ("fgsm" in found["skipped"]) == (model != "AQFL")
    with (run / "ledger.csv").open() as file:
        sent = [
            int(r["upload"])
            for r in csv.DictReader(file)
            if r["round"] == "3" and r["status"] == "trained"
        ]
    assert found["metrics"]["cost/model_bytes_sent"] == sum(sent) / len(sent)


def test_bytes_of_peers_are_not_those_of_a_message():
    """Each peer of a ring sends its upload to two others, and the ledger has both messages."""
    ring = ("--trainer.topology", "Gossip", "--trainer.topology.graph", "ring")
    small = ("--model.weigh_by", "clients", "--trainer.max_rounds", "1")
    found = run_test(fit("FedAvg", *ring, *small), "--probes", "cost")
    assert "cost/model_bytes_fp32" in found["metrics"]
    assert "cost/model_bytes_sent" not in found["metrics"]
    assert "neighbours" in found["skipped"]["cost"][0]


@pytest.mark.slow
@pytest.mark.essential
def test_models_are_tuned_on_the_labels_of_the_run(caplog):
    """Those that a stressor has changed, whose state the checkpoint has."""
    tuned = fit("FineTune", *TUNED)
    found, row = run_test(tuned, "--probes", "clean"), last_row(tuned)
    assert "compare device" not in caplog.text
    assert found["metrics"]["test/accuracy"] == row["test/accuracy"]


@pytest.mark.slow
@pytest.mark.essential
def test_the_checkpoint_is_the_one_that_is_named(run, caplog, capsys):
    best = json.loads((run / "checkpoints" / "round_000003" / "progress.json").read_text())[
        "best_round"
    ]
    with (run / "metrics.csv").open() as file:
        accuracies = [float(row["test/accuracy"]) for row in csv.DictReader(file)]
    found = run_test(run, "--checkpoint", "best", "--probes", "clean")
    assert (found["round"], found["chosen"], found["metrics"]["test/accuracy"]) == (
        best,
        "best",
        accuracies[best - 1],
    )
    for number in (1, 2):
        named = run / "checkpoints" / f"round_{number:06d}"
        found = run_test(named, "--probes", "clean")
        assert (found["round"], found["chosen"], found["metrics"]["test/accuracy"]) == (
            number,
            named.name,
            accuracies[number - 1],
        )
    # kept beside the newer one
    assert json.loads((run / "test_round_000001.json").read_text())["round"] == 1
    found = run_test(run, "--checkpoint", "round_000002", "--probes", "cost")
    # what was found before of the same checkpoint stays
    assert {"test/accuracy", "cost/flops"} <= {*found["metrics"]}
    assert set(found["probes"]) == {"clean", "cost"}
    assert "in training" not in caplog.text
    other = run_test(
        run,
        "--checkpoint",
        "round_000002",
        "--probes",
        "cost",
        "--data.batch_size",
        "8",
        "--trainer.allow_changed",
        "true",
    )
    assert set(other["probes"]) == {"cost"}  # another configuration: nothing is mixed with it
    assert json.loads((run / "test_round_000002.json").read_text()) == found
    weights = run / "checkpoints" / "round_000002" / "server.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    before = files(run)
    for refused in (
        ["--checkpoint", "round_000002"],
        ["--checkpoint", "round_000009"],
        ["--checkpoint", "newest"],
    ):
        assert main(["test", "--ckpt_path", str(run), *refused]) == 2
    assert main(["test", "--ckpt_path", str(run / "checkpoints" / "round_000002")]) == 2
    assert files(run) == before
    newest = checkpoints_in(run / "checkpoints")[0]
    (newest / "server.safetensors").write_bytes(b"cut")
    before = files(run)
    for refused in ([], ["--checkpoint", "best"]):  # an older one would be another model
        capsys.readouterr()
        assert main(["test", "--ckpt_path", str(run), *refused]) == 2
        assert f"--checkpoint {newest.name}; it cannot be used" in capsys.readouterr().err
    assert files(run) == before
    shutil.rmtree(run / "checkpoints")
    assert main(["test", "--ckpt_path", str(run)]) == 2
    assert "its checkpoints are not here; copy its folder" in capsys.readouterr().err


def test_an_earlier_model_is_not_taken_for_the_one_of_a_finished_run(run, capsys):
    """The messages of ``test`` and of the records of a study say how to get it back."""
    ended = json.loads((run / "metadata.json").read_text())["weights_sha256"]
    shutil.rmtree(run / "checkpoints" / "round_000003")
    again = ["--config", str(run / "config.yaml"), "--ckpt_path", str(run)]
    for which in ("last", "best"):
        assert main(["test", "--ckpt_path", str(run), "--checkpoint", which]) == 2
        said = capsys.readouterr().err
        assert f"--checkpoint {which}; the run has finished with round 3, and its" in said
        assert f"fit {' '.join(again)}, or write --checkpoint round_000002" in said
    assert "fit with its config.yaml and --ckpt_path makes them" in read_directory(run).problem
    assert run_test(run, "--checkpoint", "round_000002", "--probes", "clean")["round"] == 2
    assert main(["fit", *again]) == 0
    assert read_directory(run).problem == ""
    found = run_test(run, "--probes", "clean")
    assert (found["round"], found["weights_sha256"]) == (3, ended)


@pytest.mark.slow
@pytest.mark.essential
def test_bad_input_is_one_line_and_costs_nothing(run, capsys, monkeypatch):
    before, before_metadata = files(run), (run / "metadata.json").read_bytes()
    config = str(run / "config.yaml")
    for arguments, said in (
        ([], "without --ckpt_path"),
        (["--ckpt_path", "last"], "needs to know the run"),
        (["--ckpt_path", "nowhere"], "neither a run directory nor a checkpoint"),
        (
            ["--config", config, "--ckpt_path", "nowhere"],
            "neither a run directory nor a checkpoint",
        ),
        (["--config", config], "without --ckpt_path"),
        (["--ckpt_path", str(run), "--probes", "clean,speed"], "comma-separated list"),
        (["--ckpt_path", str(run), "--seed_everything", "1"], "seed_everything: 0 -> 1"),
        (["--ckpt_path", str(run), "--model.bits", "2"], "model.init_args.bits: 4.0 -> 2.0"),
        (["--ckpt_path", str(run), "--data.num_clients", "5"], "num_clients: 6 -> 5"),
        (["--ckpt_path", str(run), "--model", "FedAvg"], "another configuration"),
        (
            ["--ckpt_path", str(run / "checkpoints" / "round_000002"), "--checkpoint", "best"],
            "leave one of them out",
        ),
    ):
        assert main(["test", *arguments]) == 2, arguments
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert said in error
        assert error.count(";") >= 2
    assert files(run) == before
    about = json.loads((run / "metadata.json").read_text())
    code = {**about.get("code", {}), "callbacks": "0" * 64}
    (run / "metadata.json").write_text(json.dumps({**about, "code": code}))
    with monkeypatch.context() as patch:  # else the file of a callback, which is left out here
        patch.setattr(probing, "code_of_model", lambda fed: {"callbacks": ""})
        assert main(["test", "--ckpt_path", str(run)]) == 2
    assert "(the code of callbacks); restore the files of then," in capsys.readouterr().err
    (run / "metadata.json").write_bytes(before_metadata)
    assert files(run) == before
    assert set(Path("runs").glob("*/*")) == {run}
    # training's alone
    assert (
        main(["test", "--ckpt_path", str(run), "--probes", "clean", "--trainer.max_rounds", "9"])
        == 0
    )


def test_a_best_checkpoint_that_is_gone_is_not_proposed_again(run, capsys, monkeypatch):
    monkeypatch.setattr(probing, "checkpoint_name", lambda round: "round_000009")
    assert main(["test", "--ckpt_path", str(run), "--checkpoint", "best"]) == 2
    error = capsys.readouterr().err.strip()
    assert "round_000009, which was best in validation, is not in" in error
    assert error.endswith("write --checkpoint last")


def test_a_run_without_validation_has_no_best_checkpoint(capsys):
    run = fit("FedAvg", "--data.val_fraction", "0")
    assert main(["test", "--ckpt_path", str(run), "--checkpoint", "best"]) == 2
    assert "write --checkpoint last" in capsys.readouterr().err
    assert (
        main(
            [
                "test",
                "--config",
                str(run / "config.yaml"),
                "--ckpt_path",
                "last",
                "--probes",
                "clients",
            ]
        )
        == 0
    )
    assert json.loads((run / "test.json").read_text())["metrics"] == {}


def test_a_test_that_disagrees_with_training_says_so(caplog, monkeypatch):
    run = fit("FedAvg")
    monkeypatch.setattr(
        probing, "_recorded", lambda checkpoint: {"test/accuracy": 0.123, "test/loss": float("nan")}
    )
    run_test(run, "--probes", "clean")
    assert "test/accuracy" in caplog.text
    assert "0.123 in training" in caplog.text
    nan = Finding({"test/accuracy": float("nan"), "test/loss": float("inf")})
    monkeypatch.setattr(probing, "_recorded", lambda checkpoint: nan.metrics)
    monkeypatch.setattr(probing, "probe", lambda subject, names: {"clean": nan})
    caplog.clear()
    run_test(run, "--probes", "clean")
    assert "in training" not in caplog.text, "it diverged there too"


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_tables_are_read_as_the_checkpoint_vouches_for_them(damage, run):
    """A kill leaves half a line, and there is a second copy of each."""
    saved = Checkpoint.read(run / "checkpoints" / "round_000002")
    probes = ("--checkpoint", "round_000002", "--probes", "cost,membership")
    before, card = run_test(run, *probes), record_of(saved, None)
    assert "cost/model_bytes_sent" in before["metrics"]
    assert card["evaluation"]["round"] == 2
    for name in ("ledger", "metrics"):
        file = run / f"{name}.csv"
        if damage == "cut":
            file.write_text(file.read_text() + "4,1")
        else:
            file.unlink()
    after = run_test(run, *probes)
    assert (after["metrics"], after["probes"]) == (before["metrics"], before["probes"])
    assert record_of(saved, None) == card


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_the_results_join_the_mlflow_record_of_the_run(monkeypatch, caplog, database):
    mlflow = pytest.importorskip("mlflow")
    shutil.copy(database, "mlflow.db")
    for name in ("MLFLOW_TRACKING_URI", *mlflow_store.ENVIRONMENT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    bins = '[{"class_path": "callbacks.Calibration", "init_args": {"bins": 10}}]'
    run = fit("FedAvg", "--trainer.callbacks", bins, logger="true")
    run_id = json.loads((run / "metadata.json").read_text())["tracking_run_id"]
    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")
    trained = client.get_metric_history(run_id, "test/ece")
    found = run_test(run, "--probes", "clean,fgsm,latency")
    record = client.get_run(run_id)
    assert record.info.status == "FINISHED"
    assert record.data.metrics["fgsm/accuracy"] == found["metrics"]["fgsm/accuracy"]
    assert (
        record.data.metrics["latency/student_batch1_p99"]
        == found["timings"]["latency/student_batch1_p99"]
    )
    assert "test.json" in {file.path for file in client.list_artifacts(run_id)}
    shutil.copytree(run, "copy")
    run_test(Path("copy"), "--probes", "cost")
    assert "cost/flops" not in client.get_run(run_id).data.metrics, "it is the original's record"
    Path("link").symlink_to("runs")
    run_test(Path("link", *run.parts[1:]), "--probes", "clean,fgsm,cost")
    assert [m.step for m in client.get_metric_history(run_id, "fgsm/accuracy")] == [3]
    assert found["metrics"]["test/ece"] != trained[-1].value, "that of 15 bins"
    assert client.get_metric_history(run_id, "test/ece") == trained
    assert "cost/flops" in client.get_run(run_id).data.metrics
    other = found["metrics"]["fgsm/accuracy"] + 0.25
    add_to_run(True, run_id, {"fgsm/accuracy": other}, 3, [run / "test.json"])
    assert client.get_run(run_id).data.metrics["fgsm/accuracy"] == other, "tested otherwise"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///elsewhere.db")
    run_test(run, "--probes", "clean")
    assert "there is no such database" in caplog.text
    assert "test.json" in caplog.text
    assert not Path("elsewhere.db").exists()
    mlflow.set_tracking_uri(None)
