"""Every script of ``benchmarks/`` runs: its shortest form ends with exit code 0."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from places import ROOT

FOLDER = ROOT / "benchmarks"
SHORTEST = {
    "adapters": "--repeats 1 --rows 2 --length 16",
    "attacks": "--seeds 1 --rounds 1",
    "calibrated_clock": "--rounds 2 --rates 8 8 --methods fedavg",
    "clock_cost": "--rounds 2 --repeats 1 --clients 20 --cohort 4",
    "confidence_sequences": "--sequences 20 --values 20",
    "deploy": "--nodes 1 --rounds 2",
    "exact_mean": "--clients 2 --values 1000 --repeats 1",
    "gpu": "W4",
    "hest_latency": "--quick true",
    "language_base": "--steps 1",
    "language_engines": "--clients 2 --rows 2 --steps 1 --repeats 1",
    "language_step": "--repeats 1 --rows 2 --length 16 --clients 2",
    "memory_layout": "--repeats 1 --only resnet20",
    "method_prices": "--network small_cnn --examples 8 --clients 2 --repeats 1 --only FedAdam",
    "phones": "--clients 3",
    "prices": "--network small_cnn --examples 8 --epochs 1 --repeats 1",
    "rank_sums": "--ranks 2 --cohorts 2 --values 100 --repeats 1",
    "ranks": "--ranks 2 --clients 2 --seconds 0.01",
    "scale_point": "--population 20 --cohort 4 --rounds 1 --engine sequential",
    "secure_sum": "--cohorts 5 --values 100",
    "shares": "W4 --rounds 1",
    "shipped_tables": "--seconds 0.1 --context 8 --out .",
    "soak": "--clients 5 --cohort 2 --rounds 4",
    "startup": "--repeats 1",
    "weights": "--rounds 1 --configs fedavg --engines sequential",
    "wire": "--examples 8 --epochs 1",
    "word_list": "",
    "workload_graph": "W4 --rounds 1",
    "workload_limit": "W4 --rounds 1",
    "workload_ours": "W4 --rounds 1",
    "workload_plain": "W4 --rounds 1",
    "workloads": "W4 --rounds 1 --repeats 1",
}
TRIED_ELSEWHERE = {
    "attack_grid": "by test_attack_grid, and its table is held to its file",
    "method_bytes": "by test_method_table, with all configurations",
    "scale": "point by point, by scale_point",
}
NEEDS = {"calibrated_clock": "flwr", "deploy": "flwr", "secure_sum": "Crypto"}
LONG = {
    "adapters",
    "attacks",
    "calibrated_clock",
    "clock_cost",
    "hest_latency",
    "language_base",
    "language_engines",
    "language_step",
    "method_prices",
    "rank_sums",
    "ranks",
    "scale_point",
    "shares",
    "shipped_tables",
    "soak",
    "startup",
    "weights",
    "wire",
    "word_list",
    "workload_limit",
    "workload_ours",
    "workload_plain",
    "workloads",
}
"""Tried with ``-m slow`` alone: they take ten seconds to two minutes in their shortest form."""
MAY_FAIL = {"shipped_tables": "tables measured in a blink are too far off, and it says so"}


def test_every_script_is_tried():
    scripts = {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}
    assert SHORTEST.keys() | TRIED_ELSEWHERE.keys() == scripts


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in LONG else pytest.mark.essential) for name in SHORTEST],
)
def test_the_shortest_form_ends(name, tmp_path):
    if (package := NEEDS.get(name)) and find_spec(package) is None:
        pytest.skip(f"it needs {package}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / f"{name}.py"), *SHORTEST[name].split()]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.returncode == 0 or name in MAY_FAIL, done.stderr[-2000:]
    assert done.stdout.strip(), "it said nothing"
