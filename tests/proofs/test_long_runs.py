"""A round near the end of a long run holds, opens and writes what one near its beginning does."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from places import BENCHMARKS

ROUNDS = 400
MOST = 2.0
"""MiB that the process may have grown by in 320 rounds: less than 700 bytes a client and round."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--mlflow"],
        pytest.param(["--clients", "200000", "--val_fraction", "0"], marks=pytest.mark.essential),
    ],
)
def test_rounds_do_not_grow(flags, tmp_path, monkeypatch):
    """MLflow's own caches fill up over a thousand rounds, so that its memory is left to the long
    figure. Memory that does not come back grows in a second run too, unlike what an allocator
    keeps."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    soak, out = import_module("soak"), tmp_path / "out.json"
    given = [
        "--rounds",
        str(ROUNDS),
        "--cohort",
        "10",
        "--eval_every",
        "50",
        *flags,
        "--out",
        str(out),
    ]
    for last in (False, True):
        subprocess.run(
            [sys.executable, str(BENCHMARKS / "soak.py"), *given], cwd=tmp_path, check=True
        )
        found = json.loads(out.read_text())
        for name in ("handles", "threads"):
            before, after = soak.tenths(found[name])
            assert after <= before, name
        written = soak.per_round(found, "disk")
        before, after = soak.tenths(written)
        assert 0 < after < 1.5 * before
        before, after = soak.tenths(found["memory"])
        if "--mlflow" in flags or after - before < MOST:
            break
        assert not last, f"{after - before:.2f} MiB in each of two runs"
