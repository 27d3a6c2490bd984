"""What a user types, and what a run leaves behind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cifar_files import write_cifar
from fashion_files import needs_package
from outcomes import rows_of
from places import ROOT

from fl_lightning.__main__ import main
from fl_lightning.run import metadata

KD = str(ROOT / "configs" / "kd_default.yaml")
STUDIES = [
    path
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if re.search("^(study|tune):", path.read_text(), re.M)
]
CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if path not in STUDIES]
RUN_FILES = {
    "config.yaml",
    "metadata.json",
    "metrics.csv",
    "ledger.csv",
    "clients.csv",
    "partition.json",
    "run.log",
    "checkpoints",
    "figures",
}
METRICS = {
    *(
        "test/accuracy",
        "test/loss",
        "test/ece",
        "test/brier",
        "val/accuracy",
        "val/accuracy_std",
        "val/accuracy_worst_decile",
        "val/clients_min5",
    ),
    *(
        "train/loss",
        "train/loss_task",
        "train/loss_bit",
        "train/loss_kd",
        "bits/average",
        "time/round",
        "time/train",
        "time/evaluate",
    ),
    *("comm/upload_bytes", "comm/download_bytes", "comm/wasted_bytes", "comm/total_bytes"),
    *("clients/sampled", "clients/dropped", "clients/trained"),
}


@pytest.fixture
def cifar100(tmp_path) -> Path:
    write_cifar(tmp_path, "cifar100", rows=200)
    return tmp_path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fit(*arguments: str, config: str | Path = KD, rounds: int = 2) -> Path:
    """Run the program; the run directory."""
    before = set(Path("runs").glob("*/*"))
    limits = ["--trainer.max_rounds", str(rounds), "--trainer.logger", "false"]
    assert main(["fit", "--config", str(config), *limits, *arguments]) == 0
    (made,) = set(Path("runs").glob("*/*")) - before
    return made


def rows(run: Path, name: str) -> list[dict[str, str]]:
    return rows_of(run / name)


LONG = [pytest.mark.slow, pytest.mark.essential]


OF_TEXTS = {"diloco", "kd_language", "lora_default", "adalora", "vemoe_default", "vemoe_private"}
OF_TEXTS |= {"hest_default", "hest_devices", "hest_tokens"}
IN_EVERY_RUN = {"kd_default", "fedavg", "private", "secure"}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=([] if path.stem in IN_EVERY_RUN else LONG)
            + [needs_package] * (path.stem == "fashion"),
        )
        for path in CONFIGS
    ],
)
def test_every_config_runs_two_rounds(config):
    if config.name == "private.yaml":
        pytest.importorskip("dp_accounting")
    short = ["--trainer.eval_every", "2", "--trainer.max_local_steps", "2"]
    if config.stem in OF_TEXTS:
        short += ["--data.tests_per_task", "4", "--data.examples_per_client", "100"]
        short += ["--trainer.participation", "0.25"]
    run = fit(*short, config=config)
    validates = config.name != "private.yaml"  # its clients have one or two examples each
    assert {path.name for path in run.iterdir()} == RUN_FILES - (
        set() if validates else {"clients.csv"}
    )
    assert [row["round"] for row in rows(run, "metrics.csv")] == ["1", "2"]
    metadata = json.loads((run / "metadata.json").read_text())
    assert metadata["status"] == "finished"
    assert re.fullmatch("[0-9a-f]{64}", metadata["weights_sha256"])


@pytest.mark.slow
@pytest.mark.essential
def test_the_overlay_is_the_real_experiment_2(cifar100):
    """On files in CIFAR-100's true format: MobileNet-V2, 28x28 crops, AdamW."""
    overlay = str(ROOT / "configs" / "overlays" / "cifar100_mobilenetv2.yaml")
    small = [
        "--data.num_clients",
        "4",
        "--data.root",
        str(cifar100),
        "--trainer.participation",
        "0.5",
        "--data.partition.beta",
        "5",
    ]
    run = fit("--config", overlay, *small, rounds=1)
    assert json.loads((run / "metadata.json").read_text())["dataset"] == "cifar100"
    assert int(rows(run, "metrics.csv")[0]["comm/download_bytes"]) > 2 * 9_400_000 * 0.5


