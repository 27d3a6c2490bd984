"""FedBuff and FedAsync make of the uploads of a golden file, in its order and as stale, what its
independent reference makes of them. Clients' local steps are written anew here; what a stale upload
stands for is the package's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_cases import FILES, GoldenNetwork, cases_in, differences, steps_of
from torch.nn.functional import cross_entropy

from fl_lightning.clock.asynchronous import FedAsync, FedBuff
from fl_lightning.clock.staleness import Constant, Hinge, Polynomial
from fl_lightning.wire import Layout


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        folder = Path(metafunc.config.getoption("--golden")) / "breadth"
        found = [(method, case) for method, case in cases_in(folder) if "events" in case]
        ids = [f"{method}-{case['name']}" for method, case in found]
        metafunc.parametrize("name, case", found, ids=ids)


def rounds_of(name, settings):
    if name == "FedBuff":
        weight = Polynomial(settings.get("exponent", 0.5))
        return FedBuff(2, settings["buffer"], weight, settings.get("max_staleness"))
    a, free = settings.get("a", 0.5), settings.get("b", 4)
    kinds = {
        "constant": Constant,
        "polynomial": lambda: Polynomial(a),
        "hinge": lambda: Hinge(a, free),
    }
    return FedAsync(
        2, settings["alpha"], kinds[settings["staleness"]](), settings.get("max_staleness")
    )


def trained(case, client, start):
    """The client's weights after its local steps from ``start``, with FedAsync's pull towards
    it."""
    settings, data = case["settings"], case["problem"]["clients"][client]
    network = GoldenNetwork(case["problem"]["classes"], problem=case["problem"]).double()
    layout = Layout.of(network)
    vector = start.clone()
    x, y = torch.tensor(data["x"], dtype=torch.float64), torch.tensor(data["y"])
    for _ in range(steps_of(case)[client]):
        layout.write(network, vector)
        gradients = torch.autograd.grad(cross_entropy(network(x), y), [*network.parameters()])
        pull = settings.get("mu", 0.0) * (vector - start)
        vector = vector - settings["lr"] * (
            torch.cat([one.reshape(-1) for one in gradients]) + pull
        )
    return vector


def test_versions_are_those_of_the_reference(name, case):
    settings, rounds = case["settings"], rounds_of(name, case["settings"])
    versions, held, stale, after = (
        [torch.tensor(case["problem"]["initial"], dtype=torch.float64)],
        [],
        [],
        {},
    )
    for event in case["events"]:
        now, start = versions[-1], versions[event["version"]]
        behind = len(versions) - 1 - event["version"]
        if rounds.max_staleness is not None and behind > rounds.max_staleness:
            continue
        upload = trained(case, event["client"], start)
        held.append(rounds.present(upload, start, now, behind, len(now)))
        stale.append(float(behind))
        if len(held) == rounds.buffer:
            step = torch.stack(held).mean(dim=0) - now
            versions.append(now + settings.get("server_lr", 1.0) * step)
            after[str(len(versions) - 1)] = {"server": versions[-1], "state": {"staleness": stale}}
            held, stale = [], []
    wanted = {
        round: {"server": one["server"], "state": one["state"]}
        for round, one in case["after"].items()
    }
    assert not differences(wanted, {round: after[round] for round in wanted})


def test_both_methods_have_a_file():
    assert {method for method, case in cases_in(FILES) if "events" in case} == {
        "FedBuff",
        "FedAsync",
    }


@pytest.mark.parametrize("name", ["FedBuff", "FedAsync"])
def test_a_weight_that_is_taken_for_another_is_seen(name, monkeypatch):
    monkeypatch.setattr(Polynomial, "weight", lambda self, versions: 1.0)
    case = next(case for method, case in cases_in(FILES) if method == name)
    with pytest.raises(AssertionError):
        test_versions_are_those_of_the_reference(name, case)
