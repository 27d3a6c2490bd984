"""Every method with a golden file leaves after each round what an independent reference in float64
leaves.

A file of ``golden/breadth`` has cases of one method, in the form of ``golden/breadth/README.md`` of
those who made them. To add a method: copy its file, and add a line to ``golden_adapters.ADAPTERS``.
A file without one fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_adapters import ADAPTERS
from golden_cases import (
    FILES,
    average_alone,
    cases_in,
    differences,
    make_method,
    run_case,
)

from fl_lightning.engines.attributes import is_stackable


def pytest_generate_tests(metafunc):
    fixture = {"case", "alone"} & {*metafunc.fixturenames}
    if not fixture:
        return
    folder = Path(metafunc.config.getoption("--golden")) / "breadth"
    found = [
        (method, case)
        for method, case in cases_in(folder)
        # a rule is of test_adapter_averages, events are of test_golden_asynchronous
        if not {"rule", "events"} & {*case} and ("updates" in case) == (fixture == {"alone"})
    ]
    ids = [f"{name}-{case['name']}" for name, case in found]
    metafunc.parametrize(f"name, {fixture.pop()}", found, ids=ids)


def check(name, case, folder, **settings):
    assert name in ADAPTERS, f"{name}.json has no line in ADAPTERS"
    found = run_case(name, ADAPTERS[name], case, folder, **settings)
    assert not differences(case["after"], found)


def test_averages_by_themselves(name, alone):
    assert not differences(alone["result"], average_alone(name, alone))


def test_clients_that_drop_out_never_begin(name, case, tmp_path):
    check(name, case, tmp_path)


def test_stacked_clients_leave_the_same(name, case, tmp_path):
    if not is_stackable(make_method(name, ADAPTERS[name], case)):
        pytest.skip(f"clients of {name} are trained one by one")
    check(name, case, tmp_path, engine="batched")


def test_uploads_of_drop_outs_are_lost(name, case, tmp_path):
    check(name, case, tmp_path, lost=True)


def test_every_adapter_has_its_file():
    assert set(ADAPTERS) == {
        method for method, case in cases_in(FILES) if not {"rule", "events"} & {*case}
    }


def test_a_difference_is_seen():
    case = {"1": {"server": [1.0, 2.0], "kept": {"0": {"h": [0.0]}}}}
    assert not differences(case, {"1": {"server": [1.0, 2.00001], "kept": {"0": {"h": [0.0]}}}})
    assert differences(case, {"1": {"server": [1.0, 2.0001], "kept": {"0": {"h": [0.0]}}}})
    assert differences(case, {"1": {"server": [1.0, 2.0], "kept": {"1": {"h": [0.0]}}}})
    assert differences(case, {"1": {"server": [1.0, float("nan")], "kept": {"0": {"h": [0.0]}}}})
