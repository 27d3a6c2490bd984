"""What a user of Lightning types first is answered with what to write."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from lightning import LightningDataModule
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score
from toy import ready, sgd

from callbacks import StragglerDropout
from fl_lightning.clock import Clock
from fl_lightning.conformance.toy import images, trainer_in
from fl_lightning.data import FederatedImages
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.trainer import FederatedTrainer


class NoBase(FedAvg):
    def __init__(self):
        self.mu = 0.1


class OnlyModule(FedAvg):
    def __init__(self):
        nn.Module.__init__(self)


METHOD, DATA = FedAvg(), ready()


@pytest.mark.parametrize(
    ("method", "data", "seed", "says"),
    [
        (
            LightningModule(),
            DATA,
            0,
            r"method=LightningModule; .*write FedAvg\(module=LightningModule\(...\)\)",
        ),
        (nn.Linear(1, 1), DATA, 0, r"method=Linear; .*write FedAvg\(network=Linear\)"),
        (FedAvg, DATA, 0, r"method=FedAvg; it is a class, .*write FedAvg\(...\)"),
        (DATA, METHOD, 0, r"the method comes first: fit\(method, data\)"),
        (METHOD, type(DATA), 0, "it is a class, and an object is needed"),
        (METHOD, LightningDataModule(), 0, "write fl_lightning.data.DataModuleData"),
        (METHOD, DataLoader([1]), 0, "write fl_lightning.data.DatasetData"),
        (METHOD, None, 0, "data=NoneType; it is no fl_lightning.FederatedData"),
        (
            NoBase(),
            DATA,
            0,
            r"its constructor does not call .*begin NoBase.__init__ with super\(\).__init__",
        ),
        (OnlyModule(), DATA, 0, "its constructor does not call that of fl_lightning.Method"),
        (
            METHOD,
            DATA,
            2**63,
            "seed=9223372036854775808; a seed is an int, at least 0 and below 2.63",
        ),
        (METHOD, DATA, "1", "seed='1'; it is str, where an int is needed"),
        (METHOD, DATA, 1.5, "seed=1.5; it is float, where an int is needed"),
        (METHOD, DATA, -1, "seed=-1; a seed is an int"),
        (METHOD, DATA, torch.tensor(1), "it is Tensor, where an int is needed"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "test", "export", "prepare"])
def test_it_is_said_what_to_write(command, method, data, seed, says, tmp_path):
    with pytest.raises(InputError, match=says):
        getattr(trainer_in(tmp_path), command)(method, data, seed=seed)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["fit", "prepare"])
def test_a_run_that_begins_has_a_seed(command, tmp_path):
    with pytest.raises(InputError, match=r"seed=None; a seed is an int, at least 0 and below 2.63"):
        getattr(trainer_in(tmp_path), command)(METHOD, DATA, seed=None)


def test_before_the_first_run_there_is_no_directory(tmp_path):
    with pytest.raises(MisuseError, match="it has none before its first fit"):
        _ = trainer_in(tmp_path).run_dir


@pytest.mark.parametrize("logger", ["mlflow", 3, None, [CSVLogger("logs"), "csv"], CSVLogger])
def test_what_is_no_logger_is_refused_before_there_is_a_directory(logger, tmp_path):
    with pytest.raises(InputError, match="loggers; write logger=True, or"):
        trainer_in(tmp_path, logger=logger).fit(METHOD, DATA)
    assert not any(tmp_path.iterdir())


def test_numbers_of_numpy_are_numbers(tmp_path):
    trainer = trainer_in(tmp_path, max_rounds=np.int64(1))
    trainer.fit(
        FedProx(mu=np.float64(0.1), network="mlp", optimizer=sgd()), ready(), seed=np.int64(1)
    )
    settings = yaml.safe_load((trainer.run_dir / "config.yaml").read_text())
    assert (settings["seed_everything"], settings["model"]["init_args"]["mu"]) == (1, 0.1)


def test_one_callback_and_one_metric_need_no_list(tmp_path):
    few = images(metrics=MulticlassF1Score)
    trainer = trainer_in(tmp_path, max_rounds=1, callbacks=StragglerDropout(probability=0.5))
    trainer.fit(FedAvg(network="small_cnn", optimizer=sgd(0.05)), few, seed=0)
    assert "test/f1_score" in trainer.history
    settings = yaml.safe_load((trainer.run_dir / "config.yaml").read_text())
    assert settings["trainer"]["callbacks"][0]["class_path"].endswith("StragglerDropout")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            partial(FederatedTrainer, max_epochs=3),
            "no argument 'max_epochs'; write max_rounds for rounds of the federation, local_epochs",
        ),
        (partial(FederatedTrainer, num_rounds=3), "no argument 'num_rounds'; write max_rounds"),
        (partial(FedProx, mue=0.1), "FedProx has no argument 'mue'; write mu"),
        (partial(FedProx, lr=0.1), "FedProx has no argument 'lr'; write optimizer"),
    ],
)
def test_an_argument_that_there_is_not_is_told_its_nearest(make, said):
    with pytest.raises(TypeError, match=said):
        make()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            partial(FederatedTrainer, sampler="PowerOfChoice"),
            "sampler='PowerOfChoice'; it is str, and an object of Sampler is needed; "
            "write sampler=PowerOfChoice(...)",
        ),
        (partial(FederatedTrainer, topology="gossip"), "write topology=Gossip(...)"),
        (partial(FederatedTrainer, privacy=True), "it is bool, and an object of ClientPrivacy"),
        (partial(FederatedTrainer, clock="phones.csv"), "write clock as an object of Clock"),
        (partial(Clock, devices="table.csv"), "write devices as an object of one of SameDevice, "),
        (partial(FedAvg, average="CoordinateMedian"), "write average=CoordinateMedian(...)"),
        (partial(FedAvg, server_optimizer=partial(SGD, lr=1.0)), "it is partial, and an object of"),
        (partial(images, partition="iid"), "write partition=IID(...)"),
        (partial(FederatedTrainer, rounds=5), "rounds=5; it is no number; write max_rounds=5"),
        (partial(FedAvg, adapter_average=3), "adapter_average 3; one of factors, frozen_a, "),
    ],
)
def test_a_part_of_a_run_is_an_object(make, said):
    with pytest.raises(InputError, match=re.escape(said)):
        make()


def test_a_part_that_is_called_may_be_a_function():
    def halves(labels, num_clients, seed):
        return np.array_split(np.arange(len(labels)), num_clients)

    assert FederatedImages(partition=halves).partition is halves
