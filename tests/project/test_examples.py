"""The examples run as a user would run them, and do what they say."""

from __future__ import annotations

import csv
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT

from fl_lightning.conformance import method_under_test
from fl_lightning.conformance.kit import run_checks
from fl_lightning.conformance.toy import images, on_images
from fl_lightning.errors import InputError
from fl_lightning.methods import Method
from fl_lightning.wire import Payload

EXAMPLES = ROOT / "examples"


def python(folder: Path, *arguments: str) -> str:
    """What a command prints, started in ``folder`` with one thread."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def recorded(folder: Path, run: str) -> float:
    return json.loads((folder / run / "metadata.json").read_text())["final/accuracy"]


@pytest.mark.slow
@pytest.mark.essential
def test_train_script(tmp_path):
    """Both methods learn, on the same clients and cohorts, and what is printed is what is
    recorded."""
    output = python(tmp_path, str(EXAMPLES / "train_script.py"))
    lines = re.findall(r"^(\w+): test accuracy ([\d.]+), files in (\S+)$", output, re.MULTILINE)
    assert [name for name, _, _ in lines] == ["FedAvg", "FedProx"]
    for _, accuracy, run in lines:
        assert float(accuracy) > 0.4  # guessing is 0.1
        assert float(accuracy) == pytest.approx(recorded(tmp_path, run), abs=5e-4)
    partitions, ledgers = (
        {(tmp_path / run / name).read_text() for _, _, run in lines}
        for name in ("partition.json", "ledger.csv")
    )
    assert len(partitions) == len(ledgers) == 1  # FedProx sends what FedAvg sends


@pytest.mark.slow
@pytest.mark.essential
def test_lightning_module(tmp_path):
    """The README's lines are those of the example, which learns."""
    script = (EXAMPLES / "lightning_module.py").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    written = {line.strip() for line in script.splitlines()}
    assert {line.strip() for line in shown.splitlines()} <= written
    output = python(tmp_path, str(EXAMPLES / "lightning_module.py"))
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)", output)
    assert float(accuracy) > 0.8  # guessing is 0.1


@pytest.mark.slow
@pytest.mark.essential
def test_own_data(tmp_path):
    output = python(tmp_path, str(EXAMPLES / "own_data.py"))
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)", output)
    assert float(accuracy) > 0.8  # the larger class is 0.63 of the table
    (sizes,) = re.findall(r"clients hold (\[.*\])", output)
    partition = json.loads(
        (tmp_path / "runs/own_data/FedAvg-tumours-seed0/partition.json").read_text()
    )
    assert len(json.loads(sizes)) == 10
    assert sum(partition["sizes"]) == 569 - 114  # every fifth of 569 is in the test set


@pytest.mark.slow
@pytest.mark.essential
def test_own_data_from_the_command_line(tmp_path):
    shutil.copy(EXAMPLES / "own_data.py", tmp_path)
    page = (ROOT / "docs/howto/data.md").read_text()
    (command,) = re.findall(r"python (-m fl_lightning fit .*own_data\..*)", page)
    limits = ["--trainer.max_rounds", "1", "--trainer.logger", "false"]
    assert "final/accuracy" in python(tmp_path, *command.split(), *limits)


@pytest.mark.slow
@pytest.mark.essential
def test_own_method(tmp_path):
    """From a folder that holds nothing but the two files, by the command that they name."""
    for name in ("own_method.py", "own_method.yaml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    (command,) = set(
        re.findall(r"cd examples\n *(python .*)", (EXAMPLES / "own_method.py").read_text())
    )
    assert command in (EXAMPLES / "own_method.yaml").read_text()
    limits = ["--trainer.max_rounds", "2", "--trainer.logger", "false"]
    assert "final/accuracy" in python(tmp_path, *command.split()[1:], *limits)
    (run,) = (tmp_path / "runs/own_method").iterdir()
    assert run.name == "OwnMomentum-digits-seed0"
    with (run / "ledger.csv").open() as file:
        uploads = {int(row["upload"]) for row in csv.DictReader(file) if row["status"] == "trained"}
    assert uploads == {135_832}  # FedAvg's


@pytest.fixture
def in_examples(monkeypatch):
    """``own_method`` can be imported; afterwards its class is gone, or the commands would offer it
    to the tests that follow."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    sys.modules.pop("own_method")
    gc.collect()
    assert "OwnMomentum" not in {cls.__name__ for cls in Method.__subclasses__()}


def test_own_methods_formula(in_examples):
    """Two rounds against the formula, entry by entry; statistics of BatchNorm are averaged and no
    more."""
    from own_method import OwnMomentum

    method = on_images(OwnMomentum(beta=0.5))
    data = images()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    method.build(data)
    parameters = sum(p.numel() for p in method.network.parameters())
    w, v = method.server["weights"].double(), torch.zeros(method.layout.size, dtype=torch.float64)
    draws = torch.Generator().manual_seed(0)
    for _ in range(3):
        sent = {k: torch.randn(method.layout.size, generator=draws) for k in (1, 4)}
        counts = {1: 30, 4: 10}
        mean = (30 * sent[1].double() + 10 * sent[4].double()) / 40
        method.aggregate(
            {
                k: Payload({"examples": torch.tensor(counts[k], dtype=torch.int32), "weights": x})
                for k, x in sent.items()
            }
        )
        v = 0.5 * v + (w - mean)
        v[parameters:] = (w - mean)[parameters:]
        w = w - v
        v[parameters:] = 0
        torch.testing.assert_close(method.server["weights"].double(), w, rtol=0, atol=1e-5)
    torch.testing.assert_close(method.server["weights"][parameters:].double(), mean[parameters:])


def test_own_method_refuses_bad_input(in_examples):
    from own_method import OwnMomentum

    with pytest.raises(InputError, match=r"--model.beta 1.5; it is a share in \[0, 1\); write"):
        OwnMomentum(beta=1.5)


@pytest.mark.slow
@pytest.mark.essential
def test_own_method_passes_the_kit(in_examples):
    from own_method import OwnMomentum

    outcomes = list(run_checks(method_under_test(OwnMomentum, {"beta": 0.7}, {"beta": 0.0}, None)))
    assert [outcome for outcome in outcomes if outcome.verdict == "failed"] == []
    assert {outcome.check for outcome in outcomes if outcome.verdict == "passed"} >= {
        "neutral",
        "resume",
    }
