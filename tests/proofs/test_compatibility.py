"""What fits what: each method with each feature makes a toy round, or the table refuses it, and
nothing else does."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from own_leaves import SIZES, config, deployed, leaf, leaf_file, own_nodes
from places import ROOT
from refusals import refused
from secure_methods import METHODS as SECURE_METHODS
from torch import nn
from torch.nn import functional as F

from callbacks import ByzantineClients, Calibration, LabelNoise, NewTasks
from fl_lightning import methods
from fl_lightning.cli.parser import resolve
from fl_lightning.compatibility import FORMER, ROWS, Run, check_run, why_not
from fl_lightning.conformance.federations import Sentences, small_llama
from fl_lightning.conformance.known_methods import method_under_test
from fl_lightning.conformance.toy import images, run, sgd
from fl_lightning.data import IID, FederatedData
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.methods import FedAvg, FedNTD, FineTuning, Method, ServerSGD
from fl_lightning.methods.terms import DistillationTerm, ProximalTerm
from fl_lightning.models import SmallCNN
from fl_lightning.models.adapters import add_adapter
from fl_lightning.models.language import Llama
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.rng import stream
from fl_lightning.tasks import Classification, ClassRows, LanguageModelling, Regression, Task
from fl_lightning.topology import Hierarchy

KINDS = {
    name: kind
    for name in methods.__all__
    if isinstance(kind := getattr(methods, name), type)
    and issubclass(kind, Method)
    and kind is not Method
}
FEATURES = [feature for row in ROWS for feature in row.features]
OF_EACH_KIND = {
    "FedAvg", "SCAFFOLD", "FedMPQKD", "FedKD", "FedMosaic", "Ditto", "FedBN", "FedProto", "FedVEMoE", "HEST", "LocalOnly"
}  # fmt: skip
"""Tried in every run of CI where trying all takes long."""
EXTRAS = {"secure_sum": "Crypto", "privacy": "dp_accounting"}


# One toy run of a method and a feature


class Line(FederatedData):
    """y is the sum of x, for four clients."""

    task = Regression()
    num_classes, example_shape = 1, (3,)

    def __init__(self) -> None:
        super().__init__(
            dataset="line", num_clients=4, partition=IID(), batch_size=16, val_fraction=0.2
        )

    def setup(self, stage=None):
        self.x = torch.from_numpy(stream(0, "line").standard_normal((100, 3)).astype(np.float32))
        self.train_target, self.test_target = self.x.sum(1).split([80, 20])

    def inputs(self, split, index, draws=None):
        return self.x.split([80, 20])[split != "train"][index]


class Grades(Task):
    """Classes of examples, of which no class of ours knows."""

    primary, has_classes = "loss", True
    per_client = ("loss",)

    def loss(self, outputs, target):
        return F.cross_entropy(outputs, target)

    def examplewise(self, outputs, target):
        return {
            "loss": (
                F.cross_entropy(outputs, target, reduction="none").double(),
                self.weight(target),
            )
        }

    def class_rows(self, outputs, target):
        return ClassRows(outputs, target, None)


def graded() -> FederatedData:
    data = images()
    data.task = Grades()
    return data


def small_network(outputs: int) -> nn.Module:
    """Return a network of images without running statistics."""
    return SmallCNN(outputs, width=4)


def line_network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, outputs))


def with_factors(network: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """Return a network of the same inputs that has LoRA below a last layer that is trained
    whole."""
    if network is small_llama:
        return network

    def make(outputs: int) -> nn.Module:
        made = nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.Linear(8, outputs))
        add_adapter(made, "lora", rank=2, targets=["1"])[2].requires_grad_(True)
        return made

    return make


def with_directions(network: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """Return a network of the same inputs that has AdaLoRA."""

    def make(outputs: int) -> nn.Module:
        if network is small_llama:
            return add_adapter(Llama(outputs, width=8, depth=1, heads=2), "adalora", rank=3)
        layers = [nn.Linear(3 if network is line_network else 768, 8), nn.Linear(8, outputs)]
        return add_adapter(nn.Sequential(nn.Flatten(), *layers), "adalora", rank=3, targets=["1"])

    return make


KINDS_OF_TASK: dict[str, tuple[Callable[[], FederatedData], Callable[[int], nn.Module]]] = {
    "classification": (images, small_network),
    "language": (Sentences, small_llama),
    "other_classes": (graded, small_network),
    "no_classes": (Line, line_network),
}


class Lit(LightningModule):
    """A module around a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        outputs = self(x)
        return (
            LanguageModelling().loss(outputs, y)
            if outputs.ndim == 3
            else F.cross_entropy(outputs, y)
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def toy_run(name: str, feature: str, folder: Path) -> None:
    """Train a method for one round of a run that has the feature."""
    kind, model, trainer = KINDS[name], dict[str, Any](), dict[str, Any]()
    text = feature == "language" or (
        feature not in KINDS_OF_TASK and "classification" in kind.refuses
    )
    data, network = (
        (Sentences, small_llama) if text else KINDS_OF_TASK.get(feature, (images, small_network))
    )
    if name == "FedAdaLoRA":
        network = with_directions(network)
    if feature == "adapter_average":
        network = network if name == "FedAdaLoRA" else with_factors(network)
        steps = "server_optimizer" in kind.owns
        model["adapter_average"] = "residual" if steps else "product"
    if feature == "module":
        model |= {
            "module": Lit(network(Sentences().num_classes if text else 4)),
            "optimizer": sgd(0.05),
        }
    elif feature == "received_terms":
        model["terms"] = [DistillationTerm(0.1) if "prox" in kind.own_terms else ProximalTerm(0.1)]
    elif feature == "server_optimizer":
        model["server_optimizer"] = ServerSGD(momentum=0.9)
    elif feature == "personal":
        model["personal"] = "head"
    elif feature == "finetune":
        model["finetune"] = FineTuning(1)
    elif feature == "attack":
        trainer["callbacks"] = [ByzantineClients(0.2)]
    elif feature == "secure_sum":
        trainer["secure_sum"] = SecureSum()
    elif feature == "topology":
        trainer["topology"] = Hierarchy(groups=2)
    elif feature == "privacy":
        model["weigh_by"] = "clients"
        trainer["privacy"] = ClientPrivacy(noise_multiplier=1.0, clip_norm=0.1)
    method = method_under_test(kind).make(**model)
    if feature != "module":
        method.network_spec, method.optimizer_spec = network, sgd(0.05)
    run(
        method,
        data(),
        folder,
        max_rounds=1,
        max_local_steps=1,
        workers=1,
        engine="sequential",
        **trainer,
    )


def is_refused_by_the_table(error: InputError) -> bool:
    return traceback.extract_tb(error.__traceback__)[-1].name == check_run.__name__


def why(name: str, feature: str) -> str:
    """Return why a method cannot have a feature, as the page says it; empty where it can."""
    return why_not(method_under_test(KINDS[name]).make(), feature)


CELLS = [
    (name, feature)
    for name in KINDS
    for feature in FEATURES
    if feature not in ("own_data", *KINDS[name].owns)
]
"""Without what no constructor takes."""
REFUSED = [(name, feature) for name, feature in CELLS if why(name, feature)]
QUICK = [("FedAvg", feature) for feature in FEATURES[:-1]] + [
    ("FedVEMoE", "language"),
    ("HEST", "attack"),
]


@pytest.mark.parametrize(("name", "feature"), REFUSED)
def test_what_the_table_refuses_is_refused_before_anything_is_made(name, feature, tmp_path):
    pytest.importorskip(EXTRAS.get(feature, "torch"))
    with pytest.raises(InputError) as caught:
        toy_run(name, feature, tmp_path)
    assert is_refused_by_the_table(caught.value)
    rule, _, instead = why(name, feature).partition("; ")
    assert caught.value.rule == rule
    assert instead in caught.value.instead
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "feature"), QUICK)
def test_what_the_table_allows_runs(name, feature, tmp_path):
    pytest.importorskip(EXTRAS.get(feature, "torch"))
    toy_run(name, feature, tmp_path)
    assert list(tmp_path.glob("*/*/checkpoints/*"))


