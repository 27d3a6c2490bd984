"""Random damage to kd_default.yaml and its federation: two rounds, exit code 2, or a run in which
all diverge, never a traceback."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import CONFIGS

from fl_lightning.__main__ import main

FEDERATION, METHOD = (
    yaml.safe_load((CONFIGS / name).read_text())
    for name in ("federations/digits.yaml", "kd_default.yaml")
)
CONFIG = {
    **FEDERATION,
    "trainer": FEDERATION["trainer"] | METHOD["trainer"],
    "model": METHOD["model"],
}
CONFIG["data"]["init_args"]["num_clients"] = 6
WORDS = st.sampled_from(
    ["x", "", "FedAvg", "digits", "none", "nan", ".inf", "callbacks.Calibration", "full"]
)
SMALL = st.integers(-2, 3) | st.floats(-1, 2) | st.sampled_from([float("nan"), float("inf")])
VALUES = (
    SMALL
    | WORDS
    | st.none()
    | st.booleans()
    | st.just([])
    | st.just({})
    | st.just([1, "x"])
    | st.just({"a": 1})
)
LIMITS = [
    "--trainer.max_rounds",
    "2",
    "--trainer.devices",
    "1",
    "--trainer.accelerator",
    "cpu",
    "--trainer.logger",
    "false",
]


def places(tree: Any, path: tuple = ()) -> list[tuple]:
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [place for key, value in items for place in [(*path, key), *places(value, (*path, key))]]


@st.composite
def damaged(draw) -> dict:
    config = deepcopy(CONFIG)
    for _ in range(draw(st.integers(1, 2))):
        *parents, key = draw(st.sampled_from(places(config)))
        inside = config
        for parent in parents:
            inside = inside[parent]
        action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if action == "replace":
            inside[key] = draw(VALUES)
        elif action == "remove":
            del inside[key]
        elif isinstance(inside, dict):
            inside[draw(st.sampled_from(["alpa", "rounds", "max_round", "mu", "class_path"]))] = (
                draw(VALUES)
            )
    return config


def check(config: dict, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "damaged.yaml"
    path.write_text(yaml.safe_dump(config))
    code = main(["fit", "--config", str(path), *LIMITS])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    # a training that diverges for everybody
    assert code in (0, 2) or (code == 1 and "was ever counted" in lines[-1])
    assert len(lines) == (code != 0)


@pytest.mark.slow
@pytest.mark.essential
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged())
def test_damaged_configuration(tmp_path, monkeypatch, capsys, config):
    monkeypatch.chdir(tmp_path)
    check(config, capsys, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(
    max_examples=600,
    derandomize=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(damaged())
def test_much_damaged_configuration(tmp_path, monkeypatch, capsys, config):
    monkeypatch.chdir(tmp_path)
    check(config, capsys, tmp_path)
