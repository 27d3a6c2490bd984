"""The federations of the golden files, run through ``FederatedTrainer``: data, networks, cohorts
and what is read after each round. ``fl_lightning`` computes in float32 what the files have in
float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from places import TESTS
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from fl_lightning import methods
from fl_lightning.aggregation.average import Average
from fl_lightning.client import Assignment
from fl_lightning.conformance.toy import Sizes, run
from fl_lightning.data import FederatedData
from fl_lightning.hooks import Context, Meter, RoundRecord, Stressor
from fl_lightning.methods import Method
from fl_lightning.topology import Topology
from fl_lightning.wire import Layout

OF_LOCAL_SGD = {"lr", "lr_decay", "steps", "momentum", "weight_decay", "weights"}
"""Settings of a case that all methods have; the others are the method's own."""

FILES = TESTS / "golden" / "breadth"
"""Our own files, which mistakes are planted against whatever ``--golden`` names."""

Case = Mapping[str, Any]
Reader = str | Callable[..., Any]
"""Where a number of the files is found: the name of a tensor, or a function."""


@dataclass(frozen=True)
class Adapter:
    """How a method of the project is made of a file's settings, and where it has the file's
    letters.

    Args:
        make: returns the method; it is called with the method's own settings and with those of
            every method. By default the class of the file's name, with settings of the same names.
        renamed: names of the method's own settings where the file has others, by the file's.
        server: what the server has of ``travels``: a name in ``method.server``, or a function of
            the method.
        state: what the server remembers beside it, by the file's letter: as ``server``.
        kept: what a client keeps, by the file's letter: a name in ``client.state``, or a function
            of that mapping. Only clients with a state are compared.
        personal: the flat model of a client: a function of the method and the client. By default
            what ``deploy`` returns for it.
        evaluated: the flat model that is evaluated: a function of the method. By default what
            ``deploy`` returns.
        weights: shares where the file says nothing: ``examples`` or ``uniform``.
        trainer: arguments of the trainer, beside those that the harness sets.
        callbacks: returns callbacks of the run, given the case.
        topology: returns who talks to whom, given the case's settings. By default there is one
            server.
    """

    make: Callable[..., Method] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    server: Reader = "weights"
    state: Mapping[str, Reader] = field(default_factory=dict)
    kept: Mapping[str, Reader] = field(default_factory=dict)
    personal: Callable[..., Tensor] | None = None
    evaluated: Callable[..., Tensor] | None = None
    weights: str = "examples"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Case], list[Any]] = lambda case: []
    topology: Callable[[Mapping[str, Any]], Topology] | None = None


def cases_in(folder: Path) -> Iterator[tuple[str, Case]]:
    """Yield method and case of all files in a folder, whatever they are called: a file says whose
    it is."""
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_text())
        for case in found["cases"]:
            yield found["method"], case


def cases_of(name: str) -> list[Case]:
    """Return the cases of a method in our own files."""
    return [case for method, case in cases_in(FILES) if method == name]


def averaging(
    average: type[Average], state: Mapping[str, Reader] | None = None, **defaults: Any
) -> Adapter:
    """Return the adapter of FedAvg with an average, whose settings are those of the file, else
    these."""
    own = {*signature(average).parameters}

    def make(**settings: Any) -> Method:
        of_average = {key: settings.pop(key) for key in own & {*settings}}
        return methods.FedAvg(average=average(**{**defaults, **of_average}), **settings)

    return Adapter(make=make, state=state or {})


def average_alone(name: str, case: Case, average: type[Average] | None = None) -> Tensor:
    """Return what an average, or another one in its place, makes of the updates of a case."""
    settings, vectors = dict(case["settings"]), [torch.tensor(row) for row in case["updates"]]
    shares, start = case["shares"], torch.zeros(len(vectors[0]))
    if "root_update" in settings:
        root = torch.tensor(settings.pop("root_update"))
        return (average or methods.FLTrust)(root_steps=1).guided(vectors, shares, start, root)
    if name == "GeometricMedian":
        settings = {"tolerance": 0.0, **settings}
    return (average or getattr(methods, name))(**settings)(vectors, shares, start)


