"""Runs made from Python: their settings are recorded, compared on resume and told apart in a
comparison."""

from __future__ import annotations

import copy
import logging
import os
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial
from pickle import dumps, loads

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from ranks_program import data_of
from torch import nn
from torch.optim import SGD, Adam
from toy import run

import callbacks
from callbacks import LabelNoise
from fl_lightning import FederatedTrainer, methods
from fl_lightning.cli.parser import resolve
from fl_lightning.config.recorded import (
    NOT_RECORDED,
    describe,
    import_path,
    imported,
    not_recorded,
)
from fl_lightning.config.settings import config_of
from fl_lightning.data import Dirichlet
from fl_lightning.errors import InputError
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import CosineSchedule, FedAvg, FedMPQKD, FedProx, TrimmedMean
from fl_lightning.models import SmallCNN
from fl_lightning.study.results.gather import gather

SMALL = partial(SmallCNN, width=4)


def optimizer(lr: float = 0.05):
    return lambda parameters: SGD(parameters, lr=lr)


def fit(root, mu: float = 0.1, seed: int = 0, *, make=FedProx, **settings):
    arguments = {"mu": mu} if make is FedProx else {}
    method = make(
        network=settings.pop("network", SMALL),
        optimizer=settings.pop("optimizer", optimizer()),
        **arguments,
    )
    return run(
        method,
        data_of("FedAvg"),
        root,
        seed=seed,
        max_rounds=settings.pop("max_rounds", 1),
        local_epochs=1,
        **settings,
    )


FIXING = [make for name in methods.__all__ if getattr(make := getattr(methods, name), "owns", None)]


@pytest.mark.parametrize("make", FIXING)
def test_a_method_that_fixes_a_setting_is_read_back_from_its_configuration(make, tmp_path):
    """Nobody can set it, so that a configuration that names it is refused."""
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"model": describe(make(network="mlp"))}))
    found = yaml.safe_load(resolve(["--config", "configs/plain.yaml", "--config", str(path)]))
    assert found["model"]["class_path"].endswith(f".{make.__name__}")
    assert not make.owns & found["model"]["init_args"].keys()


def test_the_configuration_of_a_run_from_python_has_every_setting(tmp_path):
    trainer = fit(tmp_path, callbacks=[LabelNoise(round=3)], participation=0.5)
    config = yaml.safe_load((trainer.run_dir / "config.yaml").read_text())
    assert config["seed_everything"] == 0
    assert (
        config["trainer"] | {"max_rounds": 1, "participation": 0.5, "local_epochs": 1}
        == config["trainer"]
    )
    (callback,) = config["trainer"]["callbacks"]
    assert (callback["class_path"], callback["init_args"]["round"]) == (
        "callbacks.label_noise.LabelNoise",
        3,
    )
    model = config["model"]
    assert model["class_path"] == "fl_lightning.methods.fedprox.FedProx"
    assert model["init_args"]["mu"] == 0.1
    assert model["init_args"]["average"]["class_path"].endswith("WeightedMean")
    assert model["init_args"]["network"] == {
        "class_path": "fl_lightning.models.small_cnn.SmallCNN",
        "init_args": {"width": 4},
    }
    assert config["data"]["init_args"]["batch_size"] == 32
    assert not_recorded(config_of(trainer.run_dir)) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mu": 0.9}, "model.init_args.mu: 0.1 -> 0.9"),
        ({"optimizer": optimizer(0.01)}, "model.init_args.optimizer"),
        ({"optimizer": Adam}, "model.init_args.optimizer"),
        (
            {"network": partial(SmallCNN, width=8)},
            "model.init_args.network.init_args.width: 4 -> 8",
        ),
        ({"callbacks": [LabelNoise(round=1)]}, "trainer.callbacks"),
        ({"participation": 0.5}, "trainer.participation"),
        ({"seed": 1}, "seed_everything"),
        ({"make": FedAvg}, "model.class_path"),
    ],
)
def test_a_run_is_not_continued_with_other_arguments(changes, named, tmp_path):
    trainer = fit(tmp_path)
    with pytest.raises(InputError, match="written with another configuration") as refused:
        fit(tmp_path, ckpt_path=str(trainer.run_dir), max_rounds=2, **changes)
    assert named in str(refused.value)


