"""The GPU's benchmark runs on a toy, without the packages that a machine for timing need not have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
PROGRAM = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
for name in ("jsonargparse", "mlflow", "sklearn"):
    sys.modules[name] = None
sys.argv[:2] = ["gpu.py"]
runpy.run_path("{script}", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.essential
def test_it_runs_on_a_toy(tmp_path):
    program = PROGRAM.format(script=FOLDER / "gpu.py")
    options = [
        "round",
        "steps",
        "seats",
        "--device",
        "cpu",
        "--small",
        "--repeats",
        "1",
        "--seconds",
        "5",
        "--out",
        "gpu.json",
    ]
    command = [sys.executable, "-c", program, str(FOLDER), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report.keys() == {"device", "small", "versions", "targets", "round", "steps", "seats"}
    assert set(report["round"]) >= {"eager", "recorded", "batched", "recorded, bf16", "recorded, contiguous"}
    assert all(result["seconds"] > 0 for result in report["round"].values())
    assert {f"round, {how}, {seats} seats" for how in ("recorded", "eager") for seats in (1, 2)} <= {
        *report["seats"]
    }
    assert report["small"]
    assert report["versions"]["torch"]