def test_a_run_has_every_metric_and_ends_where_its_summary_says():
    run = fit()
    table = rows(run, "metrics.csv")
    assert set(table[0]) >= METRICS
    metadata = json.loads((run / "metadata.json").read_text())
    assert metadata["final/accuracy"] == float(table[-1]["test/accuracy"])
    ledger = rows(run, "ledger.csv")
    for row in table:
        entries = [entry for entry in ledger if entry["round"] == row["round"]]
        for metric, column in (
            ("upload", "upload"),
            ("download", "download"),
            ("wasted", "wasted"),
        ):
            assert sum(int(entry[column]) for entry in entries) == int(row[f"comm/{metric}_bytes"])
        assert (
            len(entries)
            == int(row["clients/sampled"])
            == int(row["clients/trained"]) + int(row["clients/dropped"])
        )


def fingerprint(run: Path) -> str:
    return json.loads((run / "metadata.json").read_text())["weights_sha256"]


@pytest.mark.slow
@pytest.mark.essential
def test_one_seed_one_result_two_seeds_two():
    first, second, other = fit(), fit(), fit("--seed_everything", "1")
    assert first.name != second.name  # nothing is overwritten
    assert fingerprint(first) == fingerprint(second) != fingerprint(other)
    assert (first / "ledger.csv").read_text() == (second / "ledger.csv").read_text()


@pytest.mark.slow
@pytest.mark.essential
def test_methods_share_partition_cohorts_and_drop_outs():
    def fate(run: Path) -> list[tuple[str, str, bool]]:
        return [
            (entry["round"], entry["client"], entry["status"] == "dropped")
            for entry in rows(run, "ledger.csv")
        ]

    kd, avg = fit(rounds=4), fit("--model", "FedAvg", rounds=4)
    assert (kd / "partition.json").read_text() == (avg / "partition.json").read_text()
    assert fate(kd) == fate(avg)
    assert fingerprint(kd) != fingerprint(avg)


def test_overrides_and_precision():
    run = fit(
        "--model.alpha", "1.0", "--data.num_clients", "10", "--trainer.precision", "bf16-mixed"
    )
    assert len(json.loads((run / "partition.json").read_text())["sizes"]) == 10
    assert "alpha: 1.0" in (run / "config.yaml").read_text()
    assert json.loads((run / "metadata.json").read_text())["precision"] == "bf16-mixed"


@pytest.mark.slow
@pytest.mark.essential
def test_the_saved_config_is_the_run():
    run = fit("--model.temperature", "3")
    again = fit(config=run / "config.yaml")
    assert fingerprint(run) == fingerprint(again)


def test_the_commit_is_of_a_checkout_that_holds_the_package(tmp_path, monkeypatch, request):
    """The repository of a user who has installed the package inside it is another project's."""
    installed = tmp_path / ".venv" / "metadata.py"
    installed.parent.mkdir()
    shutil.copy(metadata.__file__, installed)
    Path(".gitignore").write_text(".venv\n")

    def git(*words: str) -> str:
        person = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.run(
            ["git", *person, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    def state() -> dict[str, object]:
        metadata._git_state.cache_clear()
        return metadata.git_state()

    request.addfinalizer(metadata._git_state.cache_clear)
    monkeypatch.setattr(metadata, "__file__", str(installed))
    git("init", "-q")
    git("add", ".gitignore")
    git("commit", "-qm", "theirs")
    assert state() == {"commit": None, "dirty": None}
    git("add", "-f", ".venv")
    git("commit", "-qm", "its own")
    assert state() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