def test_a_run_is_continued_with_the_same_arguments_made_anew(tmp_path):
    trainer = fit(tmp_path, max_rounds=2)
    fit(tmp_path, ckpt_path=str(trainer.run_dir), max_rounds=2)


def test_compare_tells_runs_from_python_apart(tmp_path):
    for mu in (0.0, 0.5, 50.0):
        for seed in (0, 1):
            fit(tmp_path, mu, seed, experiment="mu")
    results = gather(str(tmp_path / "mu"), tmp_path)
    assert {(one.label, one.seed) for one in results.runs} == {
        (f"FedProx mu={mu}", seed) for mu in (0.0, 0.5, 50.0) for seed in (0, 1)
    }
    assert results.excluded == []


class Odd(Stressor):
    def __init__(self, source: object) -> None:
        self.source = source


def test_what_cannot_be_recorded_is_refused_by_name(tmp_path):
    odd = {"callbacks": [Odd(object())], "experiment": "odd"}
    trainer = fit(tmp_path, **odd)
    fit(tmp_path, 0.5, experiment="odd")
    with pytest.raises(
        InputError, match=r"trainer.callbacks.0.init_args.source, which cannot be recorded"
    ):
        fit(tmp_path, ckpt_path=str(trainer.run_dir), **odd)
    results = gather(str(tmp_path / "odd"), tmp_path)
    assert [one.label for one in results.runs] == ["FedProx"]
    (left,) = results.excluded
    assert "trainer.callbacks.0.init_args.source cannot be recorded" in left.reason


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_without_settings_is_not_counted(tmp_path, is_there):
    """Earlier releases left the file empty."""
    trainer = fit(tmp_path, experiment="old")
    fit(tmp_path, 0.5, experiment="old")
    (trainer.run_dir / "config.yaml").unlink()
    if is_there:
        (trainer.run_dir / "config.yaml").write_text("")
    results = gather(str(tmp_path / "old"), tmp_path)
    assert [entry.reason for entry in results.excluded] == [
        "its settings were not recorded: config.yaml is missing or empty"
    ]


class Lit(LightningModule):
    def __init__(self, lr: float = 0.1, keep: bool = True) -> None:
        super().__init__()
        if keep:
            self.save_hyperparameters()


def test_a_lightning_module_is_described_by_its_hyperparameters():
    assert describe(Lit(0.5)) == {
        "class_path": "test_recorded.Lit",
        "init_args": {"lr": 0.5, "keep": True},
    }
    assert describe(Lit(0.5, keep=False)).startswith(NOT_RECORDED)


RATE = 0.1


def by_global(parameters):
    return SGD(parameters, lr=RATE)


def test_the_global_values_that_a_function_uses_are_part_of_it(monkeypatch):
    # as a loop in a script makes them
    made = [eval("lambda p: SGD(p, lr=lr)", {"SGD": SGD, "lr": lr}) for lr in (0.05, 0.5)]
    assert describe(made[0]) != describe(made[1])
    before = describe(by_global)
    monkeypatch.setitem(by_global.__globals__, "RATE", 0.2)
    assert describe(by_global) != before
    assert describe(optimizer) == "test_recorded.optimizer"  # reads no value


def test_classes_made_in_a_function_are_told_apart():
    def make(k):
        class Scaled(FedAvg):
            factor = k

            def task_loss(self, outputs, target):
                return k * super().task_loss(outputs, target)

        return Scaled()

    assert describe(make(1)) == describe(make(1)) != describe(make(2))


def test_attributes_are_no_global_values(monkeypatch):
    def network(classes):
        return nn.Linear(classes.RATE, 1)

    before = describe(network)
    monkeypatch.setitem(network.__globals__, "RATE", 0.2)
    assert describe(network) == before


def uses(value):
    return lambda classes: value