class GoldenNetwork(nn.Module):
    """``logistic``, ``mlp`` or ``mlp_bn`` of the files, with the initial weights of the case."""

    def __init__(self, num_classes: int, *, problem: Mapping[str, Any]) -> None:
        super().__init__()
        shapes = dict(problem["layout"])
        if "base.weight" in shapes:
            hidden, features = shapes["base.weight"]
            self.base = nn.Linear(features, hidden)
            if "norm.weight" in shapes:
                self.norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(shapes["head.weight"][1], num_classes)
        layout = Layout.of(self)
        assert {name: list(shape) for name, shape in layout.shapes.items()} == shapes
        layout.write(self, torch.tensor(problem["initial"]))

    def forward(self, inputs: Tensor) -> Tensor:
        if hasattr(self, "base"):
            inputs = self.base(inputs)
            inputs = torch.tanh(self.norm(inputs) if hasattr(self, "norm") else inputs)
        return self.head(inputs)


class GoldenData(FederatedData):
    """The clients of a case, each with one batch of all its examples; the public
    set is FLTrust's root set."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        root = problem.get("root", {"x": [], "y": []})
        clients = problem["clients"]
        sizes = [len(client["y"]) for client in clients]
        super().__init__(
            dataset="golden",
            num_clients=len(clients),
            partition=Sizes(*sizes[:-1]),
            batch_size=max(*sizes, len(root["y"])),
            val_fraction=0.0,
            public_examples=len(root["y"]),
        )
        self.num_classes = problem["classes"]
        dealt = [*clients, root] if root["y"] else clients
        self.x = torch.cat([torch.tensor(client["x"]).float() for client in dealt])
        self.y = torch.cat([torch.tensor(client["y"]) for client in dealt])
        self.example_shape = tuple(self.x.shape[1:])

    def _draw_public(self, seed: int) -> np.ndarray:
        return np.arange(len(self.y) - self.public_examples, len(self.y))

    def setup(self, stage: str | None = None) -> None:
        self.train_target, self.test_target = self.y, self.y

    def inputs(self, split: str, index: Tensor, draws: Tensor | None = None) -> Tensor:
        return self.x[index]


class GoldenCohorts(Stressor):
    """Samples the clients of the case, lets stragglers make fewer steps, and lets the others drop
    out.

    Args:
        case: of a file, with ``cohorts`` and ``settings``.
        lost: whether the uploads of drop-outs are lost; else they never begin.
    """

    def __init__(self, case: Case, lost: bool = False) -> None:
        self.cohorts, self.steps, self.lost = case["cohorts"], steps_of(case), lost

    def change_cohort(
        self, cohort: list[Assignment], *, round: int, context: Context
    ) -> list[Assignment]:
        asked = self.cohorts[round - 1]
        slow = {int(id): steps for id, steps in asked.get("steps", {}).items()}
        changed = []
        for assignment in cohort:
            id = assignment.client.id
            if id in asked["sampled"]:
                # half a step less, so that rounding up gives the number itself
                work = (slow.get(id, self.steps[id]) - 0.5) / context.local_epochs
                arrives = id in asked["arrived"]
                changed.append(
                    replace(assignment, work=work, trains=arrives or self.lost, returns=arrives)
                )
        return changed


class AfterRounds(Meter):
    """Reads after each of these rounds what the file has: ``after[round]`` has the form of the
    file's."""

    def __init__(self, adapter: Adapter, case: Case) -> None:
        self.adapter, self.wanted = adapter, case["after"]
        self.after: dict[str, dict[str, Any]] = {}

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        wanted = self.wanted.get(str(record.round))
        if wanted is None:
            return
        method, data, states = context.method, context.data, context.states  # type: ignore[attr-defined]
        clients = [data.client(id, dict(states.get(id, {}))) for id in range(data.num_clients)]
        adapter, found = self.adapter, {}
        if "server" in wanted:
            found["server"] = read(adapter.server, method.server, method)
        if "state" in wanted:
            found["state"] = {
                letter: read(where, method.server, method)
                for letter, where in adapter.state.items()
            }
        if "kept" in wanted:
            found["kept"] = {
                str(client.id): {
                    letter: read(where, client.state, client.state)
                    for letter, where in adapter.kept.items()
                }
                for client in clients
                if client.state
            }
        if "personal" in wanted:
            personal = adapter.personal or deployed
            found["personal"] = {str(client.id): personal(method, client) for client in clients}
        if "evaluated" in wanted:
            found["evaluated"] = (adapter.evaluated or deployed)(method)
        self.after[str(record.round)] = found


