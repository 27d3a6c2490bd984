"""Every method with a golden file leaves after each round what an independent reference in float64 leaves.

A file of ``golden/breadth`` has cases of one method, in the form of ``golden/breadth/README.md`` of those who
made them. To add a method: copy its file, and add a line to ``ADAPTERS``. A file without one fails.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from golden_cases import (
    FILES,
    Adapter,
    average_alone,
    averaging,
    cases_in,
    cases_of,
    differences,
    make_method,
    run_case,
)

from fl_lightning import methods
from fl_lightning.engines.attributes import is_stackable


def dynamic(kind):
    """Clients of FedDyn count once each; ``weights`` of a file is what a_i goes by."""
    return lambda weigh_by, **settings: kind(alpha_by=weigh_by, **settings)


def with_head(method, client):
    """The file's personal models end with P, which is added to the last layer where the model is deployed."""
    return torch.cat([method.server["weights"], method.kept(client, "P")])


MOMENTS = {"m": "optimizer/first_moment", "v": "optimizer/second_moment"}
ADAPTERS: dict[str, Adapter] = {
    "FedAvg": Adapter(),
    "FedProx": Adapter(),
    "FedAvgM": Adapter(state={"v": "optimizer/velocity"}),
    "FedAdam": Adapter(state=MOMENTS),
    "FedYogi": Adapter(state=MOMENTS),
    "FedAdagrad": Adapter(state=MOMENTS),
    "FedExP": Adapter(state={"gain": "optimizer/gain"}),
    "FedACG": Adapter(server="optimizer/evaluated", state={"M": "optimizer/momentum"}),
    "SCAFFOLD": Adapter(weights="uniform", state={"c": "c"}, kept={"c_i": "c_i"}),
    "FedDyn": Adapter(make=dynamic(methods.FedDyn), weights="uniform", state={"H": "H"}, kept={"H_i": "H_i"}),
    "FedDC": Adapter(
        make=dynamic(methods.FedDC),
        weights="uniform",
        state={"G": "G"},
        kept={"h_i": "H_i", "g_i": "g_i"},
    ),
    "FedNova": Adapter(state={"B": "momentum"}),
    "FedSAM": Adapter(),
    "FedCM": Adapter(weights="uniform", state={"M": "M"}),
    "MoFedSAM": Adapter(weights="uniform", state={"M": "M"}),
    "FedLC": Adapter(),
    "MOON": Adapter(kept={"previous": "previous_weights"}),
    "APFL": Adapter(kept={"v": "v", "A": "A"}),
    "FedALA": Adapter(kept={"v": "v", "W": "W"}),
    "FedProto": Adapter(state={"P": "prototypes", "known": "known"}, kept={"weights": "weights"}),
    "FedRoD": Adapter(kept={"P": "P"}, personal=with_head),
    "Ditto": Adapter(kept={"v": "v"}),
    "FineTune": Adapter(),
    "FedPer": Adapter(kept={"local": "personal"}),
    "FedRep": Adapter(kept={"local": "personal"}),
    "FedBABU": Adapter(),
    "FedBN": Adapter(kept={"local": "personal"}),
    "LocalOnly": Adapter(kept={"weights": "weights"}),
    "Bulyan": averaging(methods.Bulyan),
    "CenteredClipping": averaging(methods.CenteredClipping, state={"v": "last_update/weights"}),
    "FLTrust": averaging(methods.FLTrust),
    "GeometricMedian": averaging(methods.GeometricMedian, tolerance=0.0),
    "Krum": averaging(methods.Krum),
    "MultiKrum": averaging(methods.MultiKrum),
}
"""How each method is made of a file's settings and read, by the method that the file names."""


def pytest_generate_tests(metafunc):
    fixture = {"case", "alone"} & {*metafunc.fixturenames}
    if not fixture:
        return
    folder = Path(metafunc.config.getoption("--golden")) / "breadth"
    found = [
        (method, case) for method, case in cases_in(folder) if ("updates" in case) == (fixture == {"alone"})
    ]
    ids = [f"{name}-{case['name']}" for name, case in found]
    metafunc.parametrize(f"name, {fixture.pop()}", found, ids=ids)


def check(name, case, folder, **settings):
    assert name in ADAPTERS, f"{name}.json has no line in ADAPTERS"
    found = run_case(name, ADAPTERS[name], case, folder, **settings)
    assert not differences(case["after"], found)


def found_by_a_file(fault, folder):
    """Return where a class that differs from its base by a mistake differs from the base's file."""
    own = fault.__mro__[1]
    name, found = own.__name__, []
    made = ADAPTERS[name].make or own
    for case in cases_of(name):

        def make(**settings):
            method = made(**settings)
            method.__class__ = fault
            return method

        after = run_case(name, replace(ADAPTERS[name], make=make), case, folder)
        found += differences(case["after"], after, tolerance=1e-3)
    return found


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
    assert set(ADAPTERS) == {method for method, _ in cases_in(FILES)}


def test_a_difference_is_seen():
    case = {"1": {"server": [1.0, 2.0], "kept": {"0": {"h": [0.0]}}}}
    assert not differences(case, {"1": {"server": [1.0, 2.00001], "kept": {"0": {"h": [0.0]}}}})
    assert differences(case, {"1": {"server": [1.0, 2.0001], "kept": {"0": {"h": [0.0]}}}})
    assert differences(case, {"1": {"server": [1.0, 2.0], "kept": {"1": {"h": [0.0]}}}})
    assert differences(case, {"1": {"server": [1.0, float("nan")], "kept": {"0": {"h": [0.0]}}}})