def linear(bias=0.0, requires_grad=True, part=None):
    made = nn.Linear(1, 1)
    for weights, kept in zip(made.parameters(), (1.0, bias), strict=True):
        nn.init.constant_(weights.requires_grad_(requires_grad), kept)
    made.parts = [made, part]
    return made


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (lambda lr: Namespace(lr=lr), 0.1, 1e-5),
        (linear, 0.0, 0.5),
        (partial(linear, 0.0), True, False),
        (nn.Dropout, 0.1, 0.5),
        (re.compile, "a", "b"),
        (logging.getLogger, "a", "b"),
        (lambda name: getattr(TrimmedMean(0.3), name), "__init__", "__call__"),
    ],
)
def test_objects_that_a_function_uses_are_part_of_it(make, one, other):
    given = describe(uses(make(one)))
    assert given == describe(uses(make(one))) != describe(uses(make(other)))
    assert not_recorded(given) == []


class Experiment:
    """A script as a class, which keeps what no record tells."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def optimizer(self):
        return lambda parameters: SGD(parameters, lr=self.lr)

    def method(self):
        class Own(FedAvg):
            def task_loss(own, outputs, target):
                return self.lr * super().task_loss(outputs, target)

        return Own(network=SMALL)


def test_what_cannot_be_recorded_is_refused_where_a_function_uses_it(tmp_path):
    found = f"{NOT_RECORDED}test_recorded.Experiment.optimizer.<locals>.<lambda>, which uses self"
    optimizer = Experiment(0.1).optimizer()
    assert describe(optimizer)["code_sha256"] == found
    assert describe(partial(optimizer, 1))["class_path"]["code_sha256"] == found
    assert describe(uses(optimizer))["code_sha256"].endswith(
        "uses.<locals>.<lambda>, which uses value"
    )
    assert describe(Experiment(0.1).method())["code_sha256"].endswith(
        "Own.task_loss, which uses self"
    )
    assert describe(uses(nn.LazyLinear(1)))["code_sha256"].startswith(NOT_RECORDED)
    assert describe([0] * 1000 + [object()]).startswith(NOT_RECORDED)
    for lr in (0.1, 1e-5):
        trainer = fit(tmp_path, optimizer=Experiment(lr).optimizer(), experiment="sweep")
    with pytest.raises(InputError, match="which uses self"):
        fit(tmp_path, optimizer=optimizer, ckpt_path=str(trainer.run_dir))
    with pytest.raises(
        InputError, match=r"optimizer.code_sha256 cannot be recorded .*which uses self"
    ):
        gather(str(tmp_path / "sweep"), tmp_path)


def test_functions_that_refer_to_each_other():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert describe(even) == describe(even) != describe(odd)


class Ignoring(LightningModule):
    def __init__(self, net: nn.Module, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"])
        self.net = net


def test_what_save_hyperparameters_ignores_is_not_recorded():
    arguments = describe(Ignoring(nn.ReLU()))["init_args"]
    assert arguments["net"].startswith(NOT_RECORDED)
    assert arguments["lr"] == 0.1


@pytest.mark.slow
@pytest.mark.essential
def test_a_set_in_a_function_has_one_description_in_all_processes():
    program = (
        "from fl_lightning.config.recorded import describe; print(describe(lambda p: p in {'a', 'b', "
        "'c', 'dd'})['code_sha256'])"
    )
    run_with = [
        {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        for seed in ("1", "2")
    ]
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True
        ).stdout
        for env in run_with
    }
    assert len(found) == 1
    assert found != {""}


def test_descriptions():
    x, y = 1, 2

    def one(value):
        return value + x

    def other(value):
        return value + y

    assert describe(one) == describe(one) != describe(other)
    assert describe(lambda p: SGD(p, lr=0.1)) != describe(lambda p: SGD(p, lr=0.2))
    assert describe(SGD) == "torch.optim.sgd.SGD"
    assert describe(torch.optim.SGD) == describe(SGD)
    assert describe(np.arange(3)) == describe(np.arange(3)) != describe(np.arange(4))
    assert describe(torch.zeros(2, 2))["shape"] == [2, 2]
    assert (
        describe(list(range(2000)))
        == describe(tuple(range(2000)))
        != describe(list(range(1, 2001)))
    )
    assert describe(list(range(2000)))["length"] == 2000
    assert describe([np.float64(0.5), (1, None)]) == [0.5, [1, None]]
    assert describe(Dirichlet(beta=0.5)) == {
        "class_path": "fl_lightning.data.partition.Dirichlet",
        "init_args": {"beta": 0.5, "min_size": 1},
    }
    assert describe(TrimmedMean())["init_args"] == {"trim": 0.1}
    assert describe(CosineSchedule(0, 1, rounds=3))["init_args"] == {
        "start": 0,
        "end": 1,
        "rounds": 3,
    }
    assert describe(nn.Linear(1, 1)).startswith(NOT_RECORDED)
    method = FedMPQKD(alpha=0.3, bits=3)
    assert method.__class__.__init__.__name__ == "__init__"
    settings = describe(method)["init_args"]
    assert (settings["alpha"], settings["bits"], settings["max_share"], settings["network"]) == (
        0.3,
        3,
        1.0,
        "small_cnn",
    )


class Remembers(Meter):
    def __init__(self, kept: list, **others) -> None:
        self.kept, self.others = kept, others


def test_arguments_are_recorded_as_they_were_given(tmp_path):
    kept, array, callbacks = [[1], {"a": {2}}], np.zeros(2), []
    source = Dirichlet(beta=0.5)
    made = Remembers(kept, array=array, source=(source, array))
    before = describe(Remembers([[1], {"a": {2}}], array=np.zeros(2), source=(source, np.zeros(2))))
    trainer = FederatedTrainer(callbacks=callbacks)
    callbacks.append(made)
    kept.append(3), kept[0].append(3), kept[1]["a"].add(3)
    array += 1
    assert describe(made) == describe(copy.deepcopy(made)) == before
    assert describe(trainer)["init_args"]["callbacks"] == []
    assert made.kept is kept


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: loads(dumps(one))])
def test_a_copy_is_described_as_its_original(again):
    original = LabelNoise(clients=0.4, round=3)
    copied = again(again(original))
    assert type(copied) is LabelNoise
    assert vars(copied) == vars(original)
    assert describe(copied) == describe(original)


def test_a_copied_method_is_not_continued_with_other_arguments(tmp_path):
    def run_of(mu, **settings):
        method = copy.deepcopy(FedProx(mu=mu, network=SMALL, optimizer=optimizer()))
        return run(method, data_of("FedAvg"), tmp_path, max_rounds=1, local_epochs=1, **settings)

    run_of(5.0)
    (made,) = (path.parent for path in tmp_path.glob("*/*/config.yaml"))
    assert config_of(made)["model.init_args.mu"] == 5.0
    with pytest.raises(InputError, match=r"mu: 5.0 -> 0.1"):
        run_of(0.1, ckpt_path=str(made))


class CopiesItself(Stressor):
    def __init__(self, rate: float = 0.5) -> None:
        self.rate = rate

    def __deepcopy__(self, memo):
        copied = object.__new__(type(self))
        copied.rate = self.rate
        return copied


def test_a_copy_of_unknown_arguments_is_not_described_by_defaults():
    rate = describe(copy.deepcopy(CopiesItself(rate=0.9)))["init_args"]["rate"]
    assert rate.startswith(NOT_RECORDED)


@dataclass
class DataclassNoise(LabelNoise):
    share: float = 0.1
    seen: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        LabelNoise.__init__(self, clients=self.share)


@dataclass(frozen=True)
class FrozenStressor(Stressor):
    rate: float = 0.1


@pytest.mark.parametrize(
    ("made", "arguments"),
    [
        (DataclassNoise(share=0.7), {"share": 0.7}),
        (FrozenStressor(rate=0.9), {"rate": 0.9}),
        (copy.deepcopy(FrozenStressor(0.8)), {"rate": 0.8}),
    ],
)
def test_a_dataclass_is_described_by_its_fields(made, arguments):
    assert describe(made)["init_args"] == arguments


@pytest.mark.parametrize("name", callbacks.__all__)
def test_the_recorded_path_of_a_callback_can_be_imported(name):
    cls = getattr(callbacks, name)
    assert imported(import_path(cls)) is cls