def has_a_run_elsewhere(name: str, feature: str) -> bool:
    """Return whether ``test_every_method_conforms`` or ``test_a_secure_sum_is_the_plain_one`` runs
    the cell in CI."""
    if feature == "classification":
        return name not in ("Centralised", "FedAdaLoRA")  # which conforms on text
    return feature == "secure_sum" and name in SECURE_METHODS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "feature"),
    [
        pytest.param(*cell, marks=[] if has_a_run_elsewhere(*cell) else pytest.mark.essential)
        for cell in CELLS
        if cell not in [*REFUSED, *QUICK]
    ],
)
def test_all_that_the_table_allows_runs(name, feature, tmp_path):
    test_what_the_table_allows_runs(name, feature, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.essential if name in OF_EACH_KIND else [])
        for name in KINDS
        if name != "FedAdaLoRA"
    ],
)
def test_nodes_with_data_of_their_own(name, tmp_path):
    """Of the methods of language, one class of each example is all that these nodes have."""
    test = leaf_file(tmp_path / "test.json", {"t": 30})
    files = {
        n: leaf_file(tmp_path / f"{user}.json", {user: SIZES[user]}) for n, user in enumerate(SIZES)
    }
    more = {"reference": "mlp", "num_blocks": 1, "rank": 1} if name == "FedMosaic" else {}
    cli = config(tmp_path, "deployed", leaf(test, test), name, more)
    reason = why(name, "own_data") or why(name, "classification")
    if not reason:
        deployed(cli, own_nodes(tmp_path, files))
        assert cli.trainer.progress.done.round == 2
        return
    with pytest.raises(InputError) as caught:
        deployed(cli, own_nodes(tmp_path, files))
    assert is_refused_by_the_table(caught.value)
    assert reason in (caught.value.rule, why(name, "own_data"))


