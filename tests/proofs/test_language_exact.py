"""Runs of adapters: interrupted or killed and continued, and in two processes, they end as one that
was not."""

from __future__ import annotations

import signal

import language_program
import pytest
from language_program import KINDS, LADDER, TABLE, start
from outcomes import differences, outcome
from ranked import started

pytestmark = [pytest.mark.slow, pytest.mark.essential]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The outcome of each kind's run that was never interrupted."""
    found: dict[str, dict] = {}

    def of(kind: str) -> dict:
        if kind not in found:
            folder = tmp_path_factory.mktemp("whole")
            start(kind, folder)
            found[kind] = outcome(folder)
        return found[kind]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_and_continued_adapters_are_exact(kind, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        start(kind, tmp_path, stop_after=1)
    start(kind, tmp_path, ckpt_path="last")
    found = outcome(tmp_path)
    assert found["metrics"][-1]["test/exact_match"] != ""
    assert differences(found, whole(kind)) == []


def test_killed_and_continued_adapters_are_exact(whole, tmp_path):
    program = started(tmp_path, "kill", "LocalOnly", program=language_program.__file__)
    _, errors = program.communicate(timeout=120)
    assert program.returncode == -signal.SIGKILL, errors
    start("LocalOnly", tmp_path / "LocalOnly", ckpt_path="last")
    assert differences(outcome(tmp_path / "LocalOnly"), whole("LocalOnly")) == []


def test_two_processes_are_one_on_language_and_on_tables(whole, tmp_path):
    """Of LocalOnly each generates the answers of a part of the clients."""
    kinds = ("FedAvg", "residual", "alternate", "LocalOnly", "FedVEMoE", "HEST", LADDER, TABLE)
    program = started(tmp_path, "two", *kinds, program=language_program.__file__)
    _, errors = program.communicate(timeout=240)
    assert program.returncode == 0, errors
    for kind in kinds:
        assert differences(outcome(tmp_path / kind), whole(kind)) == [], kind