def read(where: Reader, tensors: Mapping[str, Tensor], argument: Any) -> Any:
    """Return a tensor by its name, or what a function makes of the argument."""
    return tensors[where].clone() if isinstance(where, str) else where(argument)


def deployed(method: Method, *client: Any) -> Tensor:
    """Return the network that is evaluated as one vector."""
    network = deepcopy(method.deploy(*client)).requires_grad_(True)  # of FedBABU the head is frozen
    return Layout.of(network).read(network)


def steps_of(case: Case) -> list[int]:
    """Return K of each client."""
    steps, clients = case["settings"]["steps"], case["problem"]["clients"]
    return [steps] * len(clients) if isinstance(steps, int) else steps


def make_method(name: str, adapter: Adapter, case: Case) -> Method:
    """Return the method of a case, with the file's local optimiser, schedule, network and
    shares."""
    settings = case["settings"]
    sgd = {key: settings[key] for key in ("lr", "momentum", "weight_decay") if key in settings}
    common: dict[str, Any] = {
        "network": partial(GoldenNetwork, problem=case["problem"]),
        "optimizer": partial(SGD, **sgd),
        "weigh_by": "clients"
        if settings.get("weights", adapter.weights) == "uniform"
        else "examples",
    }
    if "lr_decay" in settings:
        common["scheduler"] = partial(ExponentialLR, gamma=settings["lr_decay"])
    own = {
        adapter.renamed.get(key, key): settings[key] for key in settings if key not in OF_LOCAL_SGD
    }
    return (adapter.make or getattr(methods, name))(**own, **common)


def run_case(
    name: str,
    adapter: Adapter,
    case: Case,
    folder: Path,
    *,
    lost: bool = False,
    change: Callable[[Method], Method] = lambda method: method,
    **trainer: Any,
) -> dict[str, dict[str, Any]]:
    """Run a case and return what is found after the rounds of the file, in the form of
    ``case["after"]``.

    Args:
        name: of the method.
        adapter: how it is made and read.
        case: of a file.
        folder: of the run.
        lost: whether the uploads of drop-outs are lost; else they never begin.
        change: makes another method of it, such as one with a fault.
        trainer: arguments of the trainer.
    """
    seen = AfterRounds(adapter, case)
    settings = {
        "max_rounds": len(case["cohorts"]),
        "local_epochs": max(steps_of(case)),
        "eval_every": 10**6,
        "checkpoint_every": 0,
        "workers": 1,
        "engine": "sequential",
        "callbacks": [GoldenCohorts(case, lost), *adapter.callbacks(case), seen],
        **({"topology": adapter.topology(case["settings"])} if adapter.topology else {}),
        **adapter.trainer,
        **trainer,
    }
    run(change(make_method(name, adapter, case)), GoldenData(case["problem"]), folder, **settings)
    return seen.after


def differences(expected: Any, found: Any, where: str = "", tolerance: float = 1e-5) -> list[str]:
    """Return where two results differ by more than ``tolerance`` of 1 and of the value, in
    words."""
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or set(expected) != set(found):
            return [f"{where}: {sorted(found)} instead of {sorted(expected)}"]
        return [
            text
            for key in expected
            for text in differences(expected[key], found[key], f"{where}/{key}", tolerance)
        ]
    right = torch.as_tensor(expected, dtype=torch.float64).reshape(-1)
    ours = torch.as_tensor(found, dtype=torch.float64).reshape(-1)
    if right.shape != ours.shape:
        return [f"{where}: {len(ours)} values instead of {len(right)}"]
    apart = ((right - ours).abs() - tolerance * right.abs()).max()
    return (
        []
        if bool(apart <= tolerance)
        else [f"{where}: {float((right - ours).abs().max()):.3g} apart"]
    )