# What the table is asked for beside methods' refusals


def test_a_stressor_that_changes_what_only_nodes_have_is_refused_in_a_deployment():
    check_run(Run(FedAvg(), [LabelNoise()]))
    with refused("LabelNoise", "deployment"):
        check_run(Run(FedAvg(), [LabelNoise()], deployed=True))


def test_a_stressor_that_goes_by_groups_is_refused_on_the_nodes_own_data():
    arrives = NewTasks(group=0, arrives=3)
    check_run(Run(FedAvg(), [arrives], deployed=True))
    with refused("callbacks.NewTasks on the nodes' own data"):
        check_run(Run(FedAvg(), [arrives], deployed=True, own_data=True))


def test_probabilities_are_those_of_classes_of_examples():
    check_run(Run(FedAvg(), [Calibration()], task=Classification()))
    with refused("Calibration where the task is Regression"):
        check_run(Run(FedAvg(), [Calibration()], task=Regression()))


def test_a_term_that_compares_logits_needs_classes():
    with refused("--model.terms DistillationTerm where the task is Regression"):
        check_run(Run(FedAvg(terms=[DistillationTerm()]), task=Regression()))
    check_run(Run(FedNTD(beta=0.0), task=Regression()))


@pytest.mark.parametrize(
    ("config", "flags", "said"),
    [
        (
            "fedkd",
            ("--trainer.secure_sum.threshold", "0.67"),
            "--trainer.secure_sum with --model FedKD",
        ),
        (
            "fedavg",
            ("--model.optimizer.lr", "-1"),
            "--model.optimizer.lr -1.0",
        ),
    ],
)
def test_the_plan_of_a_study_says_what_does_not_fit(tmp_path, monkeypatch, config, flags, said):
    monkeypatch.chdir(tmp_path)
    file = str(ROOT / "configs" / f"{config}.yaml")
    with refused(said):
        resolve(["--config", file, *flags, "--trainer.logger", "false"])
    assert not list(tmp_path.iterdir())


# Declarations of earlier versions


@pytest.mark.parametrize("name", FORMER)
def test_what_methods_declared_before_refuses_holds_with_a_warning(name):
    with pytest.warns(DeprecationWarning, match=rf"Own\.{name}; .* refuses with {FORMER[name][0]}"):
        kind = type("Own", (FedAvg,), {name: "it is so"})
    assert kind.refuses == dict.fromkeys(FORMER[name], "it is so")
    assert not FedAvg.refuses


# The seam


def test_no_generic_code_asks_for_a_concrete_method():
    rooms = ["loop.py", "trainer.py", "evaluation.py", "hooks.py", "compatibility"]
    rooms += [
        "deploy",
        "probing",
        "engines",
        "aggregation",
        "run",
        "export",
        "tracking",
        "../callbacks",
    ]
    paths = [ROOT / "fl_lightning" / room for room in rooms]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    assert len(files) > 100
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "fl_lightning.methods"
            ):
                named = {alias.name for alias in node.names} & {
                    *KINDS,
                    "QuantizedMethod",
                    "CodedUpdates",
                }
            else:
                named = {node.attr} & {*KINDS} if isinstance(node, ast.Attribute) else set()
            assert not named, f"{file} knows {', '.join(named)}"


def test_the_contract_of_a_method_is_short():
    source = (ROOT / "fl_lightning" / "methods" / "base.py").read_text()
    (contract,) = [
        n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Method"
    ]
    attributes = [node for node in contract.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    assert 5 < len(attributes) <= 15
    assert len(source.splitlines()) <= 420


class DecidesLate(FedAvg):
    """It is known with its settings what it refuses."""

    @property
    def refuses(self):
        return {"secure-sum": "its server reads single uploads"}


@pytest.mark.parametrize(
    "make_it",
    [lambda: type("Mistyped", (FedAvg,), {"refuses": {"secure-sum": "why"}}), DecidesLate],
)
def test_a_feature_that_there_is_not_refuses_nothing(make_it):
    with pytest.raises(MisuseError, match=r"refuses with 'secure-sum'; .*; write secure_sum"):
        make_it()
